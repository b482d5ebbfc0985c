// memcpy and memset, which the compiler calls and which otherwise go byte by byte or word by word: structures are copied
// with every fault, and tables zeroed. Unaligned accesses are allowed, since the MMU is on.

.text
// void *memcpy(void *to, const void *from, size_t size)
.global memcpy
memcpy:
    mov     x3, x0
    subs    x2, x2, #32
    b.lo    2f
1:  ldp     q0, q1, [x1], #32
    stp     q0, q1, [x3], #32
    subs    x2, x2, #32
    b.hs    1b
2:  tbz     x2, #4, 3f                  // the low bits of what is left are right
    ldr     q0, [x1], #16
    str     q0, [x3], #16
3:  tbz     x2, #3, 4f
    ldr     x4, [x1], #8
    str     x4, [x3], #8
4:  tbz     x2, #2, 5f
    ldr     w4, [x1], #4
    str     w4, [x3], #4
5:  tbz     x2, #1, 6f
    ldrh    w4, [x1], #2
    strh    w4, [x3], #2
6:  tbz     x2, #0, 7f
    ldrb    w4, [x1]
    strb    w4, [x3]
7:  ret

// void *memset(void *to, int byte, size_t size)
.global memset
memset:
    mov     x3, x0
    and     w1, w1, #0xff
    dup     v0.16b, w1
    cbnz    w1, 2f
    // Zeroes: by blocks of the caches, if they are allowed and the place is aligned to one.
    mrs     x4, DCZID_EL0
    tbnz    x4, #4, 2f
    mov     x5, #4
    lsl     x5, x5, x4                  // takes the low six bits of x4, of which those above the fourth are zero
    sub     x6, x5, #1
    tst     x3, x6
    b.ne    2f
    subs    x2, x2, x5
    b.lo    1f
0:  dc      zva, x3
    add     x3, x3, x5
    subs    x2, x2, x5
    b.hs    0b
1:  add     x2, x2, x5
2:  subs    x2, x2, #32
    b.lo    4f
3:  stp     q0, q0, [x3], #32
    subs    x2, x2, #32
    b.hs    3b
4:  tbz     x2, #4, 5f
    str     q0, [x3], #16
5:  tbz     x2, #3, 6f
    str     d0, [x3], #8
6:  tbz     x2, #2, 7f
    str     s0, [x3], #4
7:  tbz     x2, #1, 8f
    str     h0, [x3], #2
8:  tbz     x2, #0, 9f
    str     b0, [x3]
9:  ret
