//! The README's embedding is the one that the documentation compiles.
#![allow(missing_docs)]

#[test]
fn the_readmes_embedding_is_the_documented_one() {
    let readme = include_str!("../../../README.md");
    let documented = include_str!("../src/lib.rs");
    let example = readme.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next());
    let mut documented = documented.lines().filter_map(|line| line.strip_prefix("//!"));
    for line in example.unwrap().lines() {
        let found = documented.any(|other| other.strip_prefix(' ').unwrap_or(other) == line);
        assert!(found, "not in the documentation, or not in this order: {line}");
    }
}
