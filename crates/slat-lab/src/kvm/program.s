// The guest's program. It runs at privilege level 3 with I/O privileges, position-independent, with the address of its
// page of parameters in rdi. It reports to the host by writing to a port, is entered again when there is an order in its
// parameters, follows it, and reports. Registers:
//   rsi first address, r8 stride, rcx count, r9 per cent of stores, r10 dice, r11 tag of the last store, r12 what tags
//   differ by, r13 accesses; rbx index, rdx address; rax, rbp and r14 are scratch.

// Throws the dice: the result is in rax.
.macro slat_dice
    mov rax, r10
    shl rax, 13
    xor r10, rax
    mov rax, r10
    shr rax, 7
    xor r10, rax
    mov rax, r10
    shl rax, 17
    xor r10, rax
    mov rax, r10
.endm

// Makes the value for address rdx in rax: the order's, or a new tag above the number of the page.
.macro slat_value
    mov rax, [rdi + {value}]
    test rax, rax
    jnz 7f
    add r11, r12
    mov rax, rdx
    sub rax, [rdi + {base}]
    shr rax, 12
    or rax, r11
7:
.endm

// Counts an access, and goes to the end if the host wants the guest to stop.
.macro slat_beat
    inc r13
    mov [rdi + {accesses}], r13
    cmp qword ptr [rdi + {stop}], 0
    jne .Lslat_end
.endm

.global slat_guest_begin
slat_guest_begin:
.Lslat_report:
    out {port}, al
    mov rsi, [rdi + {start}]
    mov r8, [rdi + {stride}]
    mov rcx, [rdi + {count}]
    mov r9, [rdi + {write_percent}]
    mov r10, [rdi + {dice}]
    mov r11, [rdi + {tag}]
    mov r12, [rdi + {tag_step}]
    mov r13, [rdi + {accesses}]
    mov rax, [rdi + {order}]
    cmp rax, {halves}
    je .Lslat_halves
    cmp rax, {execute}
    je .Lslat_execute
    cmp rax, {spin}
    je .Lslat_spin

// Loads and stores, one at each stride, in order or at random.
.Lslat_touch:
    xor ebx, ebx
.Lslat_next:
    mov rdx, rbx
    cmp qword ptr [rdi + {shuffle}], 0
    je 2f
    slat_dice
    mul rcx
2:
    imul rdx, r8
    add rdx, rsi
    cmp r9, 100
    jae .Lslat_store
    test r9, r9
    jz .Lslat_load
    mov rbp, rdx
    slat_dice
    mov edx, 100
    mul rdx
    xchg rdx, rbp
    cmp rbp, r9
    jb .Lslat_store
.Lslat_load:
    mov rax, [rdx]
    mov r14, [rdi + {compare}]
    cmp r14, {with_page}
    jb .Lslat_touched
    ja 3f
    test rax, rax
    jz .Lslat_touched
    mov r14, rdx
    sub r14, [rdi + {base}]
    shr r14, 12
    xor rax, r14
    test eax, {page_mask}
    jz .Lslat_touched
    jmp 4f
3:
    cmp rax, [rdi + {value}]
    je .Lslat_touched
4:
    inc qword ptr [rdi + {wrong}]
    jmp .Lslat_touched
.Lslat_store:
    slat_value
.global slat_guest_store
slat_guest_store:
    mov [rdx], rax
.global slat_guest_stored
slat_guest_stored:
.Lslat_touched:
    slat_beat
    inc rbx
    cmp rbx, rcx
    jb .Lslat_next
    cmp qword ptr [rdi + {forever}], 0
    jne .Lslat_touch
.Lslat_end:
    mov [rdi + {dice}], r10
    mov [rdi + {tag}], r11
    jmp .Lslat_report

// At each stride: stores at its start, then loads from every page of its second half.
.Lslat_halves:
    xor ebx, ebx
5:
    mov rdx, rbx
    imul rdx, r8
    add rdx, rsi
    slat_value
    mov [rdx], rax
    slat_beat
    lea rbp, [rdx + r8]
    mov r14, r8
    shr r14, 1
    add rdx, r14
6:
    mov rax, [rdx]
    slat_beat
    add rdx, 4096
    cmp rdx, rbp
    jb 6b
    inc rbx
    cmp rbx, rcx
    jb 5b
    jmp .Lslat_end

// At each stride: stores an instruction that jumps back here, and executes it.
.Lslat_execute:
    xor ebx, ebx
    lea rbp, [rip + 9f]
8:
    mov rdx, rbx
    imul rdx, r8
    add rdx, rsi
    slat_value
    mov [rdx], rax
    jmp rdx
9:
    slat_beat
    inc rbx
    cmp rbx, rcx
    jb 8b
    jmp .Lslat_end

// Never comes to an end.
.Lslat_spin:
    pause
    jmp .Lslat_spin
.global slat_guest_end
slat_guest_end:
