//! Dirty state that hardware keeps (rule 8): a collection against an unmap that takes the state along.

use slat_vm::sabotage::Skip;
use slat_vm::{LogMode, Worker};

use crate::machine::Tables;
use crate::world::{Model, SLOT, World, range};

fn collect(world: World, worker: &mut Worker<'static, Tables>) -> bool {
    let mut bitmap = [0];
    world.vm.dirty_log(worker, SLOT, &mut bitmap).unwrap();
    bitmap[0] & 1 == 1
}

/// A page was written, and the host takes it back while it is collected.
fn collection_against_an_unmap(world: World) {
    let mut worker = world.worker();
    world.vm.enable_log(&mut worker, SLOT, LogMode::Hardware).unwrap();
    let mut guest = world.guest();
    guest.write(|_| {});
    drop(guest);
    let host = world.worker();
    let unmap = loom::thread::spawn(move || {
        let mut host = host;
        drop(world.vm.invalidate_begin(&mut host, &[range(0, 1)]).unwrap());
    });
    let reported = collect(world, &mut worker);
    unmap.join().unwrap();
    world.expect(reported, "a write is lost");
}

#[test]
fn a_collection_does_not_return_without_what_an_unmap_has_taken() {
    Model::new().hardware().explore(collection_against_an_unmap);
}

#[test]
#[should_panic(expected = "a write is lost")]
fn a_collection_that_does_not_wait_misses_what_is_on_its_way() {
    Model::without(Skip::Transit).hardware().explore(collection_against_an_unmap);
}

/// The guest writes, without a fault, while the state is collected.
fn collection_against_writes(world: World) {
    let mut worker = world.worker();
    let mut guest = world.guest();
    guest.write(|_| {});
    world.vm.enable_log(&mut worker, SLOT, LogMode::Hardware).unwrap();
    let guest = guest.spawn(|guest| {
        guest.write(|_| {});
        guest.vcpu.statistics().faults
    });
    let during = collect(world, &mut worker);
    let (_, faults) = guest.join();
    world.expect(faults <= 1, "a write has faulted under a log of hardware");
    world.expect(during || collect(world, &mut worker), "a write is lost");
}

#[test]
fn a_write_that_hardware_has_marked_is_in_this_collection_or_in_the_next() {
    Model::new().hardware().preemptions(3).explore(collection_against_writes);
}
