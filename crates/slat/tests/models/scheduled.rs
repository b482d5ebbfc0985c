//! What these models rely on: that loom's threads share their test's OS thread, and that no interleaving is passed over.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use slat::sync::{AtomicUsize, Ordering};

/// What is left out is noted on the OS thread of the test.
#[test]
fn every_thread_of_a_model_runs_on_the_thread_of_its_test() {
    let test = std::thread::current().id();
    loom::model(move || {
        let inside = || std::thread::current().id();
        assert_eq!(loom::thread::spawn(inside).join().unwrap(), test);
    });
}

/// tokio-rs/loom issue 392: with loom's own atomics, the first load hides that the store can come first.
#[test]
fn a_load_hides_no_interleaving() {
    let found = Arc::new(Mutex::new(BTreeSet::new()));
    let into = found.clone();
    loom::model(move || {
        let shared = Arc::new(AtomicUsize::new(0));
        let other = loom::thread::spawn({
            let shared = shared.clone();
            move || {
                shared.load(Ordering::Relaxed);
                shared.store(1, Ordering::Relaxed);
            }
        });
        let seen = shared.load(Ordering::Relaxed);
        other.join().unwrap();
        into.lock().unwrap().insert(seen);
    });
    assert_eq!(found.lock().unwrap().len(), 2);
}
