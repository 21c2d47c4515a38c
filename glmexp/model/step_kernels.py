"""Triton kernels of a decoding step: attention over slots, and a product of one row.

Imported where there is a GPU only: Triton comes with torch for CUDA. ``step_ops`` has them as operators.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_SPLITS = 32
_PROGRAMS = 264
"""As many as two on each of an H200's multiprocessors."""
_BLOCK = 64
"""Slots that a program looks at together."""


@triton.jit
def attend(
    query,
    keys,
    values,
    used,
    context,
    parts,
    peaks,
    arrived,
    cos,
    sin,
    scaling,
    slots,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    M: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """``query``, ``context`` (batch, GROUPS * HEADS, SIZE); ``keys``, ``values`` (batch, slots, GROUPS, SIZE); ``used``
    (batch,); ``parts`` (batch, GROUPS, SPLITS, M, CHANNELS) and ``peaks`` (.., 2, M) float32; ``arrived`` (batch *
    GROUPS,) int32, 0 before and after. A program is one group of a row and one of SPLITS parts of its used slots.

    With TURNED, channels that are rotated in pairs of neighbours, ``query`` is (batch, (GROUPS * HEADS + 2 * GROUPS) *
    SIZE), new queries, keys and values as the layer's product gives them, ``cos`` and ``sin`` (batch, TURNED / 2)
    float32: the program that has the last slot writes it.
    """
    pair, split = tl.program_id(0), tl.program_id(1)
    row, group = pair // GROUPS, pair % GROUPS
    seen = tl.load(used + row)
    each = tl.cdiv(tl.cdiv(seen, SPLITS), BLOCK) * BLOCK
    active = tl.cdiv(seen, each)
    if split >= active:
        return
    first = split * each
    end = tl.minimum(first + each, seen)
    head, channel, column = tl.arange(0, M), tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (channel < SIZE)[None, :]
    rows = ((pair * HEADS + head) * SIZE)[:, None] + channel[None, :]
    base = (row.to(tl.int64) * slots * GROUPS + group) * SIZE
    if TURNED:
        turned, angle = channel < TURNED, row * (TURNED // 2) + channel // 2
        c = tl.load(cos + angle, mask=turned, other=1.0)
        s = tl.load(sin + angle, mask=turned, other=0.0)
        s = tl.where(channel % 2 == 0, -s, s)
        own = query + row * ((HEADS + 2) * GROUPS * SIZE)
        rows_in = ((group * HEADS + head) * SIZE)[:, None]
        q = tl.load(own + rows_in + channel[None, :], mask=inside, other=0.0)
        beside = tl.load(own + rows_in + (channel ^ 1)[None, :], mask=inside, other=0.0)
        q = (q.to(tl.float32) * c[None, :] + beside.to(tl.float32) * s[None, :]).to(query.dtype.element_ty)
        if split == active - 1:
            new = own + ((HEADS * GROUPS + group) * SIZE)
            there = channel < SIZE
            k = tl.load(new + channel, mask=there, other=0.0).to(tl.float32) * c
            k += tl.load(new + (channel ^ 1), mask=there, other=0.0).to(tl.float32) * s
            last = base + (seen - 1) * (GROUPS * SIZE) + channel
            tl.store(keys + last, k.to(keys.dtype.element_ty), mask=there)
            tl.store(values + last, tl.load(new + GROUPS * SIZE + channel, mask=there, other=0.0), mask=there)
            tl.debug_barrier()
    else:
        q = tl.load(query + rows, mask=inside, other=0.0)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, CHANNELS), tl.float32)
    for start in range(first, end, BLOCK):
        there = start + column < end
        place = base + ((start + column) * (GROUPS * SIZE))[:, None] + channel[None, :]
        mask = there[:, None] & (channel < SIZE)[None, :]
        k = tl.load(keys + place, mask=mask, other=0.0)
        v = tl.load(values + place, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (scaling * 1.4426950408889634)
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        peak = higher
    if SPLITS > 1:
        mine = pair * SPLITS
        cell = (head * CHANNELS)[:, None] + channel[None, :]
        tl.store(parts + (mine + split) * (M * CHANNELS) + cell, sums)
        tl.store(peaks + (mine + split) * (2 * M) + head, peak)
        tl.store(peaks + (mine + split) * (2 * M) + M + head, total)
        tl.debug_barrier()
        order = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
        if order < active - 1:
            return
        tl.store(arrived + pair, 0)
        peak = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        sums = tl.zeros((M, CHANNELS), tl.float32)
        for other in range(active):
            theirs = tl.load(peaks + (mine + other) * (2 * M) + head, cache_modifier=".cg")
            weight = tl.load(peaks + (mine + other) * (2 * M) + M + head, cache_modifier=".cg")
            part = tl.load(parts + (mine + other) * (M * CHANNELS) + cell, cache_modifier=".cg")
            higher = tl.maximum(peak, theirs)
            shrink, grow = tl.exp2(peak - higher), tl.exp2(theirs - higher)
            total = total * shrink + weight * grow
            sums = sums * shrink[:, None] + part * grow[:, None]
            peak = higher
    tl.store(context + rows, (sums / total[:, None]).to(context.dtype.element_ty), mask=inside)


_arrived: dict[tuple[torch.device, int], Tensor] = {}


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    used: Tensor,
    scaling: float,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of one token a row over its used slots (flash decoding, Dao 2023). ``query`` (batch, heads, head_size);
    ``keys``, ``values`` (batch, slots, groups, head_size), contiguous; ``used`` (batch,) int32. Returns the shape of
    ``query``.

    With ``rotation``, two float32 (batch, 1, 1, n), ``query`` is (batch, 1, (heads + 2 * groups) * head_size): new
    queries, keys and values side by side. The first 2 n channels of queries and keys are rotated in pairs of
    neighbours, keys and values are written to the last used slot; returns (batch, 1, heads * head_size).

    PyTorch's flash attention takes two kernels: one attends to parts of the slots, one puts the parts together. Here
    the program that is done last does that.
    """
    query = query.contiguous()
    batch, slots, groups, size = keys.shape
    heads = query.shape[1] if rotation is None else query.shape[-1] // size - 2 * groups
    pairs = batch * groups
    rows, channels = max(16, _power(heads // groups)), max(16, _power(size))
    block = _BLOCK if channels <= 128 else _BLOCK // 2
    splits = max(1, min(MOST_SPLITS, -(-slots // block), _PROGRAMS // pairs))
    context = torch.empty_like(query) if rotation is None else query.new_empty(batch, 1, heads * size)
    cos, sin = (used, used) if rotation is None else (part.contiguous() for part in rotation)
    parts = torch.empty(pairs, splits, rows, channels, dtype=torch.float32, device=query.device)
    peaks = torch.empty(pairs, splits, 2, rows, dtype=torch.float32, device=query.device)
    if (query.device, pairs) not in _arrived:  # not inside of a recording: every step is called before
        _arrived[query.device, pairs] = torch.zeros(pairs, dtype=torch.int32, device=query.device)
    attend[(pairs, splits)](
        query, keys, values, used, context, parts, peaks, _arrived[query.device, pairs], cos, sin, scaling, slots,
        GROUPS=groups, HEADS=heads // groups, SIZE=size, TURNED=0 if rotation is None else 2 * cos.shape[-1], M=rows,
        CHANNELS=channels, BLOCK=block, SPLITS=splits, num_warps=8,
    )  # fmt: skip
    return context


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


@triton.jit
def product(
    states,
    weight,
    second,
    bias,
    out,
    rows,
    columns,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``out`` (rows,) = ``weight`` (rows, columns) ``states`` (columns,) + ``bias`` (rows,), summed in float32. GATED:
    silu(``weight`` ``states``) * (``second`` ``states``), rounded once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = row < rows
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    values = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        inside = start + column < columns
        if EVEN:
            mask = there[:, None]
            x = tl.load(states + start + column).to(tl.float32)
        else:
            mask = there[:, None] & inside[None, :]
            x = tl.load(states + start + column, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + place + start, mask=mask, other=0.0, eviction_policy="evict_first")
        total += w.to(tl.float32) * x[None, :]
        if GATED:
            v = tl.load(second + place + start, mask=mask, other=0.0, eviction_policy="evict_first")
            values += v.to(tl.float32) * x[None, :]
    result = tl.sum(total, 1)
    if GATED:
        result = result / (1 + tl.exp(-result)) * tl.sum(values, 1)
    if BIAS:
        result += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=there)


SIZE = (4, 2048, 4, 1)
"""Rows and columns of a weight that a program looks at together, its warps and stages: the fastest of nine on an H200
for ChatGLM3-6B's four layers, within 3 % of it for their halves (``experiments/bench/one_row.py``)."""


def row_product(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer on one row: ``states`` (..., in) of which all but the last dimension are 1, to (..., out).

    A reduction reads the weights as fast as memory gives them; cuBLAS pads the row to a tile of its matrix units.
    """
    return _product(states, weight, weight, bias, gated=False)


def gated_row_product(states: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """silu(``gate`` ``states``) * (``value`` ``states``) on one row, shapes as above: SwiGLU's (Shazeer 2020)."""
    return _product(states, gate, value, None, gated=True)


def _product(states: Tensor, weight: Tensor, second: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    rows, columns = weight.shape
    out = torch.empty(*states.shape[:-1], rows, dtype=states.dtype, device=states.device)
    height, block, warps, stages = SIZE
    height = height // 2 if gated else height  # as many rows of both matrices together
    added = weight if bias is None else bias
    product[(-(-rows // height),)](
        states.contiguous(), weight, second, added, out, rows, columns, BIAS=bias is not None, GATED=gated, ROWS=height,
        BLOCK=block, EVEN=columns % block == 0, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out
