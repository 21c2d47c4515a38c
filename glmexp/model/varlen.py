"""Attention kind ``varlen``: within each segment of a packed batch, without any (length x length) mask.

Segments are named as transformers names them: ``cu_seq_lens_q`` (segments + 1,) int32, 0 and the running sum of their
lengths over the flattened batch, and ``max_length_q``, a Python int. They cover every position, padding too (segments
of its own). Without them the kind is sdpa, for evaluation and for decoding with a cache: that is also why sdpa's mask
function is registered for it, as transformers masks nothing for a name that it does not know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from glmexp.model.attention import causal_mask

VARLEN = "varlen"


def register() -> None:
    """Make ``attn_implementation="varlen"`` known to transformers."""
    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, sdpa_mask)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    prefix_length: int = 0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside of each segment; sdpa where no segments are given.

    ``query`` (batch, heads, length, head_size); ``key``, ``value`` (batch, key/value heads, prefix_length + length,
    head_size), of which the first ``prefix_length`` are a P-Tuning prefix, seen by every query of their row. Returns
    (batch, length, heads, head_size) and None for the weights.

    Raises ValueError for what segments cannot be combined with: a mask, a cache, a sliding window.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
    batch, _, length, _ = query.shape
    if attention_mask is not None:
        raise ValueError("cu_seq_lens_q and an attention mask: segments are masks enough, give one of them")
    if key.shape[2] != prefix_length + length:
        raise ValueError(f"cu_seq_lens_q with {key.shape[2] - prefix_length - length} cached keys: segments are whole")
    if sliding_window is not None:
        raise ValueError("attention kind varlen has no sliding window")
    assert max_length_q is not None, "max_length_q goes with cu_seq_lens_q"
    ends, longest = cu_seq_lens_q, max_length_q
    flat_key, flat_value = key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)
    if prefix_length:
        # Flash attention aligns its causal mask to the last query and the last key, so keys in front are seen by all.
        ends = ends + prefix_length * torch.arange(len(ends), dtype=ends.dtype, device=ends.device)
        longest += prefix_length
        places = _with_prefix(cu_seq_lens_q, ends, batch, length, prefix_length)
        flat_key, flat_value = flat_key.index_select(0, places), flat_value.index_select(0, places)
    # Token by token: the kernel gives its result the layout of the query, and what comes next, in both directions,
    # would copy one that lies head by head. Compiled blocks write the rotated query so at once.
    flat_query = query.transpose(1, 2).flatten(0, 1).contiguous()
    if has_kernel(query):
        # What torch.nn.attention.varlen calls itself; that function's arguments differ between torch 2.11 and 2.13.
        context = torch.ops.aten._flash_attention_forward(
            flat_query, flat_key, flat_value, cu_seq_lens_q, ends, max_length_q, longest, dropout, True, False,
            scale=scaling,
        )[0]  # fmt: skip
    else:
        context = _one_by_one(flat_query, flat_key, flat_value, cu_seq_lens_q, ends, dropout, scaling)
    return context.unflatten(0, (batch, length)), None


def has_kernel(query: Tensor) -> bool:
    """PyTorch's flash attention takes queries of this kind: 16 bit on an NVIDIA GPU of Ampere or later."""
    return (
        query.is_cuda
        and torch.version.cuda is not None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """The same with one call of sdpa a segment: exact and in any dtype, and slow on a GPU (it waits to read the ends).

    ``query`` (tokens, heads, head_size); ``key``, ``value`` (keys, key/value heads, head_size).
    """
    parts = []
    starts, key_starts = query_ends.tolist(), key_ends.tolist()
    for first, last, first_key, last_key in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        new, keys = last - first, last_key - first_key
        mask = None if new == keys else causal_mask(new, keys, query.device)
        segment = F.scaled_dot_product_attention(
            query[None, first:last].transpose(1, 2),
            key[None, first_key:last_key].transpose(1, 2),
            value[None, first_key:last_key].transpose(1, 2),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(segment[0].transpose(0, 1))
    return torch.cat(parts)


def _with_prefix(query_ends: Tensor, key_ends: Tensor, batch: int, length: int, prefix_length: int) -> Tensor:
    """Which of the flattened (batch * (prefix_length + length)) keys stand where: (tokens + segments * prefix_length,).

    Each segment has its row's prefix and then its own keys. Sizes are Python ints, so nothing waits for a GPU.
    """
    keys = batch * length + (len(query_ends) - 1) * prefix_length
    place = torch.arange(keys, device=query_ends.device)
    segment = torch.searchsorted(key_ends, place, right=True, out_int32=True) - 1
    inside = place - key_ends[segment]
    row, start = query_ends[segment] // length, query_ends[segment] % length
    return row * (prefix_length + length) + inside + torch.where(inside < prefix_length, 0, start)
