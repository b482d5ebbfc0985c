// How a CPU comes up at EL2, and what happens when it takes an exception from a guest.

// The first CPU starts here. There is no device tree in x0 where the kernel is an ELF.
.section .text.boot, "ax"
.global _start
_start:
    mov     x19, #0
    bl      common
    // The MMU is on: bss is written through the caches.
    adrp    x0, __bss_start
    add     x0, x0, :lo12:__bss_start
    adrp    x1, __bss_end
    add     x1, x1, :lo12:__bss_end
0:  cmp     x0, x1
    b.hs    1f
    stp     xzr, xzr, [x0], #16
    b       0b
1:  bl      first_cpu
    b       .

// The others start here (PSCI CPU_ON): x0 = number of the CPU.
.global _secondary
_secondary:
    mov     x19, x0
    bl      common
    mov     x0, x19
    bl      other_cpu
    b       .

// x19 = number of the CPU: registers, stack, MMU.
common:
    mrs     x1, CurrentEL
    cmp     x1, #(2 << 2)
    b.ne    .                           // no EL2: nothing can be said without a console
    msr     TPIDR_EL2, x19
    msr     SPSel, #1
    ldr     x1, =0x33ff                 // RES1; no FP trap
    msr     CPTR_EL2, x1
    mov     x1, #(1 << 31)              // RW: EL1 is AArch64
    msr     HCR_EL2, x1
    msr     MDCR_EL2, xzr
    msr     CNTVOFF_EL2, xzr
    msr     VTTBR_EL2, xzr
    mov     x1, #3                      // EL1 may use the physical timer and counter
    msr     CNTHCTL_EL2, x1
    mrs     x1, MIDR_EL1
    msr     VPIDR_EL2, x1
    mrs     x1, MPIDR_EL1
    msr     VMPIDR_EL2, x1
    adrp    x1, vectors
    add     x1, x1, :lo12:vectors
    msr     VBAR_EL2, x1
    adrp    x1, __stacks_end
    add     x1, x1, :lo12:__stacks_end
    sub     x1, x1, x19, lsl #16
    mov     sp, x1
    // Attribute 0: Device-nGnRnE, 1: Normal write-back.
    mov     x1, #0xff00
    msr     MAIR_EL2, x1
    ldr     x1, =0x80823519             // RES1, 40-bit output, 4K granule, inner-shareable write-back walks, 39-bit input
    msr     TCR_EL2, x1
    adrp    x1, {own_table}
    add     x1, x1, :lo12:{own_table}
    msr     TTBR0_EL2, x1
    tlbi    alle2                       // TLBs hold anything after a reset
    tlbi    alle1
    dsb     nsh
    isb
    ldr     x1, =0x30c51835             // RES1, I, C, M
    msr     SCTLR_EL2, x1
    isb
    ret

.macro unexpected n
    .balign 0x80
    mov     x0, #\n
    b       unexpected_exception
.endm

.text
.balign 0x800
vectors:
    unexpected 0
    unexpected 1
    unexpected 2
    unexpected 3
    unexpected 4
    unexpected 5
    unexpected 6
    unexpected 7
    .balign 0x80                        // synchronous, from a guest
    b       guest_synchronous
    .balign 0x80                        // IRQ, from a guest
    b       guest_interrupt
    unexpected 10
    unexpected 11
    unexpected 12
    unexpected 13
    unexpected 14
    unexpected 15
