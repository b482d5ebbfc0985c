//! Arm's entries in tables of two: the smallest trees in which everything can still go wrong.

use slat::format::arm::{K4, Stage2};
use slat::maintenance::{Context, Instruction, Invalidation, Maintenance};
use slat::{Attributes, Format, FormatError, Geometry, Gpa, Hpa, Level, Machine};

/// Bytes of a page, and of the address space that a table takes.
pub(crate) const PAGE: u64 = 1 << Tiny::PAGE_SHIFT;

/// The level of the blocks over two pages.
pub(crate) const BLOCK: Level = match Level::new(2) {
    Some(level) => level,
    None => panic!("there is a level 2"),
};

/// Stage 2 as Arm has it, but for the number of entries in a table.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Tiny {
    geometry: Geometry,
    arm: Stage2<K4>,
}

impl Tiny {
    /// A tree of two levels (four pages) or three (eight).
    pub(crate) fn levels(levels: u32) -> Self {
        let start = Level::new(4 - levels as i8).unwrap();
        let bits = Self::PAGE_SHIFT + levels * Self::INDEX_BITS;
        let geometry = Geometry::new(Self::PAGE_SHIFT, Self::INDEX_BITS, bits, start).unwrap();
        Self { geometry, arm: Stage2::new(40).unwrap() }
    }

    /// With dirty state that hardware sets (FEAT_HAFDBS).
    pub(crate) fn with_hardware_dirty(mut self) -> Self {
        self.arm = self.arm.with_hardware_dirty(true);
        self
    }
}

// SAFETY: Arm's own format, but for the constant; the geometry is made of the constants.
#[expect(unsafe_code, reason = "promises what `Format` asks")]
unsafe impl Format for Tiny {
    const PAGE_SHIFT: u32 = 12;
    const INDEX_BITS: u32 = 1;
    const WRITE: u64 = Stage2::<K4>::WRITE;
    const DIRTY: u64 = Stage2::<K4>::DIRTY;
    const ACCESSED: u64 = Stage2::<K4>::ACCESSED;
    const SOFTWARE_SHIFT: u32 = Stage2::<K4>::SOFTWARE_SHIFT;
    type Maintenance = ByPage;

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn is_valid(entry: u64) -> bool {
        Stage2::<K4>::is_valid(entry)
    }

    fn is_table(entry: u64, level: Level) -> bool {
        Stage2::<K4>::is_table(entry, level)
    }

    fn fits(&self, template: u64) -> bool {
        self.arm.fits(template)
    }

    fn leaf_allowed(&self, level: Level) -> bool {
        self.arm.leaf_allowed(level)
    }

    fn template(&self, attributes: Attributes) -> Result<u64, FormatError> {
        self.arm.template(attributes)
    }

    fn leaf(&self, level: Level, output: Hpa, template: u64) -> u64 {
        assert_eq!(output.0 % self.geometry.size(level), 0);
        // A block of ours is not aligned as one of Arm's is; a table entry's bits say nothing about that.
        let page = if level == Level::LAST { self.arm.table(Hpa(0)) } else { Self::VALID };
        template | output.0 | page
    }

    fn table(&self, table: Hpa) -> u64 {
        self.arm.table(table)
    }

    fn next(&self, entry: u64) -> Hpa {
        self.arm.next(entry)
    }

    fn output(&self, entry: u64, level: Level) -> Hpa {
        self.arm.output(entry, level)
    }

    fn template_of(&self, entry: u64, level: Level) -> u64 {
        self.arm.template_of(entry, level)
    }

    fn attributes(&self, template: u64) -> Attributes {
        self.arm.attributes(template)
    }

    fn output_bits(&self) -> u32 {
        self.arm.output_bits()
    }

    fn sets_accessed(&self) -> bool {
        self.arm.sets_accessed()
    }

    fn tracks_dirty(&self) -> bool {
        self.arm.tracks_dirty()
    }

    fn is_dirty(entry: u64) -> bool {
        Stage2::<K4>::is_dirty(entry)
    }

    fn tracks_dirty_of(entry: u64) -> bool {
        Stage2::<K4>::tracks_dirty_of(entry)
    }

    fn clean(entry: u64) -> u64 {
        Stage2::<K4>::clean(entry)
    }

    fn relaxed(old: u64, template: u64) -> u64 {
        Stage2::<K4>::relaxed(old, template)
    }

    fn intersect(a: u64, b: u64) -> u64 {
        Stage2::<K4>::intersect(a, b)
    }

    fn absorb(a: u64, b: u64) -> u64 {
        Stage2::<K4>::absorb(a, b)
    }

    fn essence(leaf: u64) -> u64 {
        Stage2::<K4>::essence(leaf)
    }
}

/// Arm's sequence, page by page and always with a level hint: Arm's own knows how much a block of Arm's covers.
pub(crate) struct ByPage;

impl Maintenance for ByPage {
    fn publish<M: Machine>(machine: &M) {
        machine.execute(Instruction::DsbIshst);
    }

    fn invalidate<M: Machine>(machine: &M, context: &Context, what: Invalidation) {
        machine.execute(Instruction::DsbIshst);
        match what.range {
            Some(range) => {
                let pages = (range.start().0..range.end().0).step_by(PAGE as usize);
                pages.for_each(|page| {
                    machine.execute(Instruction::TlbiIpas2e1is {
                        ipa: Gpa(page),
                        page_shift: context.page_shift,
                        level: what.level,
                    });
                });
            }
            None => machine.execute(Instruction::TlbiVmalls12e1is),
        }
        machine.execute(Instruction::DsbIsh);
    }

    fn invalidate_local<M: Machine>(machine: &M, context: &Context, gpa: Gpa) {
        machine.execute(Instruction::DsbNshst);
        machine.execute(Instruction::TlbiIpas2e1 {
            ipa: gpa,
            page_shift: context.page_shift,
            level: None,
        });
        machine.execute(Instruction::DsbNsh);
    }

    fn root(table: Hpa, _: u16) -> u64 {
        table.0
    }
}
