// Into a guest and out of it.
//
// u64 enter_guest(Vcpu *): what is called from outside of the guest returns when the guest leaves, with ESR_EL2, or all
// ones for an interrupt. In a Vcpu: x0 to x30 at 0, ELR at 248, SPSR at 256, FPCR and FPSR at 264, at 280 whether the
// guest's floating-point registers are to be loaded, q0 to q31 at 288.
//
// Unless they are, the first instruction that uses them leaves the guest, and q0 to q31 stay the hypervisor's.

.equ FP_TRAP, 0x37ff                    // CPTR_EL2: RES1, TFP
.equ FP_FREE, 0x33ff

.text
.global enter_guest
enter_guest:
    // What a called function keeps, and where the registers are.
    stp     x29, x30, [sp, #-176]!
    stp     x19, x20, [sp, #16]
    stp     x21, x22, [sp, #32]
    stp     x23, x24, [sp, #48]
    stp     x25, x26, [sp, #64]
    stp     x27, x28, [sp, #80]
    str     x0, [sp, #160]
    ldp     x1, x2, [x0, #248]
    ldr     x3, [x0, #280]
    msr     ELR_EL2, x1
    msr     SPSR_EL2, x2
    cbnz    x3, load_floating_point
    mov     x3, #FP_TRAP
    msr     CPTR_EL2, x3
0:  ldp     x2, x3, [x0, #16]
    ldp     x4, x5, [x0, #32]
    ldp     x6, x7, [x0, #48]
    ldp     x8, x9, [x0, #64]
    ldp     x10, x11, [x0, #80]
    ldp     x12, x13, [x0, #96]
    ldp     x14, x15, [x0, #112]
    ldp     x16, x17, [x0, #128]
    ldp     x18, x19, [x0, #144]
    ldp     x20, x21, [x0, #160]
    ldp     x22, x23, [x0, #176]
    ldp     x24, x25, [x0, #192]
    ldp     x26, x27, [x0, #208]
    ldp     x28, x29, [x0, #224]
    ldr     x30, [x0, #240]
    ldp     x0, x1, [x0]
    eret
    // Nothing behind it is executed speculatively.
    dsb     nsh
    isb

// x0 = Vcpu: the hypervisor's registers that a called function keeps are put away, the guest's loaded.
load_floating_point:
    stp     d8, d9, [sp, #96]
    stp     d10, d11, [sp, #112]
    stp     d12, d13, [sp, #128]
    stp     d14, d15, [sp, #144]
    ldp     x3, x4, [x0, #264]
    msr     FPCR, x3
    msr     FPSR, x4
    add     x1, x0, #288
    ldp     q0, q1, [x1]
    ldp     q2, q3, [x1, #32]
    ldp     q4, q5, [x1, #64]
    ldp     q6, q7, [x1, #96]
    ldp     q8, q9, [x1, #128]
    ldp     q10, q11, [x1, #160]
    ldp     q12, q13, [x1, #192]
    ldp     q14, q15, [x1, #224]
    ldp     q16, q17, [x1, #256]
    ldp     q18, q19, [x1, #288]
    ldp     q20, q21, [x1, #320]
    ldp     q22, q23, [x1, #352]
    ldp     q24, q25, [x1, #384]
    ldp     q26, q27, [x1, #416]
    ldp     q28, q29, [x1, #448]
    ldp     q30, q31, [x1, #480]
    b       0b

.global guest_interrupt
guest_interrupt:
    stp     x0, x1, [sp, #-16]!
    mov     x1, #-1
    b       leave_guest

.global guest_synchronous
guest_synchronous:
    stp     x0, x1, [sp, #-16]!
    mrs     x1, ESR_EL2

// x1 = what to return; the guest's x0 and x1 are on the stack.
leave_guest:
    ldr     x0, [sp, #176]
    stp     x2, x3, [x0, #16]
    stp     x4, x5, [x0, #32]
    stp     x6, x7, [x0, #48]
    stp     x8, x9, [x0, #64]
    stp     x10, x11, [x0, #80]
    stp     x12, x13, [x0, #96]
    stp     x14, x15, [x0, #112]
    stp     x16, x17, [x0, #128]
    stp     x18, x19, [x0, #144]
    stp     x20, x21, [x0, #160]
    stp     x22, x23, [x0, #176]
    stp     x24, x25, [x0, #192]
    stp     x26, x27, [x0, #208]
    stp     x28, x29, [x0, #224]
    str     x30, [x0, #240]
    ldp     x2, x3, [sp], #16
    stp     x2, x3, [x0]
    mrs     x2, ELR_EL2
    mrs     x3, SPSR_EL2
    ldr     x4, [x0, #280]
    stp     x2, x3, [x0, #248]
    cbnz    x4, save_floating_point
    mov     x2, #FP_FREE
    msr     CPTR_EL2, x2
    isb
0:  mov     x0, x1
    ldp     x19, x20, [sp, #16]
    ldp     x21, x22, [sp, #32]
    ldp     x23, x24, [sp, #48]
    ldp     x25, x26, [sp, #64]
    ldp     x27, x28, [sp, #80]
    ldp     x29, x30, [sp], #176
    ret

// x0 = Vcpu: the guest's registers are put away, to be loaded again when it next uses them.
save_floating_point:
    str     xzr, [x0, #280]
    mrs     x2, FPCR
    mrs     x3, FPSR
    stp     x2, x3, [x0, #264]
    add     x2, x0, #288
    stp     q0, q1, [x2]
    stp     q2, q3, [x2, #32]
    stp     q4, q5, [x2, #64]
    stp     q6, q7, [x2, #96]
    stp     q8, q9, [x2, #128]
    stp     q10, q11, [x2, #160]
    stp     q12, q13, [x2, #192]
    stp     q14, q15, [x2, #224]
    stp     q16, q17, [x2, #256]
    stp     q18, q19, [x2, #288]
    stp     q20, q21, [x2, #320]
    stp     q22, q23, [x2, #352]
    stp     q24, q25, [x2, #384]
    stp     q26, q27, [x2, #416]
    stp     q28, q29, [x2, #448]
    stp     q30, q31, [x2, #480]
    // The hypervisor's floating point is the default one.
    msr     FPCR, xzr
    ldp     d8, d9, [sp, #96]
    ldp     d10, d11, [sp, #112]
    ldp     d12, d13, [sp, #128]
    ldp     d14, d15, [sp, #144]
    b       0b
