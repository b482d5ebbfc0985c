//! What the command says to what makes no sense: a message that names it on standard error, nothing on standard
//! output, exit status 2.

use std::process::{Command, Stdio};

mod command;

use command::slat;

#[track_caller]
fn refused(line: &str, why: &str) {
    let output = slat(line);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{line}: {said}");
    assert!(output.stdout.is_empty(), "{line}");
    assert!(said.contains(why), "{line}: {said}");
    assert!(!said.contains("panicked"), "{line}: {said}");
}

#[test]
fn memory_that_cannot_be() {
    refused("dirty-log -b 0", "needs memory");
    refused("dirty-log -b 1.5G", "whole number");
    refused("dirty-log -b -1", "whole number");
    refused("dirty-log -b 99999999999999999999", "64 bits");
    refused("dirty-log -v 2 -b 16777215T", "64 bits");
    refused("dirty-log -b 6K", "guest pages of 4K");
    refused("dirty-log -b 4K --granule 64k", "host pages of 64K");
    refused("dirty-log -b 4K -m P40V48_64K", "guest pages of 64K");
}

#[test]
fn more_memory_than_addresses_or_than_the_machine_has() {
    refused("dirty-log -b 2T", "40-bit");
    refused("dirty-log -v 1024 -b 2G", "40-bit");
    refused("dirty-log -b 128G -m P36V48_4K", "36-bit");
    refused("dirty-log -b 8G --ipa-bits 32", "32-bit");
    refused("dirty-log -b 1G -p 0xfff0000000", "40-bit");
    refused("dirty-log -b 4000T -m P52V48_4K", "more than this computer has");
}

#[test]
fn what_only_another_architecture_has() {
    refused("dirty-log --arch ept --granule 16k", "tables of --arch ept are of 4K");
    refused("page-table --arch npt --granule 64k", "tables of --arch npt are of 4K");
    refused("access-tracking --arch npt --fwb", "a feature of Arm");
    refused("dirty-log --arch npt --hardware-access off", "EPT can do without");
    refused("dirty-log --arch ept --ipa-bits 36", "40 bits at least");
    refused("dirty-log --arch ept --clock virtual", "Arm machines");
    refused("dirty-log --arch amd", "invalid value");
}

#[test]
fn a_backend_that_a_workload_has_not() {
    for workload in ["access-tracking", "rmap-fork", "touch", "app", "pre-fault"] {
        refused(&format!("{workload} --backend metal"), "--backend metal: not yet");
    }
    for workload in ["rmap-fork", "touch", "boot", "app"] {
        refused(&format!("{workload} --backend kvm"), "--backend kvm: not yet");
    }
    refused("explain dirty-log --backend kvm", "which the model has");
    refused("dirty-log --backend iron", "invalid value");
}

#[test]
fn what_bare_metal_has_not() {
    let refused = |line: &str, why: &str| {
        let (workload, options) = line.split_once(' ').unwrap();
        refused(&format!("{workload} --backend metal {options}"), why);
    };
    refused("dirty-log --arch ept", "no EPT");
    refused("page-table --granule 16k", "tables and pages of 4K");
    refused("demand-paging --clock virtual", "--deterministic");
    refused("dirty-log --fwb", "--fwb");
    refused("dirty-log --exits", "--exits");
    refused("dirty-log -v 9", "8 at most");
    refused("dirty-log -m P40V48_64K", "pages of 4K");
    refused("dirty-log -m P52V48_4K", "48 bits at most");
    refused("dirty-log -s anonymous_hugetlb_64kb", "4K, 2M and 1G");
    refused("dirty-log -p 0x40000000 -b 1M", "0x80000000");
    refused("dirty-log -b 0", "needs memory");
    refused("dirty-log -b 100G -v 8", "more than this computer has");
    refused("dirty-log --split-threads 2 --eager-split 2M", "--split-threads");
    refused("demand-paging -u MISSING -r 2", "-r");
    refused("dirty-log-test -I 20", "-I");
    refused("dirty-log --cpu max,pauth=off", "such as max");
    refused("dirty-log --time-limit 0", "1..");
    refused("dirty-log --image /no/such/image", "no such file");
}

#[test]
fn what_only_bare_metal_has() {
    for option in
        ["--cpu max", "--image x", "--time-limit 9", "--deterministic", "--sabotage invalidate"]
    {
        refused(&format!("dirty-log {option}"), "only with --backend metal");
    }
    refused("dirty-log-test --deterministic --backend kvm", "only with --backend metal");
    refused("touch --deterministic", "unexpected argument");
}

#[test]
fn numbers_out_of_range() {
    refused("dirty-log -v 0", "1..=1024");
    refused("dirty-log -v 1025", "1..=1024");
    refused("dirty-log -v many", "invalid");
    refused("dirty-log -i 1", "2..");
    refused("dirty-log -w 101", "0..=100");
    refused("dirty-log -w -1", "0..=100");
    refused("dirty-log -x 0", "1..");
    refused("dirty-log -b 12K -x 4", "does not divide");
    refused("dirty-log -b 1M -x 3", "does not divide");
    refused("dirty-log --ipa-bits 31", "32..=52");
    refused("dirty-log --ipa-bits 53", "32..=52");
    refused("dirty-log -r x", "invalid");
    refused("dirty-log -p 0x800", "multiple of the page size");
    refused("dirty-log -p ff", "invalid");
}

#[test]
fn names_and_sizes_that_do_not_exist() {
    refused("dirty-log -m 9", "-m help");
    refused("dirty-log -m P47V64_4K", "-m help");
    refused("dirty-log -s hugetlb", "-s help");
    refused("dirty-log -s anonymous_hugetlb_16kb --granule 64k", "no pages of 16K");
    refused("dirty-log --granule 8k", "4k");
    refused("dirty-log --eager-split 1M", "2M, 1G");
    refused("dirty-log --eager-split 2M --granule 16k", "32M");
    refused("dirty-log --eager-split 1G --granule 64k", "512M");
    refused("dirty-log --eager-split 1G --ipa-bits 32", "2M");
    refused("dirty-log --eager-split on", "eager-split");
    refused("dirty-log --log pml", "bitmap, ring, hardware");
    refused("dirty-log --nonsense", "unexpected argument");
    refused("no-such-workload", "unrecognized");
    refused("", "Usage");
}

#[test]
fn options_that_need_another_option() {
    refused("dirty-log --split-threads 2", "--eager-split");
    refused("dirty-log --split-threads 2 --eager-split off", "--eager-split");
    refused("dirty-log --split-threads 0 --eager-split 2M", "1..=64");
    refused("dirty-log --split-threads 65 --eager-split 2M", "1..=64");
    refused("dirty-log --ring 256", "--log ring");
    refused("dirty-log --ring 256 --log hardware", "--log ring");
    refused("dirty-log --ring 128 --log ring", "power of two");
    refused("dirty-log --ring 300 --log ring", "power of two");
    refused("dirty-log --ring 131072 --log ring", "power of two");
    refused("dirty-log --ring many --log ring", "invalid");
    refused("dirty-log -g --log ring", "manual protect");
    refused("dirty-log -g --log hardware", "manual protect");
}

#[test]
fn hardwares_dirty_state_without_its_access_flag() {
    refused("dirty-log --log hardware --hardware-access off", "FEAT_HAFDBS");
    refused("dirty-log-test -M hardware --hardware-access off", "FEAT_HAFDBS");
    refused("dirty-log-test -M all --hardware-access off", "FEAT_HAFDBS");
}

#[test]
fn options_that_a_workloads_kernel_test_has_not() {
    for line in [
        "page-table -o",
        "page-table -x 2",
        "page-table -i 3",
        "demand-paging -x 2",
        "demand-paging -p 0x1000",
        "demand-paging --eager-split 2M",
        "access-tracking -x 2",
        "access-tracking -p 0x1000",
        "access-tracking -w 50",
    ] {
        refused(line, "unexpected argument");
    }
}

#[test]
fn userfaults_that_cannot_be() {
    refused("demand-paging -u missing", "MISSING, MINOR");
    refused("demand-paging -u", "value is required");
    refused("demand-paging -u MINOR", "only in shared memory");
    refused("demand-paging -u MINOR -s anonymous_hugetlb_2mb", "only in shared memory");
    refused("demand-paging -u MISSING -r 0", "1..=1024");
    refused("demand-paging -u MISSING -d -1", "invalid");
    refused("demand-paging -u MISSING -d soon", "invalid");
}

#[test]
fn nonsense_of_every_workload() {
    for workload in [
        "dirty-log",
        "dirty-log-test",
        "page-table",
        "demand-paging",
        "access-tracking",
        "memslot-stress",
    ] {
        let refused = |options: &str, why: &str| refused(&format!("{workload} {options}"), why);
        refused("-b 0", "needs memory");
        refused("-b 1.5G", "whole number");
        refused("-b 2T", "40-bit");
        refused("-b 99999999999999999999", "64 bits");
        refused("-v 0", "1..=1024");
        refused("-v 1025", "1..=1024");
        refused("-m 9", "-m help");
        refused("-s hugetlb", "-s help");
        refused("-s anonymous_hugetlb_16kb --granule 64k", "no pages of 16K");
        refused("--granule 8k", "4k");
        refused("--ipa-bits 31", "32..=52");
        refused("--hardware-access maybe", "off, on");
        if workload != "dirty-log" {
            refused("--clock virtual", "not yet; dirty-log has it");
        }
        refused("--nonsense", "unexpected argument");
    }
}

#[test]
fn slots_that_cannot_come_and_go() {
    refused("memslot-stress -i 0", "1..");
    refused("memslot-stress -d -1", "invalid");
    refused("memslot-stress -v 0", "1..=1024");
    refused("memslot-stress -b 4G --ipa-bits 32", "no page is left below it");
    refused("memslot-stress -p 0x1000", "unexpected argument");
    refused("memslot-stress -x 2", "unexpected argument");
}

#[test]
fn logs_that_cannot_be() {
    refused("dirty-log-test -M ring", "dirty-ring");
    refused("dirty-log-test -i 2", "3..");
    refused("dirty-log-test -I 0", "1..");
    refused("dirty-log-test -c 0", "256..=65536");
    refused("dirty-log-test -c 65537", "256..=65536");
    refused("dirty-log-test -p 0x800", "multiple of the page size");
    refused("dirty-log-test -b 1G -p 0xffc0000000", "40-bit");
    refused("dirty-log-test -v 1024 -b 1G", "40-bit");
}

#[test]
fn what_cannot_be_mapped_ahead() {
    refused("pre-fault -b 1G", "unexpected argument");
    refused("pre-fault --vcpus 0", "1..=1024");
    refused("pre-fault --source hugetlb", "-s help");
    refused("pre-fault --mode 9", "-m help");
    refused("pre-fault --clock virtual", "not yet");
}

#[test]
fn tests_that_cannot_be_run() {
    refused("memslot -s 0", "-1 for as many");
    refused("memslot -s 1", "2..=32764");
    refused("memslot -s -2", "2..=32764");
    refused("memslot -s 32765", "2..=32764");
    refused("memslot -f 6", "0..=5");
    refused("memslot -e 6", "0..=5");
    refused("memslot -f 3 -e 2", "the last test comes first");
    refused("memslot -l -1", "negative");
    refused("memslot -l long", "number of seconds");
    refused("memslot -r 0", "1..");
    refused("memslot -c 2", "unexpected argument");
    refused("memslot --vcpus 0", "1..=1024");
    refused("memslot --bytes 0", "multiple of 16M");
    refused("memslot --bytes 24M", "multiple of 16M");
    refused("memslot --bytes 1024G", "40-bit");
}

#[test]
fn slots_that_cannot_share_host_memory() {
    refused("mmu-stress -m 0", "need a size");
    refused("mmu-stress -s 0", "need a size");
    refused("mmu-stress -s 6K -m 12K", "whole pages of 4K");
    refused("mmu-stress -s 4K -m 8K --granule 64k", "whole pages of 64K");
    refused("mmu-stress -m 2048 -s 1", "40-bit");
    refused("mmu-stress -m 1 -s 4K", "at most 32764");
    refused("mmu-stress -c 0", "1..=1024");
    refused("mmu-stress -c 3 -m 8K -s 4K", "more vCPUs than pages");
    refused("mmu-stress -m 1 --ipa-bits 32", "32-bit");
}

#[test]
fn what_is_not_there_says_so() {
    refused("dirty-log -n", "out of scope");
}

#[test]
fn what_virtual_time_has_not() {
    let refused = |options: &str, why: &str| {
        refused(&format!("dirty-log --clock virtual {options}"), why);
    };
    refused("--check", "no content to compare");
    refused("-b 0", "needs memory");
    refused("-b 3M", "blocks of 2M");
    refused("-v 1024 -b 1T", "8T");
    refused("-o", "of their own");
    refused("-x 2", "one memslot");
    refused("-p 0x1000", "begins at 0");
    refused("-w 50", "only write");
    refused("-a", "page after page");
    refused("-e", "stand");
    refused("-n", "out of scope");
    refused("-s shmem", "anonymous_thp only");
    refused("-m 2", "guest pages");
    refused("--granule 16k", "4K tables");
    refused("--ipa-bits 40", "44");
    refused("--fwb", "--maintenance none");
    refused("--hardware-access on", "access flag");
    refused("--design linux-7.99", "not one of linux-5.18");
    refused("--profile cray", "not one of arm-server-2022");
    refused("--lock fair", "exclusive");
}

#[test]
fn what_only_virtual_time_has() {
    for option in ["--design slat", "--profile x", "--lock none", "--host-lock gone"] {
        refused(&format!("dirty-log {option}"), "only with --clock virtual");
    }
}

#[test]
fn lists_are_printed_on_demand() {
    for (line, wanted) in [
        ("dirty-log -m help", &["P40V48_4K", "P52V48_64K", "P36V47_16K", "(default)"][..]),
        (
            "dirty-log -s help",
            &["anonymous_thp", "anonymous_hugetlb_1gb", "shmem", "shared_hugetlb"],
        ),
        ("page-table --help", &["Memory of all vCPUs together", "\"check\"", "Exit status"]),
        ("demand-paging --help", &["MISSING", "\"demand\"", "Exit status"]),
        ("access-tracking --help", &["--no-flush", "\"idle\"", "Exit status"]),
        ("dirty-log --help", &["--eager-split", "\"phases\"", "Exit status"]),
        (
            "list",
            &[
                "dirty-log",
                "dirty_log_perf_test",
                "page-table",
                "kvm_page_table_test",
                "demand-paging",
                "access-tracking",
                "dirty-log-test",
                "memslot_perf_test",
                "memslot-stress",
                "mmu-stress",
                "pre-fault",
                "touch",
                "boot",
                "app",
            ],
        ),
        ("--version", &["slat "]),
    ] {
        let output = slat(line);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0), "{line}");
        assert!(wanted.iter().all(|wanted| text.contains(wanted)), "{line}: {text}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_reason_to_panic() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    let command = command.args(["dirty-log", "-b", "1M"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_ne!(output.status.code(), Some(101));
    assert!(output.stderr.is_empty());
}

#[test]
fn an_image_that_is_none() {
    refused("dirty-log --backend metal --image /etc/passwd", "not an ELF image for --arch arm");
    refused("dirty-log --backend metal --image /dev/null", "there is no such file");
    let own = env!("CARGO_BIN_EXE_slat");
    refused(&format!("boot --backend metal --image {own}"), "not an ELF image for --arch arm");
}

#[test]
fn processors_that_do_not_fit_the_vcpus() {
    refused("dirty-log -v 2 -b 1M -c 0", "1 processors for 2 vCPUs");
    refused("demand-paging -b 1M -c 0,0,0", "3 processors for 1 vCPUs");
    refused("dirty-log -b 1M -c 99999", "may not run on processor 99999");
    refused("dirty-log -b 1M -c zero", "invalid value");
    refused(
        "dirty-log -b 2M -s anonymous_thp --clock virtual -c 0",
        "-c: vCPUs have no processors",
    );
}
