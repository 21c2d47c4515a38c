"""The sum over the GPUs of one machine, the residual sum and the norm behind it in one Triton kernel.

Each rank stores its part straight into the other ranks' memory, 4 bytes of it and 4 bytes that number the call (NCCL's
LL protocol: 8 bytes are stored whole, so the number says that its neighbour has arrived), and looks for theirs in its
own. Calls take turns with two buffers: whoever writes call n has read call n - 1 of all others, which therefore are
done with n - 2. No barrier, no reset, and nothing waits for the host.

Imported where there is a GPU only: Triton comes with torch for CUDA.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_SEND: Any = tl.constexpr("st.volatile.global.v4.u32 [$1], {$2, $4, $3, $4}; mov.u32 $0, 0;")
_NOW: Any = tl.constexpr("mov.u64 $0, %globaltimer;")
_RECEIVE = """{
    .reg .pred there, early;
    .reg .u32 low, first, high, second;
    .reg .u64 now;
again:
    ld.volatile.global.v4.u32 {low, first, high, second}, [$2];
    setp.eq.u32 there, first, $3;
    setp.eq.and.u32 there, second, $3, there;
    @there bra done;
    mov.u64 now, %globaltimer;
    setp.lt.u64 early, now, $4;
    @early bra again;
    LATE
done:
    mov.u32 $0, low;
    mov.u32 $1, high;
}"""
_OR_STOP: Any = tl.constexpr(_RECEIVE.replace("LATE", "trap;"))
_OR_NAN: Any = tl.constexpr(_RECEIVE.replace("LATE", "mov.u32 low, 0x7fff7fff; mov.u32 high, 0x7fff7fff;"))
"""NaN in bf16 and in fp16."""


@triton.jit
def _first(words, kind: tl.constexpr):
    """The number in the lower half of each 32 bits, as float32."""
    return words.to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _second(words, kind: tl.constexpr):
    """The one in the upper half."""
    return (words >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _four(words, kind: tl.constexpr):
    """The four numbers in each 64 bits, as float32."""
    low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    return _first(low, kind), _second(low, kind), _first(high, kind), _second(high, kind)


@triton.jit
def _half(number, kind: tl.constexpr, place: tl.constexpr):
    """``number`` rounded, as the 16 bits at ``place`` of 64."""
    return (number.to(kind).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF) << place


@triton.jit
def _words(a, b, c, d, kind: tl.constexpr):
    """Four float32 rounded and put into 64 bits."""
    return _half(a, kind, 0) | _half(b, kind, 16) | _half(c, kind, 32) | _half(d, kind, 48)


@triton.jit
def sum_rows(
    part,
    residual,
    weight,
    total,
    normed,
    buffers,
    calls,
    epsilon,
    limit_ns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    TRIAL: tl.constexpr,
):
    """One row a program. ``part``, ``residual``, ``total``, ``normed`` (rows, 4 * WORDS) and ``weight`` (4 * WORDS,) of
    one 16-bit kind; ``buffers`` (RANKS,) addresses of (2, MOST_ROWS, RANKS, WORDS) of 16 bytes; ``calls`` (MOST_ROWS,).

    ``total`` = sum of the ranks' parts, in the order of ranks, so that all have the same bits, + residual, rounded
    once. ``normed`` = its RMSNorm. What has not arrived after ``limit_ns`` ends the process, or is NaN with TRIAL.
    """
    kind = part.dtype.element_ty
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < WORDS
    at = tl.minimum(at, WORDS - 1)  # what is too much writes the same once more
    here = row * WORDS + at
    call = tl.load(calls + row) + 1
    own = tl.load(part.to(tl.pointer_type(tl.int64)) + here)
    if RESIDUAL:  # read before waiting
        e, f, g, h = _four(tl.load(residual.to(tl.pointer_type(tl.int64)) + here), kind)
    if NORM:
        scales = tl.load(weight.to(tl.pointer_type(tl.int64)) + at)
    mine = tl.load(buffers + RANK)
    low, high = own.to(tl.int32), (own >> 32).to(tl.int32)
    slots = ((call & 1) * MOST_ROWS + row) * RANKS
    for step in tl.static_range(1, RANKS):
        peer = tl.load(buffers + (RANK + step) % RANKS)
        to = peer + ((slots + RANK) * WORDS + at).to(tl.int64) * 16
        tl.inline_asm_elementwise(_SEND, "=r,l,r,r,r", [to, low, high, call], tl.int32, is_pure=False, pack=1)
    late = tl.inline_asm_elementwise(_NOW, "=l", [], tl.int64, is_pure=False, pack=1) + limit_ns
    a = tl.zeros((BLOCK,), tl.float32)
    b, c, d = a, a, a
    for source in tl.static_range(RANKS):
        if source != RANK:
            place = mine + ((slots + source) * WORDS + at).to(tl.int64) * 16
            low, high = tl.inline_asm_elementwise(
                _OR_NAN if TRIAL else _OR_STOP, "=r,=r,l,r,l", [place, call, late], (tl.int32, tl.int32),
                is_pure=False, pack=1,
            )  # fmt: skip
        else:
            low, high = own.to(tl.int32), (own >> 32).to(tl.int32)
        a += _first(low, kind)
        b += _second(low, kind)
        c += _first(high, kind)
        d += _second(high, kind)
    if RESIDUAL:
        a, b, c, d = a + e, b + f, c + g, d + h
    rounded = _words(a, b, c, d, kind)
    tl.store(total.to(tl.pointer_type(tl.int64)) + here, rounded, mask=inside)
    if NORM:
        a, b, c, d = _four(rounded, kind)
        squares = tl.sum(tl.where(inside, a * a + b * b + c * c + d * d, 0.0))
        scale = tl.rsqrt(squares / (4 * WORDS) + epsilon)
        e, f, g, h = _four(scales, kind)
        result = _words(e * (a * scale), f * (b * scale), g * (c * scale), h * (d * scale), kind)
        tl.store(normed.to(tl.pointer_type(tl.int64)) + here, result, mask=inside)
    tl.debug_barrier()  # all threads have read the number of the call
    tl.store(calls + row, call)
