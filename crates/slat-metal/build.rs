//! Tells the linker where in memory the image lies.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=link");
    let variable = |name| env::var(name).unwrap_or_default();
    if variable("CARGO_CFG_TARGET_OS") == "none" {
        let script = format!("link/{}.ld", variable("CARGO_CFG_TARGET_ARCH"));
        let script = Path::new(&variable("CARGO_MANIFEST_DIR")).join(script);
        println!("cargo::rustc-link-arg-bins=-T{}", script.display());
        // Position-independent by default; it stays where the script says, and nobody relocates it.
        println!("cargo::rustc-link-arg-bins=--no-pie");
    }
}
