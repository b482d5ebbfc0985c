//! `demand-paging`: how fast guests get pages, as in the kernel's `demand_paging_test`.
//!
//! Every vCPU writes to each page of its part once. With `userfault` a page must be served before: see
//! [`Served`]. With a check the vCPUs then read everything back, and every page must have come once.

use alloc::string::String;

use serde::Serialize;
use slat::{Gpa, Lookup};
use slat_metal::layout::Layout;
use slat_metal::options::{Options, Userfault};
use slat_metal::program::PAGE;
use slat_metal::report::{GuestConfig, Phase};

use crate::guest::{Equipment, Guest};
use crate::served::{Served, fill, is_filled};
use crate::stage::{Stage, config, play};

#[derive(Serialize)]
struct Config {
    #[serde(flatten)]
    guest: GuestConfig,
    overlap: bool,
    userfault: Option<Userfault>,
    single: bool,
    delay_microseconds: u32,
    readers: u32,
}

#[derive(Serialize)]
struct Results {
    demand: Demand,
}

/// Guest pages by time, and what was served.
#[derive(Serialize)]
struct Demand {
    pages_per_second_per_vcpu: f64,
    pages_per_second: f64,
    userfault: Option<Done>,
}

#[derive(Clone, Copy, Serialize)]
struct Done {
    requests: u64,
    served: u64,
    duplicates: u64,
}

/// What was wrong.
#[derive(Debug, Default, Serialize)]
struct Found {
    pages: u64,
    /// Pages that a guest has written and that were not served, or are not mapped.
    unserved: u64,
    /// Pages that are mapped or served although no guest has touched any of the page that is served.
    unasked: u64,
    /// Pages that were served more than once.
    miscounted: u64,
    /// Translations that lead elsewhere than to the page.
    elsewhere: u64,
    /// Pages without the contents that were copied in.
    unfilled: u64,
    wrong_loads: u64,
    misplaced: u64,
    violations: u64,
    violation: Option<&'static str>,
}

/// Runs the workload and prints its report.
pub(super) fn run(options: &Options, layout: &Layout) -> Result<(), String> {
    let pages = layout.size.div_ceil(options.backing);
    let served = options.userfault.map(|mode| Served::new(mode, pages, options.backing));
    let guest =
        Guest::new(Equipment { options, layout, hardware_dirty: false, dirty_ring: None, served })?;
    let config = Config {
        guest: config(options, &guest),
        overlap: options.overlap,
        userfault: options.userfault,
        // Whoever asks serves: there are no queues, and nobody who reads them.
        single: true,
        delay_microseconds: 0,
        readers: 0,
    };
    let (phases, (done, found)) = play(guest, |stage| Ok(all(stage, options)))?;
    let results = Results { demand: demand(&phases, layout, done) };
    super::print(options, config, phases, results, found)
}

fn all(stage: &mut Stage<'_>, options: &Options) -> (Option<Done>, Option<Found>) {
    if options.userfault == Some(Userfault::Minor) {
        stage.begin("fill", None);
        let start = stage.now();
        fill(stage.guest.vm.host(), 0, stage.guest.layout.size);
        let took = stage.now() - start;
        stage.end("fill", None, took);
    }
    stage.order("demand", None, |stage, index| stage.pass_of(index, 100));
    let done = stage.vm().host().served.as_ref().map(|served| {
        let (requests, served) = served.done();
        Done { requests, served, duplicates: requests - served }
    });
    if !options.check {
        return (done, None);
    }
    let mut found = Found::look(stage);
    stage.order("check", None, |stage, index| stage.pass_of(index, 0));
    found.wrong_loads = stage.wrong_loads();
    found.misplaced = stage.misplaced();
    (done, Some(found))
}

fn demand(phases: &[Phase], layout: &Layout, userfault: Option<Done>) -> Demand {
    let seconds =
        phases.iter().find(|phase| phase.name == "demand").map_or(0.0, |phase| phase.seconds);
    let part = layout.part(0);
    let rate = (part.end - part.start) as f64 / seconds;
    Demand {
        pages_per_second_per_vcpu: rate,
        pages_per_second: rate * f64::from(layout.vcpus),
        userfault,
    }
}

impl Found {
    /// Looks at every page, when the guests have paused: all of them were written.
    fn look(stage: &Stage<'_>) -> Self {
        let Guest { vm, layout, .. } = stage.guest;
        let served = vm.host().served.as_ref();
        let mut found = Self { pages: layout.pages(), ..Self::default() };
        for page in 0..layout.pages() {
            let offset = page * PAGE;
            let leaf =
                vm.tree().look_up(&stage.worker.participant().pin(), Gpa(layout.gpa + offset));
            let is_present = served.is_none_or(|served| served.is_present(offset));
            match leaf {
                Ok(Lookup::Mapped { output, .. }) if is_present => {
                    found.elsewhere += u64::from(vm.host().output(offset) != Some(output));
                }
                _ => found.unserved += 1,
            }
            found.unfilled += u64::from(served.is_some() && !is_filled(vm.host(), page));
        }
        if let Some(served) = served {
            found.miscounted = served.done().1.abs_diff(served.present());
        }
        found
    }
}
