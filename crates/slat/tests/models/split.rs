//! Split against fault and against write-protect.

use slat::sabotage::Skip;
use slat::{Attributes, Level};

use crate::format::BLOCK;
use crate::world::{Model, World, gpa, host, range};

/// A vCPU that uses a read-only block faults for one page of it, while the block is split.
fn fault_on_a_block_being_split(world: World) {
    world.worker(0).map_as(0, 2, host(0), Attributes::RO, BLOCK);
    world.vcpu(0, 0).access(0, false, |_| {});
    let fault = world.vcpu(0, 1).spawn(|vcpu| {
        vcpu.run_cpu();
        vcpu.access(1, false, |_| {});
        vcpu.fault(0, Level::LAST, host(0), Attributes::RW);
        vcpu.access(1, false, |_| {});
        let written = vcpu.access(0, true, |to| vcpu.world.expect(to == host(0), "elsewhere"));
        vcpu.world.expect(written, "a page faults for ever");
    });
    let mut worker = world.worker(1);
    world.tree.split(&worker.who, &mut worker.reserve, range(0, 2), Level::LAST).unwrap();
    world.machine.speculate(0, gpa(1));
    let (vcpu, ()) = fault.join();
    let both = [worker.mapped(0), worker.mapped(1)];
    let right = [Some((host(0), true)), Some((host(1), false))];
    world.expect(both == right, "a split changed a translation");
    let splits = vcpu.who.counters.splits.get() + worker.who.counters.splits.get();
    world.expect(splits == 1, "one block was split twice");
}

#[test]
fn a_fault_finds_its_page_while_the_block_is_split() {
    Model::new().preemptions(3).explore(fault_on_a_block_being_split);
}

#[test]
#[should_panic(expected = "break-before-make")]
fn a_block_split_without_invalidation_meets_its_pages() {
    Model::without(Skip::Invalidation).explore(fault_on_a_block_being_split);
}

/// A block in use is write-protected while it is split.
fn write_protect_of_a_block_being_split(world: World) {
    world.worker(0).map_as(0, 2, host(0), Attributes::RW, BLOCK);
    world.vcpu(0, 0).access(0, true, |_| {});
    let split = world.worker(1).spawn(|worker| {
        let (tree, who) = (worker.world.tree, &worker.who);
        tree.split(who, &mut worker.reserve, range(0, 2), Level::LAST).unwrap();
    });
    let mut worker = world.worker(0);
    worker.write_protect(0, 2);
    let through = world.machine.caches(gpa(0), |cached| cached.writes());
    world.expect(!through, "write-protected, and a TLB lets a write through");
    split.join();
    let both = [worker.mapped(0), worker.mapped(1)];
    let right = [Some((host(0), false)), Some((host(1), false))];
    world.expect(both == right, "write-protected, and writable again");
}

#[test]
fn write_protect_outlives_a_split() {
    Model::new().preemptions(3).explore(write_protect_of_a_block_being_split);
}

#[test]
#[should_panic(expected = "writable again")]
fn write_protect_is_undone_by_a_split_that_does_not_compare() {
    Model::without(Skip::Compare).explore(write_protect_of_a_block_being_split);
}

#[test]
#[should_panic(expected = "a TLB lets a write through")]
fn write_protect_without_invalidation_lets_a_write_through() {
    Model::without(Skip::Invalidation).explore(write_protect_of_a_block_being_split);
}

/// One page of a block in use is unmapped while the block is split.
fn unmap_in_a_block_being_split(world: World) {
    world.worker(0).map_as(0, 2, host(0), Attributes::RW, BLOCK);
    world.vcpu(0, 0).access(0, true, |_| {});
    let split = world.worker(1).spawn(|worker| {
        let (tree, who) = (worker.world.tree, &worker.who);
        tree.split(who, &mut worker.reserve, range(0, 2), Level::LAST).unwrap();
    });
    let mut worker = world.worker(1);
    worker.unmap(0, 1);
    let stale = world.machine.caches(gpa(0), |_| true);
    world.expect(!stale, "unmapped, and a TLB still translates");
    split.join();
    let both = [worker.mapped(0), worker.mapped(1)];
    world.expect(both == [None, Some((host(1), true))], "unmapped, and mapped again");
}

#[test]
fn an_unmap_outlives_a_split() {
    Model::new().preemptions(3).explore(unmap_in_a_block_being_split);
}

/// The same on CPUs that tolerate a change of block size (FEAT_BBM level 2): the table takes the block's place at once,
/// and its pages are protected or unmapped while the block may still be cached.
#[test]
fn an_unmap_outlives_a_split_without_break_before_make() {
    Model::new().bbm_level(2).preemptions(3).explore(unmap_in_a_block_being_split);
}

#[test]
#[should_panic(expected = "unmapped, and a TLB still translates")]
fn an_unmap_with_a_level_hint_leaves_a_block_that_is_being_split() {
    Model::without(Skip::Resizing).bbm_level(2).explore(unmap_in_a_block_being_split);
}

#[test]
fn write_protect_outlives_a_split_without_break_before_make() {
    Model::new().preemptions(3).bbm_level(2).explore(write_protect_of_a_block_being_split);
}

#[test]
#[should_panic(expected = "a TLB lets a write through")]
fn write_protect_with_a_level_hint_leaves_a_block_that_is_being_split() {
    Model::without(Skip::Resizing).bbm_level(2).explore(write_protect_of_a_block_being_split);
}

#[test]
fn a_fault_finds_its_page_while_the_block_is_split_without_break_before_make() {
    Model::new().preemptions(3).bbm_level(2).explore(fault_on_a_block_being_split);
}
