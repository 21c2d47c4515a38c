"""Attention kinds and masks shared by both networks. A mask here is boolean and True where a query may look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from glmexp.config.errors import ConfigError, Problem
from glmexp.model.prefix import join_prefix

DEFAULT_KIND = "sdpa"
"""Where model.attention is null and no packed rows decide (``config.model_rules.attention_kind``)."""


def check_kind(kind: str | None, offered: tuple[str, ...], network: str) -> None:
    """ConfigError when ``attn_implementation`` names a kind that the network does not offer (None: the default)."""
    if kind is not None and kind not in offered:
        raise ConfigError(
            Problem(
                "attn_implementation", f"{kind!r} does not apply to {network}", f"choose one of {', '.join(offered)}"
            )
        )


def attention_function(kind: str | None) -> Callable[..., Any]:
    """The function of a kind: transformers' own or registered one, ``eager_attention`` for eager."""
    return ALL_ATTENTION_FUNCTIONS.get_interface(kind or "eager", eager_attention)


class FusedAttention(nn.Module):
    """Attention with one projection for query, key and value. A subclass has ``query_key_value``, ``dense``,
    ``scaling`` and says how fused rows are split and rotated."""

    config: Any
    layer_idx: int
    scaling: float
    dropout: float = 0.0
    query_key_value: nn.Linear
    dense: nn.Linear

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fused rows (batch, length, rows) to query, key, value (batch, heads, length, head_size)."""
        raise NotImplementedError

    def rotate(self, states: Tensor, rotation: Any) -> Tensor:
        """Queries or keys with their positions in them."""
        raise NotImplementedError

    def at_once(self, fused: Tensor, rotation: Any, cache: Any) -> Tensor | None:
        """Rotation, cache and attention (batch, 1, heads * head_size) by one kernel; None where there is none."""
        return None

    def forward(
        self,
        hidden: Tensor,
        prefix_key: Tensor | None,
        prefix_value: Tensor | None,
        rotation: Any,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """``hidden`` (batch, length, hidden) to the same; the cache gets rotated keys without the prefix."""
        fused = self.query_key_value(hidden)
        context = self.at_once(fused, rotation, past_key_values)
        if context is not None:
            return self.dense(context)
        query, key, value = self.split(fused)
        query, key = self.rotate(query, rotation), self.rotate(key, rotation)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = attention_function(self.config._attn_implementation)
        context, _ = attend(
            self,
            query,
            join_prefix(prefix_key, key),
            join_prefix(prefix_value, value),
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            prefix_length=0 if prefix_key is None else prefix_key.shape[2],
            **kwargs,
        )
        return self.dense(context.flatten(2))


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Plain attention with a float32 softmax.

    ``query`` (batch, heads, length, head_size); ``key``, ``value`` (batch, key/value heads, keys, head_size); the
    mask broadcasts to (batch, heads, length, keys), None means causal (bottom right). Returns (batch, length, heads,
    head_size) and the weights.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = causal_mask(query.shape[2], key.shape[2], query.device)
    # Scaled before the product: in float16 the unscaled product can overflow.
    scores = torch.matmul(query * scaling, key.transpose(2, 3)).float()
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(torch.float32).min)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """(1, 1, queries, keys): the last query sees all keys, each earlier one sees one less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]


def open_prefix(mask: Tensor, prefix_length: int) -> Tensor:
    """Put ``prefix_length`` always visible keys in front of ``mask`` (..., queries, keys)."""
    return nn.functional.pad(mask, (prefix_length, 0), value=True)


def decoder_mask(attention_mask: Tensor | None, hidden: Tensor, past: int, prefix_length: int) -> Tensor | None:
    """The mask of v2 and v3: causal, and the key is real.

    ``attention_mask``: None; (batch, past + length), 1 = real; or a boolean (batch, 1, length, past + length), True =
    visible, used as it is (packed rows). ``hidden``: (batch, length, hidden), read for its shape and device. Returns
    None where plain causal attention (or a single query that sees all) says the same, so that fused kernels without a
    mask apply. Rows of pads see everything: they have no meaning, and a fully hidden row would be NaN in some
    kernels.
    """
    length = hidden.shape[1]
    keys = past + length
    if attention_mask is None:
        if length == 1 or (past == 0 and prefix_length == 0):
            return None
        return open_prefix(causal_mask(length, keys, hidden.device), prefix_length)
    if attention_mask.ndim == 4:
        if attention_mask.dtype != torch.bool:
            raise ValueError(f"a 4D attention_mask must be bool, True = visible, and is {attention_mask.dtype}")
        return open_prefix(attention_mask, prefix_length)
    if attention_mask.ndim != 2 or attention_mask.shape[1] != keys:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}; it must be (batch, {keys}): {past} cached and"
            f" {length} new"
        )
    real = attention_mask.bool()
    visible = causal_mask(length, keys, hidden.device) & real[:, None, None, :]
    visible = visible | ~real[:, None, past:, None]
    return open_prefix(visible, prefix_length)
