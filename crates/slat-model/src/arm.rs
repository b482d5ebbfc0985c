//! How Arm hardware translates: VMSAv8-64 stage 2, written from the Arm ARM (DDI 0487) and not from the engine, so that
//! a wrong bit of the engine is a wrong translation here.

pub(crate) mod descriptor;
pub(crate) mod registers;
