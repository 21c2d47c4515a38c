"""Positions and attention of ChatGLM-6B (v1), read off the ids.

A row is a context that sees itself in both directions, then sop, from which on the model writes. The context holds a
mask token, [gMASK] or [MASK]: what is written stands in its place (GLM, Du et al. 2022, section 2.1). In a mask here
True means visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glmexp.model.attention import causal_mask, open_prefix
from glmexp.model.configuration import ChatGLMConfig


def token(index: int | None) -> int:
    """A special id that the configuration must have."""
    assert index is not None, "ChatGLM-6B's config.json names its special ids"
    return index


def context_lengths(ids: Tensor, config: ChatGLMConfig) -> Tensor:
    """Index of the first sop of each row, (batch,)."""
    return ids.eq(token(config.bos_token_id)).int().argmax(dim=1)


def check_rows(ids: Tensor, config: ChatGLMConfig, training: bool) -> None:
    """ValueError unless every row has sop and a mask token. On an accelerator looking costs a synchronisation, so there
    training rows are not looked at."""
    if ids.device.type == "meta" or (training and ids.device.type != "cpu"):
        return
    has_mask = ids.eq(token(config.gmask_token_id)) | ids.eq(token(config.mask_token_id))
    whole = ids.eq(token(config.bos_token_id)).any(dim=1) & has_mask.any(dim=1)
    if not bool(whole.all()):
        raise ValueError(
            f"row {int((~whole).int().argmax())} of input_ids lacks sop ({config.bos_token_id}) or a mask token"
            f" ({config.gmask_token_id} or {config.mask_token_id}): ChatGLM-6B finds its positions by them; encode with"
            " add_special_tokens=True"
        )


def derive_positions(ids: Tensor, attention_mask: Tensor | None, config: ChatGLMConfig) -> Tensor:
    """Positions for whole rows ``ids`` (batch, length): (batch, 2, length), or (batch, length) without 2D encoding.

    ``attention_mask``: None, or (batch, length) with 1 = real; pads get 0 and are not counted. In row 0 the context
    counts up and everything from sop on has the mask token's position; in row 1 the context is 0 and what follows
    counts from 1. [gMASK] goes before [MASK]. With one row, [gMASK] counts on and [MASK] repeats its position.
    """
    real = torch.ones_like(ids) if attention_mask is None else attention_mask.ne(0).to(ids.dtype)
    index = (real.cumsum(dim=1) - 1) * real
    start = index.gather(1, context_lengths(ids, config)[:, None])
    is_gmask = ids.eq(token(config.gmask_token_id))
    global_mask = is_gmask.any(dim=1, keepdim=True)
    place = torch.where(global_mask, is_gmask, ids.eq(token(config.mask_token_id))).int().argmax(dim=1)[:, None]
    place = index.gather(1, place)
    written = index >= start
    if not config.position_encoding_2d:
        return torch.where(written & ~global_mask, place, index) * real
    rows = torch.where(written, place, index), torch.where(written, index - start + 1, 0)
    return torch.stack([row * real for row in rows], dim=1)


def prefix_lm_mask(
    ids: Tensor | None,
    hidden: Tensor,
    attention_mask: Tensor | None,
    past: int,
    extra: int,
    config: ChatGLMConfig,
    training: bool = False,
) -> Tensor | None:
    """Who sees whom, boolean, broadcasting to (batch, 1, new, ``extra`` + ``past`` + new); None where all see all.

    ``attention_mask``: None; (batch, past + new), 1 = real; or the released form (batch, 1, new, past + new), True =
    HIDDEN. ``hidden``: (batch, new, hidden); ``extra``: virtual tokens of a prefix, visible to all. A row that would
    see nothing (a pad's) sees everything: it has no meaning, and in some kernels it would be NaN.
    """
    length, keys = hidden.shape[1], past + hidden.shape[1]
    if attention_mask is not None and attention_mask.shape[-1] != keys:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}; its last dimension must be {keys}: {past} cached and"
            f" {length} new"
        )
    if attention_mask is not None and attention_mask.ndim == 4:
        visible = ~attention_mask.bool()
    elif past and length == 1:
        if attention_mask is None:
            return None
        visible = attention_mask.bool()[:, None, None, :]
    else:
        visible = causal_mask(length, keys, hidden.device)
        if past == 0:
            visible = visible | open_context(ids, keys, config, training)
        elif ids is not None and bool(ids.eq(token(config.bos_token_id)).any()):
            raise ValueError("sop stands after cached tokens: ChatGLM-6B needs its whole context in the first step")
        if attention_mask is not None:
            visible = visible & attention_mask.bool()[:, None, None, :]
    return open_prefix(visible | ~visible.any(dim=-1, keepdim=True), extra)


def open_context(ids: Tensor | None, keys: int, config: ChatGLMConfig, training: bool) -> Tensor:
    """(batch, 1, 1, keys): True for everything before sop."""
    if ids is None:
        raise ValueError("with inputs_embeds ChatGLM-6B needs its 4D attention_mask and its position_ids")
    check_rows(ids, config, training)
    columns = torch.arange(keys, device=ids.device)
    return (columns < context_lengths(ids, config)[:, None])[:, None, None, :]
