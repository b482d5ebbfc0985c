//! What is needed to run Linux as a guest, as far as it needs no hardware: what is asked, what is counted, which pages are
//! touched, which features of the CPU a guest is told of.

pub mod exits;
pub mod features;
pub mod options;
pub mod report;
pub mod touches;
