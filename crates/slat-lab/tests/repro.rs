//! What `slat repro` promises: published figures beside ours, each marked, and the same at every run. The tables that need
//! a faster build are run by CI.

use std::sync::LazyLock;

use serde_json::Value;

mod command;

use command::{report, slat};

const WALKS: [&str; 2] = ["skip-levels", "move-barrier"];

/// A walk takes a debug build seconds.
static REPORTS: LazyLock<[Value; 2]> =
    LazyLock::new(|| WALKS.map(|table| report(&format!("repro --only {table}"))));

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn claimed_cells_are_within_tolerance() {
    for (report, cells, tolerance) in [(&REPORTS[0], 6, 5.0), (&REPORTS[1], 9, 10.0)] {
        let found = report["cells"].as_array().unwrap();
        assert_eq!(found.len(), cells);
        for cell in found {
            assert_eq!((&cell["ok"], &cell["unit"]), (&true.into(), &"%".into()), "{cell}");
            assert_eq!(cell["tolerance"], tolerance);
            let figure = |key: &str| cell[key].as_f64().unwrap();
            assert!((figure("ours") - figure("published")).abs() <= tolerance, "{cell}");
        }
        assert_eq!(report["slat"].as_array().unwrap().len(), cells);
    }
}

#[test]
fn the_object_has_the_documented_shape() {
    let report = &REPORTS[1];
    assert_eq!(keys(report), ["cells", "slat"]);
    let expected =
        ["cell", "kind", "note", "ok", "ours", "published", "table", "tolerance", "unit"];
    assert_eq!(keys(&report["cells"][0]), expected);
    assert_eq!(keys(&report["slat"][0]), ["cell", "note", "ours", "table"]);
}

#[test]
fn only_the_fitted_cell_is_not_a_prediction() {
    let report = &REPORTS[1];
    let kinds: Vec<_> =
        report["cells"].as_array().unwrap().iter().map(|cell| cell["kind"].clone()).collect();
    assert_eq!(kinds[0], "fitted");
    assert!(kinds[1..].iter().all(|kind| kind == "predicted"), "{kinds:?}");
}

#[test]
fn to_skip_children_is_slightly_slower_than_to_skip_levels() {
    for cell in REPORTS[0]["cells"].as_array().unwrap() {
        let child = cell["note"].as_str().unwrap().rsplit(' ').next().unwrap();
        let slower = child.parse::<f64>().unwrap() - cell["ours"].as_f64().unwrap();
        assert!((-0.01..1.0).contains(&slower), "{cell}");
    }
}

#[test]
fn the_same_figures_come_at_every_run() {
    for (table, first) in WALKS.iter().zip(&*REPORTS) {
        assert_eq!(*first, report(&format!("repro --only {table}")));
    }
}

#[test]
fn a_table_that_nobody_published_is_refused() {
    let output = slat("repro --only everything");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn faults_that_prefetch_spares_are_counted_and_made_up_traces_are_no_prediction() {
    let found = report("repro --only trailing-prefetch");
    let [before, after, boot, app] = &found["cells"].as_array().unwrap()[..] else {
        panic!("{found}");
    };
    assert_eq!([&before["ours"], &after["ours"]], [1_572_864.0, 196_608.0]);
    assert!([before, after, app].iter().all(|cell| cell["ok"] == true), "{found}");
    assert_eq!(app["kind"], "fitted");
    assert!(app["note"].as_str().unwrap().contains("synthetic"));
    // Whatever a real boot gives, it was not fitted to what was published.
    assert_eq!(boot["kind"], "predicted");
    assert!(boot["note"].as_str().unwrap().starts_with("recorded trace: "));
}
