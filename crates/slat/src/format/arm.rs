//! Arm VMSAv8-64 stage 2.
