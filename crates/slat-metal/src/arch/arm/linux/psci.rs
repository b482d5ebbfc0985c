//! The firmware that the guest calls (PSCI 1.1, Arm DEN 0022).

/// What to do about a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Call {
    /// Go on with this result.
    Answer(i64),
    /// Start another vCPU there, with this in its first register.
    Start { vcpu: u64, entry: u64, context: u64 },
    /// Say whether it is off.
    IsOff { vcpu: u64 },
    /// This vCPU ends.
    Stop,
    /// The guest ends.
    Off,
}

pub(super) const DONE: i64 = 0;
const NOT_SUPPORTED: i64 = -1;
pub(super) const INVALID: i64 = -2;
pub(super) const ALREADY_ON: i64 = -4;

const VERSION: u64 = 0x8400_0000;
const CPU_OFF: u64 = 0x8400_0002;
const CPU_ON: u64 = 0xc400_0003;
const AFFINITY_INFO: u64 = 0xc400_0004;
const MIGRATE_INFO_TYPE: u64 = 0x8400_0006;
const SYSTEM_OFF: u64 = 0x8400_0008;
const SYSTEM_RESET: u64 = 0x8400_0009;
const FEATURES: u64 = 0x8400_000a;
/// Of the calling convention: its version.
const CONVENTION: u64 = 0x8000_0000;

/// What the registers from x0 on ask for. vCPUs are numbered by their lowest affinity field.
pub(super) fn call(registers: &[u64; 31]) -> Call {
    let [function, first, second, third, ..] = *registers;
    match function {
        VERSION | CONVENTION => Call::Answer(1 << 16 | 1),
        FEATURES => match first {
            VERSION | CPU_OFF | CPU_ON | AFFINITY_INFO | MIGRATE_INFO_TYPE | SYSTEM_OFF
            | SYSTEM_RESET | FEATURES | CONVENTION => Call::Answer(DONE),
            _ => Call::Answer(NOT_SUPPORTED),
        },
        // There is no trusted system that would have to be moved.
        MIGRATE_INFO_TYPE => Call::Answer(2),
        CPU_ON => Call::Start { vcpu: first, entry: second, context: third },
        AFFINITY_INFO => Call::IsOff { vcpu: first },
        CPU_OFF => Call::Stop,
        SYSTEM_OFF | SYSTEM_RESET => Call::Off,
        _ => Call::Answer(NOT_SUPPORTED),
    }
}
