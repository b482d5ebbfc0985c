//! The command line: `key=value` words, separated by spaces.
//!
//! | key | value | default |
//! |---|---|---|
//! | `workload` | `dirty-log`, `page-table`, `demand-paging`, `dirty-log-test` | `dirty-log` |
//! | `vcpus` | how many, each on a CPU of its own | all CPUs |
//! | `bytes` | memory of each vCPU (`page-table`: of all, `dirty-log-test`: of all, and three pages more) | `64M` |
//! | `backing` | pages that the host gives: `4k`, `2m`, `1g` | `4k` |
//! | `gpa` | where guest memory begins | the top of guest-physical addresses |
//! | `ipa-bits` | bits of guest-physical addresses | 40 |
//! | `hardware-access` | the access flag is set by hardware: `on`, `off`, or where it can: `auto` | `auto` |
//! | `eager-split` | blocks are split ahead of write faults, so much at once: `2M`, `1G`, `off` | `off` |
//! | `fault-around` | pages that a fault maps | 1 |
//! | `check` | contents are compared: `on`, `off` | `off` |
//! | `clock` | `real`, or `instructions`: time is counted in them, see [`Clock`] | `real` |
//! | `invalidate` | `off`: the hypervisor drops invalidations, to see that the check notices | `on` |
//! | `watchdog` | seconds after which a guest that does nothing is given up | 20 |
//!
//! `dirty-log`: `iterations` (2), `writes` (per cent, 100), `random` (`on`, `off`), `seed` (1), `log` (`bitmap`, `ring`,
//! `hardware`), `ring` (entries, 65536), `manual-protect` (`on`, `off`), `overlap` (`off`), `slots` (1),
//! `run-while-disabling` (`off`). `dirty-log-test`: `ways` (`dirty-log`, `clear-log`, `dirty-ring`, `hardware`, `all`),
//! `iterations` (32), `seed`, `ring`. `demand-paging`: `overlap`, `userfault` (`missing`, `minor`, `off`).

use alloc::format;
use alloc::string::String;

use serde::Serialize;

/// What runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// How long it takes guests to write, and the hypervisor to log it.
    DirtyLog,
    /// What it takes to create, update and adjust translations.
    PageTable,
    /// How fast guests get pages.
    DemandPaging,
    /// Whether dirty logs are true.
    DirtyLogTest,
}

impl Workload {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        let found = WORKLOADS.iter().find(|(_, workload)| *workload == self);
        found.map_or("", |(name, _)| name)
    }
}

/// How time is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// The system counter.
    Real,
    /// A counter that goes up once for each instruction, which takes a machine where each lasts a nanosecond, such as
    /// QEMU with `-icount shift=0,sleep=off`. Time that the engine itself takes is told apart.
    Instructions,
}

/// How dirty pages are noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogKind {
    /// A bit a page, which faults set.
    Bitmap,
    /// Each vCPU's ring, into which faults put pages.
    Ring,
    /// Dirty state that hardware keeps in the entries.
    Hardware,
}

/// A way of logging of `dirty-log-test`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Collections clear and protect.
    DirtyLog,
    /// They are cleared by the caller; every page counts as written at first.
    ClearLog,
    /// Each vCPU has a ring.
    DirtyRing,
    /// Hardware keeps dirty state.
    Hardware,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::DirtyLog, Self::ClearLog, Self::DirtyRing, Self::Hardware];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::DirtyLog => "dirty-log",
            Self::ClearLog => "clear-log",
            Self::DirtyRing => "dirty-ring",
            Self::Hardware => "hardware",
        }
    }
}

/// Which pages of `demand-paging` come only when somebody has served them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Userfault {
    /// There is no page: it is copied in.
    Missing,
    /// There is one, not mapped yet: it is let through.
    Minor,
}

/// Everything that can be asked, with all defaults filled in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// What runs.
    pub workload: Workload,
    /// `None`: as many as there are CPUs.
    pub vcpus: Option<u32>,
    /// Bytes of guest memory, as the workload counts them.
    pub bytes: u64,
    /// Bytes of a page that the host gives.
    pub backing: u64,
    /// `None`: the top.
    pub gpa: Option<u64>,
    /// Bits of guest-physical addresses.
    pub ipa_bits: u32,
    /// `None`: where hardware can.
    pub hardware_access: Option<bool>,
    /// Bytes of a chunk.
    pub eager_split: Option<u64>,
    /// Pages that a fault maps.
    pub fault_around: u32,
    /// Contents are compared.
    pub check: bool,
    /// How time is counted.
    pub clock: Clock,
    /// Invalidations are executed.
    pub invalidate: bool,
    /// Seconds.
    pub watchdog: u64,
    /// Rounds; `None`: what the workload has by default.
    pub iterations: Option<u32>,
    /// Per cent of the accesses that are writes.
    pub writes: u32,
    /// Pages in random order.
    pub random: bool,
    /// Of what is random.
    pub seed: u64,
    /// How dirty pages are noticed.
    pub log: LogKind,
    /// Entries of a dirty ring.
    pub ring: u32,
    /// The bitmap is cleared apart from getting it.
    pub manual_protect: bool,
    /// Every vCPU uses all of memory.
    pub overlap: bool,
    /// Memslots.
    pub slots: u32,
    /// vCPUs go on while the log is disabled.
    pub run_while_disabling: bool,
    /// `None`: all ways.
    pub way: Option<Way>,
    /// Which pages have to be served.
    pub userfault: Option<Userfault>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            workload: Workload::DirtyLog,
            vcpus: None,
            bytes: 64 << 20,
            backing: 4096,
            gpa: None,
            ipa_bits: 40,
            hardware_access: None,
            eager_split: None,
            fault_around: 1,
            check: false,
            clock: Clock::Real,
            invalidate: true,
            watchdog: 20,
            iterations: None,
            writes: 100,
            random: false,
            seed: 1,
            log: LogKind::Bitmap,
            ring: 65536,
            manual_protect: true,
            overlap: false,
            slots: 1,
            run_while_disabling: false,
            way: None,
            userfault: None,
        }
    }
}

impl Options {
    /// Takes a command line apart.
    ///
    /// # Errors
    /// The first word that makes no sense, and why.
    pub fn parse(line: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for word in line.split_ascii_whitespace() {
            let (key, value) =
                word.split_once('=').ok_or_else(|| format!("{word}: not of the form key=value"))?;
            options.set(key, value).map_err(|why| format!("{word}: {why}"))?;
        }
        Ok(options)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), &'static str> {
        match key {
            "workload" => self.workload = one_of(value, &WORKLOADS)?,
            "vcpus" => self.vcpus = Some(number_in(value, 1, 8)? as u32),
            "bytes" => self.bytes = size(value)?,
            "backing" => self.backing = one_of(value, &BACKINGS)?,
            "gpa" => self.gpa = Some(number(value)?),
            "ipa-bits" => self.ipa_bits = number_in(value, 32, 48)? as u32,
            "hardware-access" => self.hardware_access = one_of(value, &AUTO)?,
            "eager-split" => self.eager_split = or_off(value, size)?,
            "fault-around" => self.fault_around = number_in(value, 1, 512)? as u32,
            "check" => self.check = switch(value)?,
            "clock" => self.clock = one_of(value, &CLOCKS)?,
            "invalidate" => self.invalidate = switch(value)?,
            "watchdog" => self.watchdog = number_in(value, 1, 3600)?,
            "iterations" => self.iterations = Some(number_in(value, 2, 1 << 20)? as u32),
            "writes" => self.writes = number_in(value, 0, 100)? as u32,
            "random" => self.random = switch(value)?,
            "seed" => self.seed = number(value)?,
            "log" => self.log = one_of(value, &LOGS)?,
            "ring" => self.ring = number_in(value, 256, 65536)? as u32,
            "manual-protect" => self.manual_protect = switch(value)?,
            "overlap" => self.overlap = switch(value)?,
            "slots" => self.slots = number_in(value, 1, 1 << 15)? as u32,
            "run-while-disabling" => self.run_while_disabling = switch(value)?,
            "ways" => self.way = one_of(value, &WAYS)?,
            "userfault" => self.userfault = or_off(value, |value| one_of(value, &USERFAULTS))?,
            _ => return Err("there is no such key"),
        }
        Ok(())
    }
}

type Choices<T, const N: usize> = [(&'static str, T); N];

const WORKLOADS: Choices<Workload, 4> = [
    ("dirty-log", Workload::DirtyLog),
    ("page-table", Workload::PageTable),
    ("demand-paging", Workload::DemandPaging),
    ("dirty-log-test", Workload::DirtyLogTest),
];
const BACKINGS: Choices<u64, 3> = [("4k", 4 << 10), ("2m", 2 << 20), ("1g", 1 << 30)];
const AUTO: Choices<Option<bool>, 3> = [("on", Some(true)), ("off", Some(false)), ("auto", None)];
const CLOCKS: Choices<Clock, 2> = [("real", Clock::Real), ("instructions", Clock::Instructions)];
const LOGS: Choices<LogKind, 3> =
    [("bitmap", LogKind::Bitmap), ("ring", LogKind::Ring), ("hardware", LogKind::Hardware)];
const WAYS: Choices<Option<Way>, 5> = [
    ("all", None),
    ("dirty-log", Some(Way::DirtyLog)),
    ("clear-log", Some(Way::ClearLog)),
    ("dirty-ring", Some(Way::DirtyRing)),
    ("hardware", Some(Way::Hardware)),
];
const USERFAULTS: Choices<Userfault, 2> =
    [("missing", Userfault::Missing), ("minor", Userfault::Minor)];

fn one_of<T: Copy>(value: &str, choices: &[(&str, T)]) -> Result<T, &'static str> {
    let found = choices.iter().find(|(name, _)| *name == value);
    found.map(|&(_, choice)| choice).ok_or("there is no such value")
}

fn switch(value: &str) -> Result<bool, &'static str> {
    one_of(value, &[("on", true), ("off", false)])
}

fn or_off<T>(
    value: &str,
    parse: impl Fn(&str) -> Result<T, &'static str>,
) -> Result<Option<T>, &'static str> {
    if value == "off" { Ok(None) } else { parse(value).map(Some) }
}

/// A number, decimal or with `0x`.
fn number(value: &str) -> Result<u64, &'static str> {
    let parsed = match value.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => value.parse(),
    };
    parsed.map_err(|_| "not a number")
}

fn number_in(value: &str, least: u64, most: u64) -> Result<u64, &'static str> {
    let number = number(value)?;
    if (least..=most).contains(&number) { Ok(number) } else { Err("out of range") }
}

/// Bytes, with an optional K, M or G.
fn size(value: &str) -> Result<u64, &'static str> {
    let shift = match value.bytes().last() {
        Some(b'K' | b'k') => 10,
        Some(b'M' | b'm') => 20,
        Some(b'G' | b'g') => 30,
        _ => 0,
    };
    let digits = if shift == 0 { value } else { &value[..value.len() - 1] };
    let bytes = number(digits)?.checked_mul(1 << shift).ok_or("out of range")?;
    if bytes == 0 { Err("nothing") } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_the_defaults() {
        assert_eq!(Options::parse(" \n"), Ok(Options::default()));
    }

    #[test]
    fn each_word_sets_what_it_names() {
        let options = Options::parse(
            "workload=page-table vcpus=3 bytes=2M backing=1g gpa=0x40000000 hardware-access=off eager-split=1G \
             check=on clock=instructions log=ring manual-protect=off ways=dirty-ring userfault=minor",
        )
        .unwrap();
        assert_eq!((options.workload, options.vcpus), (Workload::PageTable, Some(3)));
        assert_eq!(
            (options.bytes, options.backing, options.gpa),
            (2 << 20, 1 << 30, Some(1 << 30))
        );
        assert_eq!((options.hardware_access, options.eager_split), (Some(false), Some(1 << 30)));
        assert_eq!((options.check, options.clock), (true, Clock::Instructions));
        assert_eq!((options.log, options.manual_protect), (LogKind::Ring, false));
        assert_eq!(
            (options.way, options.userfault),
            (Some(Way::DirtyRing), Some(Userfault::Minor))
        );
        let off = Options::parse("eager-split=off hardware-access=auto userfault=off").unwrap();
        assert_eq!((off.eager_split, off.hardware_access, off.userfault), (None, None, None));
    }

    #[test]
    fn a_word_that_makes_no_sense_is_named() {
        let why = |line| Options::parse(line).unwrap_err();
        assert_eq!(why("check"), "check: not of the form key=value");
        assert_eq!(why("check=on chek=on"), "chek=on: there is no such key");
        assert_eq!(why("backing=3m"), "backing=3m: there is no such value");
        assert_eq!(why("vcpus=9"), "vcpus=9: out of range");
        assert_eq!(why("bytes=0"), "bytes=0: nothing");
        assert_eq!(why("bytes=M"), "bytes=M: not a number");
        assert_eq!(why("bytes=99999999999G"), "bytes=99999999999G: out of range");
    }
}
