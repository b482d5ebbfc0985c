//! The threads of vCPUs: told what to do, waited for, and ended whatever they do.
//!
//! Whoever waits looks up now and then: whether somebody asked for the end, and whether the guests get on. If not, all
//! vCPUs are kicked until each has left its guest.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::interrupt;
use super::memory::Memory;
use super::program::Parameters;
use super::vcpu::{Kick, Met, Order, Stop, Vcpu};
use crate::failure::Failure;
use crate::pinning::Pinning;

/// So long guests may do nothing at all.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// How often whoever waits looks up.
const LOOK_UP: Duration = Duration::from_millis(50);
/// Who has not looked for longer was kept from it, as the guests were.
const KEPT: Duration = Duration::from_secs(1);
/// From one kick to the next.
const AGAIN: Duration = Duration::from_millis(2);

/// Something that a vCPU's thread does, with what it calls while the dirty ring is full.
pub(crate) type Task = Box<dyn FnOnce(&mut Vcpu, &dyn Fn() -> bool) -> Result<(), Stop> + Send>;

/// What a thread says.
#[derive(Debug)]
enum Word {
    RingFull,
    /// When it was, what was met so far, and how it ended.
    Done(Instant, Met, Result<(), Stop>),
}

/// What others know of a vCPU.
#[derive(Debug)]
struct Seat {
    tasks: Sender<Task>,
    /// The ring has room again.
    resume: Sender<()>,
    kick: Arc<Kick>,
    system: (Arc<Memory>, u64),
    thread: JoinHandle<Vcpu>,
    busy: bool,
    met: Met,
}

impl Seat {
    fn parameters(&self) -> &Parameters {
        self.system.0.view(self.system.1)
    }
}

/// All vCPUs of a VM.
#[derive(Debug)]
pub(crate) struct Crew {
    seats: Vec<Seat>,
    words: Receiver<(usize, Word)>,
    patience: Duration,
    /// Accesses of all when they were last seen to get on, and when that was.
    progress: (u64, Instant),
    /// When somebody last looked up.
    looked: Instant,
    /// When the last of them was done.
    end: Instant,
}

/// A crew that has to be told to end.
#[derive(Debug)]
pub(crate) enum Trouble {
    Interrupted,
    Hanging(Duration),
    Broken { vcpu: usize, why: Stop },
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interrupted => f.write_str("interrupted"),
            Self::Hanging(time) => {
                write!(f, "no vCPU got on for {} s; they were kicked", time.as_secs_f64())
            }
            Self::Broken { vcpu, why } => write!(f, "vCPU {vcpu}: {why}"),
        }
    }
}

impl Crew {
    /// Starts a thread for each vCPU. They wait until they are told something.
    ///
    /// # Errors
    /// [`Failure::Run`].
    pub(crate) fn start(
        vcpus: Vec<Vcpu>,
        pinning: Option<&Pinning>,
        patience: Duration,
    ) -> Result<Self, Failure> {
        interrupt::let_kicks_arrive()?;
        let (speak, words) = mpsc::channel();
        let now = Instant::now();
        let (seats, progress) = (Vec::new(), (0, now));
        let mut crew = Self { seats, words, patience, progress, looked: now, end: now };
        for (index, vcpu) in vcpus.into_iter().enumerate() {
            let seat = seat(index, vcpu, pinning.cloned(), speak.clone());
            let seat = seat.map_err(|error| Failure::Run(format!("no thread for a vCPU: {error}")));
            crew.seats.push(seat?);
        }
        Ok(crew)
    }

    /// Tells every vCPU what to do; when the first was told.
    pub(crate) fn tell(&mut self, order: impl Fn(u32) -> Order) -> Instant {
        self.set(|index| {
            let order = order(index);
            Box::new(move |vcpu, wait| vcpu.follow(&order, wait))
        })
    }

    /// As [`tell`](Self::tell), for what is not the guest's business.
    pub(crate) fn set(&mut self, task: impl Fn(u32) -> Task) -> Instant {
        let start = Instant::now();
        (self.progress, self.looked) = ((self.accesses(), start), start);
        for (index, seat) in (0..).zip(&mut self.seats) {
            // A thread that has ended has said why, or will be found to be gone.
            seat.busy = seat.tasks.send(task(index)).is_ok();
        }
        start
    }

    /// Leaves guests so much more time in which they do nothing.
    pub(crate) fn wait_longer(&mut self, time: Duration) {
        self.patience = self.patience.saturating_add(time);
    }

    /// Has guests stop that would run for ever.
    pub(crate) fn stop(&self) {
        self.seats.iter().for_each(|seat| seat.parameters().stop().store(1, Ordering::Relaxed));
    }

    /// Waits until all have done what they were told; when the last of them had. Meanwhile, `look` is called now and
    /// then, and `full` when a dirty ring is full.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn wait<E: From<Trouble>>(
        &mut self,
        look: &mut dyn FnMut(u64),
        full: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<Instant, E> {
        while self.seats.iter().any(|seat| seat.busy) {
            self.listen(LOOK_UP, full)?;
            look(self.accesses());
        }
        self.seats.iter().for_each(|seat| seat.parameters().stop().store(0, Ordering::Relaxed));
        Ok(self.end)
    }

    /// Waits until every vCPU that is at work has done so many more accesses.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub(crate) fn wait_for_accesses<E: From<Trouble>>(
        &mut self,
        accesses: u64,
        full: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let before: Vec<_> = self.seats.iter().map(|seat| completed(seat) + accesses).collect();
        let late = |seats: &[Seat]| {
            seats.iter().zip(&before).any(|(seat, goal)| seat.busy && completed(seat) < *goal)
        };
        let mut patient = 0;
        while late(&self.seats) {
            // The first of them come soon.
            patient += 1;
            let time = if patient < 100 { Duration::ZERO } else { Duration::from_micros(100) };
            self.listen(time, full)?;
            thread::yield_now();
        }
        Ok(())
    }

    /// Lets guests run for so long.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub(crate) fn rest<E: From<Trouble>>(
        &mut self,
        time: Duration,
        full: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let end = Instant::now() + time;
        while let Some(rest) = end.checked_duration_since(Instant::now()) {
            self.listen(rest.min(LOOK_UP), full)?;
        }
        Ok(())
    }

    /// Listens to what threads say, for so long at most, and looks up.
    fn listen<E: From<Trouble>>(
        &mut self,
        time: Duration,
        full: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        match self.words.recv_timeout(time) {
            Ok((index, Word::RingFull)) => {
                full()?;
                // A thread that has ended needs no room.
                let _ = self.seats[index].resume.send(());
            }
            Ok((index, Word::Done(at, met, result))) => {
                let seat = &mut self.seats[index];
                (seat.busy, seat.met) = (false, met);
                self.end = self.end.max(at);
                result.map_err(|why| Trouble::Broken { vcpu: index, why })?;
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => self.look_up()?,
        }
        Ok(())
    }

    /// Whether all is well.
    ///
    /// # Errors
    /// Somebody asked for the end, or nobody gets on.
    pub(crate) fn look_up(&mut self) -> Result<(), Trouble> {
        if interrupt::is_asked() {
            return Err(Trouble::Interrupted);
        }
        let (accesses, now) = (self.accesses(), Instant::now());
        if accesses != self.progress.0 {
            self.progress = (accesses, now);
        }
        self.progress.1 = without_gap(self.progress.1, self.looked, now);
        self.looked = now;
        let busy = self.seats.iter().any(|seat| seat.busy);
        if busy && now.saturating_duration_since(self.progress.1) >= self.patience {
            return Err(Trouble::Hanging(self.patience));
        }
        Ok(())
    }

    /// What each vCPU had met when it was last done.
    pub(crate) fn met(&self) -> Vec<Met> {
        self.seats.iter().map(|seat| seat.met).collect()
    }

    /// Accesses of all guests since they were made.
    pub(crate) fn accesses(&self) -> u64 {
        self.seats.iter().map(completed).sum()
    }

    /// Ends all threads; their vCPUs.
    pub(crate) fn dismiss(mut self) -> Vec<Vcpu> {
        self.end_all()
    }

    /// Kicks everybody until all threads have ended.
    fn end_all(&mut self) -> Vec<Vcpu> {
        let mut vcpus = Vec::new();
        let seats = self.seats.drain(..);
        let leave = |Seat { tasks, resume, kick, thread, .. }: Seat| {
            drop((tasks, resume));
            kick.kick();
            (kick, thread)
        };
        let leaving: Vec<_> = seats.map(leave).collect();
        for (kick, thread) in leaving {
            while !thread.is_finished() {
                thread::sleep(AGAIN);
                kick.kick();
            }
            // A thread that has panicked has said so.
            vcpus.extend(thread.join().ok());
        }
        vcpus
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.end_all();
    }
}

/// When guests last got on, without the time in which nobody looked because this process was stopped.
fn without_gap(progress: Instant, looked: Instant, now: Instant) -> Instant {
    let gap = now.saturating_duration_since(looked);
    if gap > KEPT { (progress + gap).min(now) } else { progress }
}

fn completed(seat: &Seat) -> u64 {
    // Acquire: what the access did comes before whoever sees it completed.
    seat.parameters().accesses().load(Ordering::Acquire)
}

fn seat(
    index: usize,
    mut vcpu: Vcpu,
    pinning: Option<Pinning>,
    speak: Sender<(usize, Word)>,
) -> io::Result<Seat> {
    let (tasks, todo) = mpsc::channel::<Task>();
    let (resume, resumed) = mpsc::channel();
    let (kick, system) = (vcpu.kick(), vcpu.system());
    let thread = thread::Builder::new().name(format!("vcpu-{index}"));
    let thread = thread.spawn(move || {
        vcpu.on_thread(|vcpu| {
            let wait = || speak.send((index, Word::RingFull)).is_ok() && resumed.recv().is_ok();
            let pinned = pinning.map_or(Ok(()), |pinning| pinning.pin_vcpu(index));
            while let Ok(task) = todo.recv() {
                let result = match &pinned {
                    Ok(()) => task(vcpu, &wait),
                    Err(why) => Err(Stop::Broken(why.clone())),
                };
                let done = Word::Done(Instant::now(), vcpu.met(), result);
                if speak.send((index, done)).is_err() {
                    break;
                }
            }
        });
        vcpu
    })?;
    Ok(Seat { tasks, resume, kick, system, thread, busy: false, met: Met::default() })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::contents::Words;
    use crate::kvm::program::What;
    use crate::kvm::system;
    use crate::kvm::vm::{Plan, Reach, Slot, Vm};

    const GPA: u64 = 1 << 32;
    const SIZE: u64 = 1 << 20;

    /// A VM of two vCPUs; nothing where there is no KVM.
    fn vm(reach: Reach) -> Option<Vm> {
        match system::open() {
            Ok(kvm) => Some(Vm::new(&kvm, Plan::new(2, reach)).unwrap()),
            Err(why) => {
                let _ = writeln!(io::stderr(), "SKIPPED: {why}");
                None
            }
        }
    }

    /// Two vCPUs on a MiB of memory, in a memslot or not; nothing where there is no KVM.
    fn crew(memory: &Memory, there: bool, patience: Duration) -> Option<(Vm, Crew)> {
        let vm = vm(Reach { gpa: GPA, size: SIZE, page: 4096 })?;
        let slot = Slot { id: 0, gpa: GPA, size: SIZE, memory, offset: 0, logged: false };
        if there {
            vm.set_slot(slot).unwrap();
        }
        let crew = Crew::start(vm.vcpus().unwrap(), None, patience).unwrap();
        Some((vm, crew))
    }

    fn wait(crew: &mut Crew) -> Result<Instant, Trouble> {
        crew.wait(&mut |_| {}, &mut || Ok(()))
    }

    #[test]
    fn time_in_which_the_process_was_stopped_is_not_the_guests() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs_f64(seconds);
        // Stopped for 32 s, five seconds after the last progress.
        assert_eq!(without_gap(at(0.0), at(5.0), at(37.0)), at(32.0));
        assert_eq!(without_gap(at(0.0), at(5.0), at(5.9)), at(0.0));
        // Progress was seen after it.
        assert_eq!(without_gap(at(37.0), at(5.0), at(37.0)), at(37.0));
    }

    #[test]
    fn a_guest_that_hangs_is_found_and_kicked() {
        let memory = Memory::plain(SIZE).unwrap();
        let Some((_vm, mut crew)) = crew(&memory, true, Duration::from_millis(300)) else { return };
        crew.tell(|_| Order { what: What::Spin, ..Order::read(GPA, 4096, 1) });
        let trouble = wait(&mut crew).unwrap_err();
        assert!(matches!(trouble, Trouble::Hanging(_)), "{trouble}");
        assert_eq!(crew.dismiss().len(), 2);
    }

    #[test]
    fn a_guest_that_gets_on_is_left_alone() {
        let memory = Memory::plain(SIZE).unwrap();
        let Some((_vm, mut crew)) = crew(&memory, true, Duration::from_millis(300)) else { return };
        crew.tell(|_| Order { forever: true, ..Order::write(GPA, 4096, SIZE / 4096) });
        crew.rest::<Trouble>(Duration::from_millis(900), &mut || Ok(())).unwrap();
        crew.stop();
        wait(&mut crew).unwrap();
        assert!(crew.dismiss().iter().all(|vcpu| vcpu.accesses() > 0));
    }

    #[test]
    fn a_store_outside_of_memory_is_told_by_its_address_and_ends_the_others() {
        let memory = Memory::plain(SIZE).unwrap();
        let Some((_vm, mut crew)) = crew(&memory, false, PATIENCE) else { return };
        crew.tell(|index| match index {
            0 => Order::write(GPA + 0x3000, 4096, 1),
            _ => Order { what: What::Spin, ..Order::read(GPA, 4096, 1) },
        });
        let trouble = wait(&mut crew).unwrap_err();
        assert!(trouble.to_string().contains("vCPU 0: a store to 0x100003000"), "{trouble}");
        assert_eq!(crew.dismiss().len(), 2);
    }

    #[test]
    fn a_guest_reaches_all_its_memory_whatever_pages_its_cpu_has() {
        for page in [4096, 2 << 20, 1 << 30] {
            let size = page.max(2 << 20);
            let Some(vm) = vm(Reach { gpa: GPA, size, page }) else { return };
            let memory = Memory::plain(size).unwrap();
            let (id, logged) = (0, false);
            vm.set_slot(Slot { id, gpa: GPA, size, memory: &memory, offset: 0, logged }).unwrap();
            let mut crew = Crew::start(vm.vcpus().unwrap(), None, PATIENCE).unwrap();
            crew.tell(|_| Order { value: page, ..Order::write(GPA, size - 4096, 2) });
            wait(&mut crew).unwrap();
            let word = |offset| memory.word(offset).unwrap().load(Ordering::Relaxed);
            assert_eq!((word(0), word(size - 4096)), (page, page));
        }
    }
}
