// Into a guest and out of it.
//
// enter_guest(rdi = Registers *, rsi = the guest's control block, rdx = where vmsave put the hypervisor's state).
// Registers: rbx, rcx, rdx, rsi, rdi, rbp, r8 to r15 at 0, the FXSAVE area at 112. rax, rsp and rip are in the block.

.text
.global enter_guest
enter_guest:
    push    rbx
    push    rbp
    push    r12
    push    r13
    push    r14
    push    r15
    push    rdx
    push    rdi
    mov     rax, rsi
    // From here to the guest's first instruction an interrupt stays pending, and then makes the guest leave: it is
    // intercepted if the interrupt flag was set at vmrun.
    clgi
    sti
    fxrstor64 [rdi + 112]
    vmload  rax
    mov     rbx, [rdi]
    mov     rcx, [rdi + 8]
    mov     rdx, [rdi + 16]
    mov     rsi, [rdi + 24]
    mov     rbp, [rdi + 40]
    mov     r8, [rdi + 48]
    mov     r9, [rdi + 56]
    mov     r10, [rdi + 64]
    mov     r11, [rdi + 72]
    mov     r12, [rdi + 80]
    mov     r13, [rdi + 88]
    mov     r14, [rdi + 96]
    mov     r15, [rdi + 104]
    mov     rdi, [rdi + 32]
    vmrun   rax
    // rax and rsp are what they were.
    vmsave  rax
    push    rdi
    mov     rdi, [rsp + 8]
    mov     [rdi], rbx
    mov     [rdi + 8], rcx
    mov     [rdi + 16], rdx
    mov     [rdi + 24], rsi
    pop     qword ptr [rdi + 32]
    mov     [rdi + 40], rbp
    mov     [rdi + 48], r8
    mov     [rdi + 56], r9
    mov     [rdi + 64], r10
    mov     [rdi + 72], r11
    mov     [rdi + 80], r12
    mov     [rdi + 88], r13
    mov     [rdi + 96], r14
    mov     [rdi + 104], r15
    fxsave64 [rdi + 112]
    // The guest's control words are not the hypervisor's: no exceptions, to nearest.
    fninit
    push    0x1f80
    ldmxcsr [rsp]
    add     rsp, 8
    pop     rdi
    pop     rax
    vmload  rax
    cli
    cld
    stgi
    pop     r15
    pop     r14
    pop     r13
    pop     r12
    pop     rbp
    pop     rbx
    ret
