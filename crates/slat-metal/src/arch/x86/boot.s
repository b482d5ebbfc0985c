// How a CPU comes up in 64-bit mode, and where it goes when something interrupts the hypervisor.

.section .note.pvh, "a", @note
.balign 4
    .long   4, 4, 18                    // name, description, type: XEN_ELFNOTE_PHYS32_ENTRY
    .asciz  "Xen"
    .long   _start

// The first CPU starts here (PVH): protected mode without paging, flat segments, ebx = start info.
.section .text.boot, "ax"
.code32
.global _start
_start:
    cli
    // present, writable, accessed
    lea     eax, [{own_blocks} + 0x23]
    mov     dword ptr [{own_root}], eax
    xor     ebp, ebp
    jmp     long_mode

// The others start at a copy of this below 1 MiB, in real mode.
.code16
.global trampoline, trampoline_end
trampoline:
    cli
    xor     ax, ax
    mov     ds, ax
    // lgdt with an operand of 32 bits, and the address that this has in the copy.
    .byte   0x66, 0x0f, 0x01, 0x16
    .word   {trampoline} + (gdt_low - trampoline)
    mov     eax, cr0
    or      eax, 1
    mov     cr0, eax
    .byte   0x66, 0xea                  // jmp 24:protected_mode
    .long   protected_mode
    .word   24
gdt_low:
    .word   4 * 8 - 1
    .long   gdt
trampoline_end:

.code32
protected_mode:
    mov     eax, 16
    mov     ds, eax
    mov     ss, eax
    mov     ebp, dword ptr [{starting}]

// ebp = number of the CPU, ebx = start info.
long_mode:
    mov     eax, cr4
    or      eax, 0x620                  // PAE, OSFXSR, OSXMMEXCPT
    mov     cr4, eax
    lea     eax, [{own_root}]
    mov     cr3, eax
    mov     ecx, 0xc0000080             // EFER: LME, NXE
    rdmsr
    or      eax, 0x900
    wrmsr
    mov     eax, cr0
    and     eax, 0x9ffffffb             // not CD, NW, EM
    or      eax, 0x80010023             // PG, WP, NE, MP, PE
    mov     cr0, eax
    lgdt    [gdt_register]
    .byte   0xea                        // jmp 8:code_64
    .long   code_64
    .word   8

.code64
code_64:
    mov     eax, 16
    mov     ds, eax
    mov     es, eax
    mov     ss, eax
    xor     eax, eax
    mov     fs, eax
    mov     gs, eax
    mov     ebp, ebp
    mov     eax, ebp
    shl     eax, 16
    lea     rsp, [rip + __stacks_end]
    sub     rsp, rax
    mov     edi, ebp
    mov     esi, ebx
    test    ebp, ebp
    jnz     1f
    call    {first_cpu}
1:  call    {other_cpu}

.balign 8
gdt:                                    // nothing, 64-bit code, data, 32-bit code
    .quad   0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cf9b000000ffff
gdt_register:
    .word   4 * 8 - 1
    .long   gdt

// Exceptions: all are failures. 16 bytes for each of the 32; the CPU pushes an error code for some.
.text
.balign 16
.global exceptions
exceptions:
.set vector, 0
.rept 32
    .balign 16
    .if (0x60227d00 >> vector) & 1
    .else
    push    0
    .endif
    push    vector
    jmp     exception
    .set vector, vector + 1
.endr
exception:
    cld
    mov     rdi, rsp
    and     rsp, -16
    call    {exception}

// A kick: it has made the guest leave, and that is all.
.global interrupt
interrupt:
    push    rax
    mov     eax, {end_of_interrupt}
    mov     dword ptr [rax], 0
    pop     rax
    iretq
