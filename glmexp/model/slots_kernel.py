"""Attention of one new token a row over its slots in one Triton kernel (flash decoding, Dao 2023).

PyTorch's flash attention takes two: one that attends to parts of the slots, one that puts the parts together. Here the
program that is done last puts them together. Imported where there is a GPU only: Triton comes with torch for CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    scaling,
    slots,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    M: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """``query``, ``context`` (batch, GROUPS * HEADS, SIZE); ``keys``, ``values`` (batch, slots, GROUPS, SIZE); ``used``
    (batch,); ``parts`` (batch, GROUPS, SPLITS, M, CHANNELS) and ``peaks`` (.., 2, M) float32; ``arrived`` (batch *
    GROUPS,) int32, 0 before and after. A program is one group of a row and one of SPLITS parts of its used slots.
    """
    pair, split = tl.program_id(0), tl.program_id(1)
    row, group = pair // GROUPS, pair % GROUPS
    seen = tl.load(used + row)
    each = tl.cdiv(tl.cdiv(seen, SPLITS), BLOCK) * BLOCK
    active = tl.cdiv(seen, each)
    if split >= active:
        return
    first = split * each
    last = tl.minimum(first + each, seen)
    head, channel, column = tl.arange(0, M), tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (channel < SIZE)[None, :]
    rows = ((pair * HEADS + head) * SIZE)[:, None] + channel[None, :]
    q = tl.load(query + rows, mask=inside, other=0.0)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, CHANNELS), tl.float32)
    base = (row.to(tl.int64) * slots * GROUPS + group) * SIZE
    for start in range(first, last, BLOCK):
        there = start + column < last
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


MOST_SPLITS = 32
PROGRAMS = 264
"""As many as two on each of an H200's multiprocessors."""
BLOCK = 32
WARPS = 4
_arrived: dict[tuple[torch.device, int], Tensor] = {}


def attention(query: Tensor, keys: Tensor, values: Tensor, used: Tensor, scaling: float) -> Tensor:
    """``query`` (batch, heads, head_size); ``keys``, ``values`` (batch, slots, groups, head_size), contiguous; ``used``
    (batch,) int32. Returns (batch, heads, head_size). Nothing waits for the host, addresses may be recorded."""
    query = query.contiguous()
    batch, heads, size = query.shape
    slots, groups = keys.shape[1:3]
    pairs = batch * groups
    splits = max(1, min(MOST_SPLITS, -(-slots // BLOCK), PROGRAMS // pairs))
    rows, channels = max(16, _power(heads // groups)), max(16, _power(size))
    context = torch.empty_like(query)
    parts = torch.empty(pairs, splits, rows, channels, dtype=torch.float32, device=query.device)
    peaks = torch.empty(pairs, splits, 2, rows, dtype=torch.float32, device=query.device)
    if (query.device, pairs) not in _arrived:
        _arrived[query.device, pairs] = torch.zeros(pairs, dtype=torch.int32, device=query.device)
    attend[(pairs, splits)](
        query, keys, values, used, context, parts, peaks, _arrived[query.device, pairs], scaling, slots, GROUPS=groups,
        HEADS=heads // groups, SIZE=size, M=rows, CHANNELS=channels, BLOCK=BLOCK, SPLITS=splits, num_warps=WARPS,
    )  # fmt: skip
    return context


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()
