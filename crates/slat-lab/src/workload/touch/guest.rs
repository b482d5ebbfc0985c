//! A guest that touches pages once: those of its part, or those of a trace.

use std::sync::Arc;

use crate::crew::{Guest, RunOn, Vcpu};
use crate::guest::{GuestMemory, Pass, Program, Watch};
use crate::layout::Layout;
use crate::trace::{Recorder, Run, Trace};

/// What a guest touches.
#[derive(Debug)]
pub(crate) enum Path {
    /// Every page of the program's part.
    Part(Program, Pass),
    /// The pages of a trace, in memory that begins there.
    Trace(Arc<Trace>, u64),
}

/// The guest.
#[derive(Debug)]
pub(crate) struct Toucher {
    path: Path,
    pen: Option<Pen>,
}

/// Writes down pages of guest memory.
#[derive(Debug)]
struct Pen {
    recorder: Recorder,
    gpa: u64,
    page: u64,
}

impl Toucher {
    /// A guest that records what it touches if it is told where its memory lies.
    pub(crate) fn new(path: Path, record: Option<&Layout>) -> Self {
        let pen = |layout: &Layout| Pen {
            recorder: Recorder::default(),
            gpa: layout.gpa,
            page: layout.guest_page,
        };
        Self { path, pen: record.map(pen) }
    }

    /// What it has recorded.
    pub(crate) fn into_recorded(self) -> Vec<Run> {
        self.pen.map(|pen| pen.recorder.into_runs()).unwrap_or_default()
    }
}

impl Guest for Toucher {
    type Order = ();

    fn accesses(&self) -> u64 {
        match &self.path {
            Path::Part(program, _) => program.pages(),
            Path::Trace(trace, _) => trace.touches(),
        }
    }
}

impl<V: Vcpu> RunOn<V> for Toucher {
    fn run(&mut self, vcpu: &mut V, (): (), watch: Watch<'_>) -> Result<(), String> {
        let touched = match &mut self.pen {
            Some(pen) => self.path.follow(&mut Recorded { memory: vcpu, pen }, watch),
            None => self.path.follow(vcpu, watch),
        };
        touched.map_err(|error| error.to_string())
    }
}

impl Path {
    fn follow<M: GuestMemory>(&mut self, memory: &mut M, watch: Watch<'_>) -> Result<(), M::Error> {
        let (trace, gpa) = match self {
            Self::Part(program, pass) => return program.pass(memory, *pass, watch.pulse),
            Self::Trace(trace, gpa) => (trace, *gpa),
        };
        for run in &trace.runs {
            for page in run.first..run.first + run.count {
                let gpa = gpa + page * trace.page;
                if run.write {
                    memory.store(gpa, page)?;
                } else {
                    memory.load(gpa)?;
                }
                watch.beat();
            }
        }
        Ok(())
    }
}

/// Memory of which every access is written down.
struct Recorded<'a, M> {
    memory: &'a mut M,
    pen: &'a mut Pen,
}

impl Pen {
    fn touch(&mut self, gpa: u64, write: bool) {
        self.recorder.touch((gpa - self.gpa) / self.page, write);
    }
}

impl<M: GuestMemory> GuestMemory for Recorded<'_, M> {
    type Error = M::Error;

    fn load(&mut self, gpa: u64) -> Result<u64, M::Error> {
        self.pen.touch(gpa, false);
        self.memory.load(gpa)
    }

    fn store(&mut self, gpa: u64, value: u64) -> Result<(), M::Error> {
        self.pen.touch(gpa, true);
        self.memory.store(gpa, value)
    }
}
