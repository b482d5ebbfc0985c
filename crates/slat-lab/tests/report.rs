//! What `slat report` promises before it runs anything; what is on the page is tested where it is made.

use std::fs;

mod command;

use command::slat;

#[test]
fn a_file_that_is_not_ours_is_left_alone() {
    let path = std::env::temp_dir().join(format!("slat-report-{}.html", std::process::id()));
    fs::write(&path, "precious").unwrap();
    let output = slat(&format!("report --output {}", path.display()));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("slat report has not written") && output.stdout.is_empty(), "{said}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    fs::remove_file(&path).unwrap();
}

#[test]
fn where_no_file_can_be_is_said_first() {
    let output = slat("report --output /nowhere/at/all.html");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("/nowhere/at/all.html: cannot be written")
    );
}
