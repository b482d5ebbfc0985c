//! Collapse against fault and against write-protect (rules 4 and 5).

use slat::sabotage::Skip;
use slat::{Attributes, Dirty, Error, Installed, Level};

use crate::format::BLOCK;
use crate::world::{Model, World, gpa, host, range};

const RO: Attributes = Attributes::RO;
const RW: Attributes = Attributes::RW;

/// A fault puts another host page in the place of one of two that are being collapsed.
fn fault_on_a_table_being_collapsed(world: World) {
    world.worker(1).map(0, 2, host(0), RO);
    world.vcpu(0, 0).access(0, false, |_| {});
    let fault = world.vcpu(0, 1).spawn(|vcpu| {
        vcpu.run_cpu();
        vcpu.fault(0, Level::LAST, host(2), RO);
        let from = |from| vcpu.world.expect(from == host(2), "a replaced page is still there");
        vcpu.access(0, false, from);
        vcpu.access(1, false, |from| vcpu.world.expect(from == host(1), "elsewhere"));
    });
    let mut worker = world.worker(0);
    world.tree.collapse(&mut worker.who, range(0, 2), Level::TOP).unwrap();
    fault.join();
    let both = [worker.mapped(0), worker.mapped(1)];
    let right = [Some((host(2), false)), Some((host(1), false))];
    world.expect(both == right, "a replaced page is still there");
}

#[test]
fn a_fault_outlives_a_collapse() {
    Model::new().preemptions(3).explore(fault_on_a_table_being_collapsed);
}

#[test]
#[should_panic(expected = "a replaced page is still there")]
fn a_fault_is_undone_by_a_collapse_that_does_not_freeze() {
    Model::without(Skip::Freeze).explore(fault_on_a_table_being_collapsed);
}

#[test]
#[should_panic(expected = "a replaced page is still there")]
fn a_fault_is_lost_in_a_table_that_is_not_dead() {
    Model::without(Skip::Dead).explore(fault_on_a_table_being_collapsed);
}

#[test]
#[should_panic(expected = "break-before-make")]
fn a_block_meets_the_pages_of_a_collapse_that_does_not_invalidate() {
    Model::without(Skip::Invalidation).explore(fault_on_a_table_being_collapsed);
}

/// A fault installs a block over a table, while another works on a page in it.
fn a_block_over_a_table_in_use(world: World) {
    world.worker(1).map(0, 1, host(0), RO);
    world.vcpu(0, 0).access(0, false, |_| {});
    let fault = world.vcpu(0, 1).spawn(|vcpu| {
        vcpu.run_cpu();
        let done = vcpu.fault(1, Level::LAST, host(1), RW);
        vcpu.world.expect(matches!(done, Installed::New | Installed::Present), "elsewhere");
        for _ in 0..3 {
            if vcpu.access(1, true, |to| vcpu.world.expect(to == host(1), "elsewhere")) {
                break;
            }
            // The block is just being installed.
            vcpu.fault(1, Level::LAST, host(1), RW);
        }
        vcpu.access(0, false, |from| vcpu.world.expect(from == host(0), "elsewhere"));
    });
    let mut worker = world.worker(0);
    let done = worker.fault(0, BLOCK, host(0), RW);
    let collapsed = matches!(done, Installed::Collapsed { dirty: false });
    world.expect(collapsed, "a block is not where it was installed");
    world.tree.reclaim(&mut worker.who);
    fault.join();
    let both = [worker.mapped(0), worker.mapped(1)];
    let right = [Some((host(0), true)), Some((host(1), true))];
    world.expect(both == right, "a block is not where it was installed");
}

#[test]
fn a_block_takes_the_place_of_a_table_in_use() {
    Model::new().explore(a_block_over_a_table_in_use);
}

#[test]
#[should_panic(expected = "a table was freed while a TLB could still reach it")]
fn a_table_that_became_a_block_without_invalidation_is_still_in_a_tlb() {
    Model::without(Skip::Invalidation).explore(a_block_over_a_table_in_use);
}

#[test]
#[should_panic(expected = "use after free")]
fn a_table_that_became_a_block_is_used_without_a_grace_period() {
    Model::without(Skip::GracePeriod).explore(a_block_over_a_table_in_use);
}

/// One of two writable pages is write-protected while they are collapsed.
fn write_protect_of_a_table_being_collapsed(world: World) {
    world.worker(1).map(0, 2, host(0), RW);
    world.vcpu(0, 0).access(0, true, |_| {});
    let collapse = world.worker(0).spawn(|worker| {
        worker.world.tree.collapse(&mut worker.who, range(0, 2), Level::TOP).unwrap();
    });
    let mut worker = world.worker(0);
    worker.write_protect(0, 1);
    let through = world.machine.caches(gpa(0), |cached| cached.writes());
    world.expect(!through, "write-protected, and a TLB lets a write through");
    collapse.join();
    let writable = worker.mapped(0).unwrap().1;
    world.expect(!writable, "write-protected, and writable again");
}

#[test]
fn write_protect_outlives_a_collapse() {
    Model::new().preemptions(3).explore(write_protect_of_a_table_being_collapsed);
}

#[test]
#[should_panic(expected = "writable again")]
fn write_protect_is_undone_by_a_block_with_more_permission_than_its_children() {
    Model::without(Skip::Intersection).explore(write_protect_of_a_table_being_collapsed);
}

#[test]
#[should_panic(expected = "writable again")]
fn write_protect_is_undone_by_a_collapse_that_does_not_freeze() {
    Model::without(Skip::Freeze).explore(write_protect_of_a_table_being_collapsed);
}

#[test]
#[should_panic(expected = "writable again")]
fn write_protect_is_lost_in_a_table_that_is_not_dead() {
    Model::without(Skip::Dead).explore(write_protect_of_a_table_being_collapsed);
}

#[test]
#[should_panic(expected = "somebody waits for ever")]
fn write_protect_that_waits_in_place_waits_in_a_table_that_has_left() {
    Model::without(Skip::Rewalk).explore(write_protect_of_a_table_being_collapsed);
}

/// A block is write-protected while it becomes a table and a block again.
fn write_protect_of_a_block_that_comes_back(world: World) {
    world.worker(0).map_as(0, 2, host(0), RW, BLOCK);
    world.vcpu(0, 0).access(0, true, |_| {});
    let other = world.worker(1).spawn(|worker| {
        let tree = worker.world.tree;
        tree.split(&worker.who, &mut worker.reserve, range(0, 2), Level::LAST).unwrap();
        tree.collapse(&mut worker.who, range(0, 2), Level::TOP).unwrap();
    });
    let mut worker = world.worker(0);
    worker.write_protect(0, 2);
    let through = world.machine.caches(gpa(0), |cached| cached.writes());
    world.expect(!through, "write-protected, and a TLB lets a write through");
    other.join();
    let writable = worker.mapped(0).unwrap().1;
    world.expect(!writable, "write-protected, and writable again");
}

#[test]
fn write_protect_of_a_block_outlives_its_split_and_collapse() {
    Model::new().explore(write_protect_of_a_block_that_comes_back);
}

/// A page of a block is unmapped, for which the block is split, and another thread collapses it again.
fn unmap_of_a_page_in_a_block_that_comes_back(world: World) {
    world.worker(0).map_as(0, 2, host(0), RW, BLOCK);
    world.vcpu(0, 0).access(0, true, |_| {});
    let collapse = world.worker(0).spawn(|worker| {
        worker.world.tree.collapse(&mut worker.who, range(0, 2), Level::TOP).unwrap();
    });
    let mut worker = world.worker(3);
    worker.unmap(0, 1);
    let stale = world.machine.caches(gpa(0), |_| true);
    world.expect(!stale, "unmapped, and a TLB still translates");
    collapse.join();
    let both = [worker.mapped(0), worker.mapped(1)];
    world.expect(both == [None, Some((host(1), true))], "unmapped, and mapped again");
}

#[test]
fn an_unmap_in_a_block_outlives_a_collapse() {
    Model::new().explore(unmap_of_a_page_in_a_block_that_comes_back);
}

/// A page of a block is replaced by `map`, for which the block is split, and another thread collapses it again.
fn map_of_a_page_in_a_block_that_comes_back(world: World) {
    world.worker(0).map_as(0, 2, host(0), RO, BLOCK);
    let collapse = world.worker(0).spawn(|worker| {
        worker.world.tree.collapse(&mut worker.who, range(0, 2), Level::TOP).unwrap();
    });
    let mut worker = world.worker(3);
    worker.map(0, 1, host(2), RW);
    collapse.join();
    let both = [worker.mapped(0), worker.mapped(1)];
    let right = [Some((host(2), true)), Some((host(1), false))];
    world.expect(both == right, "an installed page is gone");
}

#[test]
fn a_mapping_in_a_block_outlives_a_collapse() {
    Model::new().explore(map_of_a_page_in_a_block_that_comes_back);
}

/// A page that hardware marks dirty while it becomes part of a block leaves the block dirty.
fn hardware_write_to_a_table_being_collapsed(world: World) {
    let clean = Attributes { dirty: Dirty::Clean, ..RW };
    world.worker(1).map(0, 2, host(0), clean);
    let guest = world.vcpu(0, 0).spawn(|vcpu| vcpu.access(0, true, |_| {}));
    let mut worker = world.worker(0);
    world.tree.collapse(&mut worker.who, range(0, 2), Level::TOP).unwrap();
    let (_, written) = guest.join();
    let mut reported = false;
    let sink = |pages| reported |= pages == range(0, 1);
    world.tree.harvest_dirty(&worker.who, range(0, 1), sink).unwrap();
    world.expect(written == reported, "a write is lost");
}

#[test]
fn a_hardware_write_outlives_a_collapse() {
    Model::new().preemptions(3).hardware_dirty().explore(hardware_write_to_a_table_being_collapsed);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_hardware_write_is_lost_by_a_collapse_that_does_not_freeze() {
    let model = Model::without(Skip::Freeze).hardware_dirty();
    model.explore(hardware_write_to_a_table_being_collapsed);
}

/// Two threads collapse one table: one does, or neither where they got into each other's way.
fn two_collapses(world: World) {
    world.worker(1).map(0, 2, host(0), RW);
    let collapse = |worker: &mut crate::world::Actor| {
        let collapsed = worker.world.tree.collapse(&mut worker.who, range(0, 2), Level::TOP);
        worker.world.expect(collapsed != Err(Error::Retry), "elsewhere");
        worker.world.tree.reclaim(&mut worker.who);
        collapsed.unwrap()
    };
    let other = world.worker(0).spawn(collapse);
    let mut worker = world.worker(0);
    let mine = collapse(&mut worker);
    let (_, theirs) = other.join();
    world.expect(mine + theirs <= 1, "a table became a block twice");
    let both = [worker.mapped(0), worker.mapped(1)];
    let right = [Some((host(0), true)), Some((host(1), true))];
    world.expect(both == right, "a collapse changed a translation");
}

#[test]
fn one_table_is_collapsed_and_freed_once_by_two() {
    Model::new().explore(two_collapses);
}
