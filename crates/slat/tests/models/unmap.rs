//! Unmap against map, and two operations that find each other's work half done (rule 9).

use slat::sabotage::Skip;
use slat::{Attributes, Error, Installed, Level};

use crate::world::{Actor, Model, World, gpa, host, range};

const RW: Attributes = Attributes::RW;

/// One try of a fault. The guest's other CPU walks at any time: also right after.
fn install_another(vcpu: &mut Actor) -> Result<Installed, Error> {
    let done = vcpu.install(0, Level::LAST, host(2), RW);
    vcpu.world.machine.speculate(1, gpa(0));
    done
}

fn translates(world: World, output: slat::Hpa) -> bool {
    world.machine.caches(gpa(0), |cached| cached.output == output)
}

/// A page that CPU 1 uses is unmapped, and CPU 0 faults on it and gets another.
fn unmap_and_install(world: World) {
    let mut worker = world.worker(1);
    worker.map(0, 1, host(0), RW);
    world.vcpu(1, 0).access(0, true, |_| {});
    let fault = world.vcpu(0, 1).spawn(|vcpu| {
        let found = vcpu.look_up(0);
        match found {
            Ok(slat::Lookup::Empty { .. }) => install_another(vcpu).ok(),
            _ => None,
        }
    });
    worker.unmap(0, 1);
    world.expect(!translates(world, host(0)), "unmapped, and a TLB still translates");
    let (_, done) = fault.join();
    let there = done.map(|_| (host(2), true));
    world.expect(worker.mapped(0) == there, "an unmap takes a page that was installed after it");
}

#[test]
fn nothing_is_installed_over_a_page_that_a_tlb_still_has() {
    Model::new().preemptions(3).cpus(2).explore(unmap_and_install);
}

#[test]
#[should_panic(expected = "break-before-make")]
fn a_page_meets_the_one_that_was_emptied_before_its_invalidation() {
    Model::without(Skip::UnmapLock).cpus(2).explore(unmap_and_install);
}

/// A whole table is unmapped while another page of it is installed.
fn unmap_a_table_and_install(world: World) {
    let mut worker = world.worker(1);
    worker.map(1, 1, host(1), RW);
    world.vcpu(1, 0).access(1, true, |_| {});
    let fault = world.vcpu(0, 1).spawn(|vcpu| {
        let done = vcpu.fault(0, Level::LAST, host(2), RW);
        vcpu.world.expect(done == Installed::New, "a fault finds a page that nobody installed");
        vcpu.world.machine.speculate(1, gpa(0));
    });
    worker.unmap(0, 2);
    let stale = world.machine.caches(gpa(1), |_| true);
    world.expect(!stale, "unmapped, and a TLB still translates");
    world.tree.reclaim(&mut worker.who);
    world.expect(world.tree.waiting() == 0, "a detached table is not freed");
    fault.join();
    let there = worker.mapped(0).is_none_or(|leaf| leaf == (host(2), true));
    world.expect(there && worker.mapped(1).is_none(), "an unmapped page is back");
}

#[test]
fn a_table_is_unmapped_while_a_page_is_installed_in_it() {
    Model::new().cpus(2).explore(unmap_a_table_and_install);
}

#[test]
#[should_panic(expected = "use after free")]
fn a_table_freed_without_a_grace_period_is_installed_into() {
    Model::without(Skip::GracePeriod).cpus(2).explore(unmap_a_table_and_install);
}

/// Two threads unmap a page in use; neither returns before no TLB has it.
fn two_unmaps(pages: u64) -> impl Fn(World) + Send + Sync {
    move |world| {
        let mut worker = world.worker(1);
        worker.map(0, 2, host(0), RW);
        world.vcpu(0, 0).access(0, true, |_| {});
        let unmap = move |worker: &mut Actor| {
            worker.unmap(0, pages);
            let stale = translates(worker.world, host(0));
            worker.world.expect(!stale, "unmapped, and a TLB still translates");
        };
        let other = world.worker(0).spawn(move |worker| {
            worker.unmap(0, 1);
            let stale = translates(worker.world, host(0));
            worker.world.expect(!stale, "unmapped, and a TLB still translates");
        });
        unmap(&mut worker);
        other.join();
        world.expect(worker.mapped(0).is_none(), "unmapped, and mapped again");
    }
}

#[test]
fn neither_of_two_unmaps_returns_before_the_invalidation() {
    Model::new().preemptions(3).explore(two_unmaps(1));
}

#[test]
#[should_panic(expected = "unmapped, and a TLB still translates")]
fn a_second_unmap_returns_early_if_the_first_empties_at_once() {
    Model::without(Skip::UnmapLock).explore(two_unmaps(1));
}

#[test]
fn an_unmap_of_a_page_and_of_its_table_return_after_an_invalidation() {
    Model::new().explore(two_unmaps(2));
}

/// Two threads write-protect a page in use.
fn two_write_protects(world: World) {
    world.worker(1).map(0, 1, host(0), RW);
    world.vcpu(0, 0).access(0, true, |_| {});
    let protect = |worker: &mut Actor| {
        worker.write_protect(0, 1);
        let through = worker.world.machine.caches(gpa(0), |cached| cached.writes());
        worker.world.expect(!through, "write-protected, and a TLB lets a write through");
    };
    let other = world.worker(0).spawn(protect);
    protect(&mut world.worker(0));
    other.join();
}

#[test]
fn neither_of_two_write_protects_returns_before_the_invalidation() {
    Model::new().preemptions(3).explore(two_write_protects);
}

#[test]
#[should_panic(expected = "a TLB lets a write through")]
fn a_second_write_protect_returns_early_if_nobody_counts_the_open_ones() {
    Model::without(Skip::Open).explore(two_write_protects);
}

/// Hardware marks a page dirty while its table is unmapped.
fn unmap_against_a_hardware_write(world: World) {
    let clean = Attributes { dirty: slat::Dirty::Clean, ..RW };
    let mut worker = world.worker(1);
    worker.map(0, 2, host(0), clean);
    let guest = world.vcpu(0, 0).spawn(|vcpu| vcpu.access(0, true, |_| {}));
    let mut reported = false;
    let (who, reserve) = (&mut worker.who, &mut worker.reserve);
    let sink = |pages: slat::GpaRange| reported |= pages == range(0, 1);
    world.tree.unmap(who, reserve, range(0, 2), slat::Edges::Exact, sink).unwrap();
    let (_, written) = guest.join();
    world.expect(written == reported, "a write is lost");
}

#[test]
fn an_unmap_hears_of_every_write_that_hardware_has_marked() {
    Model::new().preemptions(3).hardware_dirty().explore(unmap_against_a_hardware_write);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn an_unmap_of_a_table_unread_loses_a_write() {
    Model::without(Skip::LeafByLeaf).hardware_dirty().explore(unmap_against_a_hardware_write);
}

/// CPU 1 has a read-only translation of a page that CPU 0 makes writable.
fn a_page_made_writable_by_another(world: World) {
    world.worker(1).map(0, 1, host(0), Attributes::RO);
    world.vcpu(1, 0).access(0, false, |_| {});
    let other = world.vcpu(0, 0).spawn(|vcpu| vcpu.fault(0, Level::LAST, host(0), RW));
    let mut vcpu = world.vcpu(1, 0);
    vcpu.run_cpu();
    let mut written = vcpu.access(0, true, |_| {});
    for _ in 0..3 {
        if !written {
            vcpu.fault(0, Level::LAST, host(0), RW);
            written = vcpu.access(0, true, |_| {});
        }
    }
    world.expect(written, "a page faults for ever");
    other.join();
}

#[test]
fn a_fault_that_finds_its_permission_there_is_the_last_one() {
    Model::new().preemptions(3).cpus(2).explore(a_page_made_writable_by_another);
}

#[test]
#[should_panic(expected = "a page faults for ever")]
fn a_fault_comes_back_for_ever_without_a_local_invalidation() {
    Model::without(Skip::LocalInvalidation).cpus(2).explore(a_page_made_writable_by_another);
}
