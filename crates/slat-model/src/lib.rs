//! A machine made of software.
