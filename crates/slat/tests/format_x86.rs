//! x86 entries must be what the architecture says: EPT compared with the tables of the Intel SDM (vol. 3C, 29.3), NPT with
//! those of the AMD APM (vol. 2, 5.4) and with the `x86_64` crate.

use slat::format::ept::{Convertible, Ept, Flags, InHardware, InSoftware, Suppressed, Violations};
use slat::format::npt::Npt;
use slat::{Attributes, Dirty, Execute, Format, FormatError, Hpa, Level, Memory};
use x86_64::structures::paging::PageTableFlags as Flag;

fn level(number: i8) -> Level {
    Level::new(number).unwrap()
}

/// xorshift64: enough to try many addresses, the same ones each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// An address of at most 52 bits, aligned to `size`.
    fn address(&mut self, size: u64) -> Hpa {
        Hpa(self.next() & ((1 << 52) - 1) & !(size - 1))
    }
}

/// Attributes in every combination, sensible or not.
fn all_attributes() -> Vec<Attributes> {
    let mut all = Vec::new();
    for n in 0..8u8 {
        for execute in [Execute::No, Execute::Yes, Execute::Kernel, Execute::User] {
            for memory in [Memory::Normal, Memory::NonCacheable, Memory::Device] {
                for dirty in [Dirty::Untracked, Dirty::Clean, Dirty::Dirty] {
                    for software in [0, 6, 15] {
                        let (read, write, accessed) = (n & 1 != 0, n & 2 != 0, n & 4 != 0);
                        all.push(Attributes {
                            read,
                            write,
                            execute,
                            memory,
                            accessed,
                            dirty,
                            software,
                        });
                    }
                }
            }
        }
    }
    all
}

/// Those that the format can express.
fn expressible<F: Format>(format: &F) -> Vec<(Attributes, u64)> {
    let each = all_attributes().into_iter();
    let all: Vec<_> = each.filter_map(|a| Some((a, format.template(a).ok()?))).collect();
    assert!(all.len() > 40);
    all
}

/// The bits that tag invalid entries, and nothing else.
const TAGS: u64 = 0b111 << 60;

/// What every format owes the engine, whatever its bits mean.
fn entries_are_what_the_engine_takes_them_for<F: Format>(format: &F) {
    let mut random = Random(3);
    assert!(!F::is_valid(F::EMPTY) && !F::is_valid(F::LOCKED));
    assert_eq!((F::thaw(F::LOCKED), F::freeze(F::EMPTY)), (F::EMPTY, F::LOCKED));
    let table = format.table(random.address(4096));
    assert_eq!(F::thaw(F::freeze(table)), table);
    assert_eq!(table & TAGS, 0);
    for number in format.geometry().start().number()..=3 {
        assert_eq!(F::is_table(table, level(number)), number != 3);
    }
    let all = expressible(format);
    for at in [1, 2, 3].map(level) {
        for &(attributes, template) in &all {
            let output = random.address(format.geometry().size(at));
            let entry = format.leaf(at, output, template);
            assert!(F::is_valid(entry) && !F::is_table(entry, at));
            assert_eq!(entry & TAGS & !F::WRITE, 0, "{attributes:?}");
            assert_eq!(format.output(entry, at), output);
            assert_eq!(format.template_of(entry, at), template);
            assert_eq!(format.attributes(template), attributes);
            assert!(format.fits(template));
            let locked = F::freeze(entry);
            assert!(!F::is_valid(locked));
            assert_eq!(F::thaw(locked), entry);
            assert_eq!(F::is_writable(entry), attributes.write);
            assert!(!F::is_writable(entry & !F::WRITE));
            let old = F::old(entry);
            let expected = Attributes { accessed: false, ..attributes };
            assert_eq!(format.attributes(format.template_of(old, at)), expected);
            let young = Attributes { accessed: true, ..attributes };
            assert_eq!(format.attributes(format.template_of(F::young(old), at)), young);
            assert_eq!(F::thaw(F::freeze(old)), old);
            assert_eq!(F::essence(old), F::essence(F::young(entry)));
        }
    }
}

/// A bit that no template has, or without which none is, makes one of another format.
fn bits_that_no_template_has_do_not_fit<F: Format>(format: &F) {
    let all = expressible(format);
    let sometimes = all.iter().fold(0, |bits, &(_, template)| bits | template);
    let always = all.iter().fold(!0, |bits, &(_, template)| bits & template);
    assert!(always != 0 && sometimes != !0);
    for bit in (0..64).map(|number| 1 << number) {
        if sometimes & bit != 0 && always & bit == 0 {
            continue;
        }
        for &(attributes, template) in &all {
            assert!(!format.fits(template ^ bit), "{attributes:?}, bit {bit:#x}");
        }
    }
}

/// Permissions combine as sets do, also where only one of two entries was used.
fn permissions_combine<F: Format>(format: &F) {
    let all = expressible(format);
    let mut random = Random(7);
    for &(a, first) in &all {
        for _ in 0..40 {
            let (b, second) = all[random.next() as usize % all.len()];
            let executes = |x: Attributes, who| x.execute == Execute::Yes || x.execute == who;
            let set = |x| [x == Execute::Kernel, x == Execute::User];
            let both = format.attributes(F::intersect(first, second));
            assert_eq!((both.read, both.write), (a.read && b.read, a.write && b.write));
            for (who, also) in [(Execute::Kernel, 0), (Execute::User, 1)] {
                let expected = executes(a, who) && executes(b, who);
                assert_eq!(
                    executes(both, who),
                    expected,
                    "{a:?} {b:?} {both:?} {:?}",
                    set(who)[also]
                );
            }
            assert_eq!(both.accessed, a.accessed);
            let either = format.attributes(F::relaxed(first, second));
            assert_eq!((either.read, either.write), (a.read || b.read, a.write || b.write));
            assert_eq!(either.accessed, a.accessed || b.accessed);
            for who in [Execute::Kernel, Execute::User] {
                let added = a.memory == Memory::Normal && executes(b, who);
                assert_eq!(executes(either, who), executes(a, who) || added, "{a:?} {b:?}");
            }
            assert_eq!((either.memory, either.software), (a.memory, a.software));
            let absorbed = format.attributes(F::absorb(first, second));
            assert_eq!(absorbed.accessed, a.accessed || b.accessed);
            assert_eq!((absorbed.read, absorbed.write), (a.read, a.write));
        }
    }
}

fn all_is_well<F: Format>(format: &F) {
    entries_are_what_the_engine_takes_them_for(format);
    permissions_combine(format);
    bits_that_no_template_has_do_not_fit(format);
}

#[test]
fn entries_of_every_kind_are_what_the_engine_takes_them_for() {
    for bits in [40, 48, 52] {
        let ept = <Ept>::new(bits).unwrap();
        all_is_well(&ept);
        all_is_well(&ept.with_hardware_dirty(true).with_mode_based_execute(true));
        all_is_well(&Ept::<InSoftware>::new(bits).unwrap().with_mode_based_execute(true));
        all_is_well(&Ept::<InHardware, Suppressed>::new(bits).unwrap().with_execute_only(false));
        all_is_well(&Ept::<InSoftware, Suppressed>::new(bits).unwrap());
        all_is_well(&Npt::new(bits).unwrap());
        all_is_well(&Npt::new(bits).unwrap().with_hardware_dirty(true));
    }
}

/// An EPT entry as tables 29-5 to 29-7 have it; software's bits apart.
fn ept_by_the_manual<A: Flags, V: Violations>(
    mode_based: bool,
    at: i8,
    output: Hpa,
    attributes: Attributes,
) -> u64 {
    let memory_type = match attributes.memory {
        Memory::Normal => 6,
        Memory::NonCacheable => 1,
        Memory::Device => 0,
    };
    let kernel = matches!(attributes.execute, Execute::Yes | Execute::Kernel);
    let user = mode_based && matches!(attributes.execute, Execute::Yes | Execute::User);
    let present = A::IN_HARDWARE || attributes.accessed;
    let permission = |bit: u32, given: bool| u64::from(given && present) << bit;
    let written = attributes.write && attributes.dirty != Dirty::Clean;
    permission(0, attributes.read)
        | permission(1, attributes.write)
        | permission(2, kernel)
        | permission(10, user)
        // Not present: nothing but suppress #VE means anything.
        | if present { memory_type << 3 } else { 0 }
        | 1 << 6
        | u64::from(at < 3) << 7
        | u64::from(attributes.accessed) << 8
        | u64::from(A::IN_HARDWARE && written) << 9
        | output.0
        | u64::from(attributes.software) << 52
        | u64::from(V::SUPPRESS_VE) << 63
}

fn ept_leaves<A: Flags, V: Violations>(format: Ept<A, V>, mode_based: bool) {
    let mut random = Random(1);
    for at in 1..=3 {
        for (attributes, template) in expressible(&format) {
            let output = random.address(format.geometry().size(level(at)));
            let entry = format.leaf(level(at), output, template);
            // The engine's own: valid, and tracked.
            let hardware = entry & !(1 << 11 | 1 << 56);
            let present = entry & 0b111 != 0 || mode_based && entry & 1 << 10 != 0;
            let expected = ept_by_the_manual::<A, V>(mode_based, at, output, attributes);
            let ignored = if present { 0 } else { 0b111 << 3 | 0b111 << 57 };
            assert_eq!(hardware & !ignored, expected & !ignored, "{attributes:?}");
            assert_eq!(entry >> 11 & 1, 1);
            let permits = attributes.read || attributes.write || attributes.execute != Execute::No;
            assert_eq!(present, permits && (A::IN_HARDWARE || attributes.accessed));
            // Misconfigurations (29.3.3.1).
            assert_ne!(entry & 0b11, 0b10);
            if present {
                assert!(matches!(entry >> 3 & 0b111, 0 | 1 | 4 | 5 | 6));
            }
            assert_eq!(F::<A, V>::freeze(entry) & (0b111 | 1 << 10), 0);
            assert_eq!(F::<A, V>::freeze(entry) >> 63, u64::from(V::SUPPRESS_VE));
        }
    }
    let table = format.table(Hpa(0x1234_5000));
    let user = u64::from(mode_based) << 10;
    // A table's bits 7:3 are reserved.
    assert_eq!(table & !(1 << 63), 0x1234_5000 | 0b111 | 1 << 8 | user | 1 << 11);
    assert_eq!(F::<A, V>::freeze(table) & (0b111 | 1 << 10), 0);
    assert_eq!(F::<A, V>::EMPTY, u64::from(V::SUPPRESS_VE) << 63);
    assert_eq!(F::<A, V>::LOCKED & !(1 << 62), u64::from(V::SUPPRESS_VE) << 63);
}

type F<A, V> = Ept<A, V>;

#[test]
fn ept_entries_are_as_in_the_manual_and_invalid_ones_are_not_present() {
    for mode_based in [false, true] {
        let hardware = <Ept>::new(48).unwrap().with_mode_based_execute(mode_based);
        ept_leaves(hardware, mode_based);
        ept_leaves(hardware.with_hardware_dirty(true), mode_based);
        let software = Ept::<InSoftware, Convertible>::new(48).unwrap();
        ept_leaves(software.with_mode_based_execute(mode_based), mode_based);
        let suppressed = Ept::<InHardware, Suppressed>::new(52).unwrap();
        ept_leaves(suppressed.with_mode_based_execute(mode_based), mode_based);
        let both = Ept::<InSoftware, Suppressed>::new(52).unwrap();
        ept_leaves(both.with_mode_based_execute(mode_based), mode_based);
    }
}

#[test]
fn ept_misconfigurations_are_refused() {
    let format = <Ept>::new(48).unwrap();
    let refused = |format: Ept, attributes| format.template(attributes).unwrap_err();
    let write_only = Attributes { read: false, ..Attributes::RW };
    assert_eq!(refused(format, write_only), FormatError::Unreadable);
    let execute_only = Attributes { read: false, execute: Execute::Yes, ..Attributes::RO };
    assert!(format.template(execute_only).is_ok());
    let without = format.with_execute_only(false);
    assert_eq!(refused(without, execute_only), FormatError::Unreadable);
    assert!(!without.fits(format.template(execute_only).unwrap()));
    let kernel = Attributes { execute: Execute::Kernel, ..Attributes::RO };
    assert_eq!(refused(format, kernel), FormatError::ExecuteNeedsXnx);
    let by_mode = format.with_mode_based_execute(true);
    assert!(!format.fits(by_mode.template(Attributes::RWX).unwrap()));
    let clean = Attributes { dirty: Dirty::Clean, ..Attributes::RW };
    assert_eq!(refused(format, clean), FormatError::DirtyState);
    assert!(!format.fits(format.with_hardware_dirty(true).template(clean).unwrap()));
    let device = Attributes { execute: Execute::Yes, ..Attributes::DEVICE };
    assert_eq!(refused(format, device), FormatError::ExecutableDevice);
    let software = Attributes { software: 16, ..Attributes::RW };
    assert_eq!(refused(format, software), FormatError::Software(16));
}

#[test]
fn the_width_of_addresses_decides_how_many_tables_a_walk_has() {
    for bits in 0..=64 {
        let ept = <Ept>::new(bits);
        let npt = Npt::new(bits);
        assert_eq!(ept.is_ok(), (40..=52).contains(&bits));
        assert_eq!(npt.is_ok(), ept.is_ok());
        if let (Ok(ept), Ok(npt)) = (ept, npt) {
            assert_eq!(ept.geometry(), npt.geometry());
            assert_eq!(ept.geometry().start().number(), if bits > 48 { -1 } else { 0 });
            assert_eq!(ept.geometry().root_tables(), 1);
            // Bits 5:3: one less than the tables of a walk; bit 6: accessed and dirty flags; 6: write-back.
            let levels = if bits > 48 { 4 } else { 3 };
            assert_eq!(ept.identifier(9), 1 << 6 | levels << 3 | 6);
            let software = Ept::<InSoftware>::new(bits).unwrap();
            assert_eq!(software.identifier(9), levels << 3 | 6);
            assert_eq!(npt.identifier(9), 9);
        }
    }
    let narrow = <Ept>::new(48).unwrap().with_output_bits(39).unwrap();
    assert_eq!(narrow.output_bits(), 39);
    assert!(
        narrow.with_output_bits(53).is_err() && Npt::new(48).unwrap().with_output_bits(31).is_err()
    );
}

#[test]
fn blocks_of_a_gigabyte_can_be_done_without() {
    let (ept, npt) = (<Ept>::new(48).unwrap(), Npt::new(48).unwrap());
    for at in (-1..=3).map(level) {
        assert_eq!(ept.leaf_allowed(at), at.number() >= 1);
        assert_eq!(npt.leaf_allowed(at), at.number() >= 1);
        assert_eq!(ept.with_gigabyte_blocks(false).leaf_allowed(at), at.number() >= 2);
        assert_eq!(npt.with_gigabyte_blocks(false).leaf_allowed(at), at.number() >= 2);
    }
}

/// The same entry as the `x86_64` crate makes it.
fn npt_by_the_crate(at: i8, output: Hpa, attributes: Attributes) -> u64 {
    let mut flags = Flag::PRESENT | Flag::USER_ACCESSIBLE;
    let written = attributes.write && attributes.dirty != Dirty::Clean;
    flags.set(Flag::WRITABLE, attributes.write);
    flags.set(Flag::WRITE_THROUGH, attributes.memory == Memory::Device);
    flags.set(Flag::NO_CACHE, attributes.memory != Memory::Normal);
    flags.set(Flag::ACCESSED, attributes.accessed);
    flags.set(Flag::DIRTY, written);
    flags.set(Flag::HUGE_PAGE, at < 3);
    flags.set(Flag::NO_EXECUTE, attributes.execute == Execute::No);
    flags.set(Flag::BIT_56, attributes.dirty != Dirty::Untracked);
    let software = [Flag::BIT_52, Flag::BIT_53, Flag::BIT_54, Flag::BIT_55];
    for (n, bit) in software.into_iter().enumerate() {
        flags.set(bit, attributes.software >> n & 1 == 1);
    }
    flags.bits() | output.0
}

#[test]
fn npt_entries_are_as_another_encoder_makes_them() {
    let mut random = Random(2);
    let format = Npt::new(48).unwrap();
    for format in [format, format.with_hardware_dirty(true)] {
        for at in 1..=3 {
            for (attributes, template) in expressible(&format) {
                let output = random.address(format.geometry().size(level(at)));
                let entry = format.leaf(level(at), output, template);
                assert_eq!(entry, npt_by_the_crate(at, output, attributes), "{attributes:?}");
                // Not present.
                assert_eq!(Npt::freeze(entry) & 1, 0);
            }
        }
    }
    let table = Flag::PRESENT | Flag::WRITABLE | Flag::USER_ACCESSIBLE | Flag::ACCESSED;
    assert_eq!(format.table(Hpa(0x1234_5000)), table.bits() | 0x1234_5000);
    let unreadable = Attributes { read: false, write: false, ..Attributes::RO };
    assert_eq!(format.template(unreadable).unwrap_err(), FormatError::Unreadable);
}
