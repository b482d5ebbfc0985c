//! The guest's device tree: the board's, less what the guest is not given.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use dtoolkit::fdt::Fdt;
use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};
use dtoolkit::{Node, Property};

/// What else the guest has.
pub(super) struct Given<'a> {
    pub(super) memory: Range<u64>,
    pub(super) initrd: Range<u64>,
    pub(super) vcpus: usize,
    pub(super) command_line: &'a str,
}

/// Nodes of the root that the guest gets, by the beginnings of their names: the console and its clock, interrupt controller,
/// timer, firmware.
const KEPT: [&str; 8] =
    ["aliases", "apb-pclk", "chosen", "cpus", "intc@", "pl011@", "psci", "timer"];
/// Bytes of one CPU's redistributor.
const REDISTRIBUTOR: u64 = 0x20000;

/// The tree as bytes, and where the devices in it have their registers.
pub(super) fn for_guest(
    board: Fdt<'_>,
    cpus: usize,
    given: &Given<'_>,
) -> Result<(Vec<u8>, Vec<Range<u64>>), &'static str> {
    let mut tree = DeviceTree::from_fdt(&board);
    let root = &mut tree.root;
    let names: Vec<String> = root.children().map(|node| node.name().into()).collect();
    for name in names.iter().filter(|name| !KEPT.iter().any(|kept| name.starts_with(kept))) {
        root.remove_child(name);
    }
    let mut devices = Vec::new();
    for node in root.children_mut() {
        match node.name() {
            "psci" => set(node, "method", "hvc"),
            "cpus" => keep_cpus(node, given.vcpus),
            "chosen" => {
                // Each run is to be the same.
                node.remove_property("kaslr-seed");
                node.remove_property("rng-seed");
                set(node, "bootargs", given.command_line);
                set(node, "linux,initrd-start", given.initrd.start);
                set(node, "linux,initrd-end", given.initrd.end);
            }
            name if name.starts_with("intc@") => {
                interrupt_controller(node, cpus)
                    .ok_or("an interrupt controller that is no GICv3: gic-version=3")?;
                devices.extend(registers(node));
            }
            name if name.starts_with("pl011@") => devices.extend(registers(node)),
            _ => {}
        }
    }
    let mut memory = DeviceTreeNode::new_unchecked("memory");
    set(&mut memory, "device_type", "memory");
    let Range { start, end } = given.memory;
    set(&mut memory, "reg", cells(&[start, end - start]));
    root.add_child(memory);
    Ok((tree.to_dtb(), devices))
}

fn set(node: &mut DeviceTreeNode, name: &str, value: impl dtoolkit::ToPropertyValue) {
    node.add_property(DeviceTreeProperty::new_unchecked(name, value));
}

/// Of two cells each, as everywhere on this board.
fn cells(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_be_bytes()).collect()
}

fn keep_cpus(node: &mut DeviceTreeNode, vcpus: usize) {
    let names: Vec<String> = node.children().map(|cpu| cpu.name().into()).collect();
    // `cpu-map` names all of them.
    for name in names {
        let number =
            name.strip_prefix("cpu@").and_then(|number| usize::from_str_radix(number, 16).ok());
        if number.is_none_or(|number| number >= vcpus) {
            node.remove_child(&name);
        }
    }
}

/// Without its translation service, which writes to memory past stage 2; with the redistributors that there are.
fn interrupt_controller(node: &mut DeviceTreeNode, cpus: usize) -> Option<()> {
    let names: Vec<String> = node.children().map(|child| child.name().into()).collect();
    for name in names {
        node.remove_child(&name);
    }
    let registers = registers(node);
    let [distributor, redistributors] = &registers[..] else { return None };
    let size = distributor.end - distributor.start;
    let all = cpus as u64 * REDISTRIBUTOR;
    set(node, "reg", cells(&[distributor.start, size, redistributors.start, all]));
    Some(())
}

/// What the property `reg` says.
fn registers(node: &DeviceTreeNode) -> Vec<Range<u64>> {
    let Some(reg) = node.property("reg") else { return Vec::new() };
    let numbers: Vec<u64> = reg
        .value()
        .chunks_exact(8)
        .map(|bytes| bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
        .collect();
    numbers.chunks_exact(2).map(|pair| pair[0]..pair[0] + pair[1]).collect()
}
