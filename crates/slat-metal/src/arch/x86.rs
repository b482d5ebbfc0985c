//! AMD's SVM, on QEMU's `q35`.
