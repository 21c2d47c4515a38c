"""A key-value cache of fixed size and attention over it, for decoding one token at a time.

Every row of a batch has the same number of slots and fills them from the left, whatever its length: a prefix first,
then the prompt without its pads, then what is written. So a length a row says what may be seen, no mask is as long as
the cache, and shapes and addresses stay the same from token to token, which a CUDA graph needs. Keys and values are
kept by group and never repeated for the heads that share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from glmexp.model import step_ops
from glmexp.model.step_ops import HAS_TRITON
from glmexp.model.varlen import has_kernel

SLOTS = "slots"
"""Attention kind of a decoding step."""


def register() -> None:
    """Make ``attn_implementation="slots"`` known to transformers."""
    step_ops.define()
    AttentionInterface.register(SLOTS, slots_attention)
    AttentionMaskInterface.register(SLOTS, sdpa_mask)


class Filled(NamedTuple):
    """Which slots a step writes and sees; the same tensors in every layer and every step, changed in place."""

    rows: Tensor
    """0..batch-1, int64 (batch,)."""
    place: Tensor
    """Slot that the new token takes, int64 (batch,)."""
    used: Tensor
    """Slots seen, the new one too, int32 (batch,)."""
    visible: Tensor
    """The same as a mask (batch, 1, 1, slots), True = seen; read where no kernel takes lengths."""
    query_ends: Tensor
    """0..batch, int32: one query a row."""
    key_ends: Tensor
    """Where each row's slots begin in the flattened cache, int32 (batch + 1,)."""

    @staticmethod
    def empty(batch: int, slots: int, device: torch.device) -> Filled:
        """Nothing is filled."""
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
        return Filled(
            rows=torch.arange(batch, device=device),
            place=torch.zeros(batch, dtype=torch.int64, device=device),
            used=torch.zeros(batch, dtype=torch.int32, device=device),
            visible=torch.zeros(batch, 1, 1, slots, dtype=torch.bool, device=device),
            query_ends=ends,
            key_ends=ends * slots,
        )

    def begin(self, lengths: Tensor) -> None:
        """The next token stands behind ``lengths`` (batch,) filled slots."""
        self.place.copy_(lengths)
        self.see()

    def see(self) -> None:
        """The new token's slot and all before it are seen."""
        self.used.copy_(self.place + 1)
        slots = self.visible.shape[-1]
        columns = torch.arange(slots, device=self.place.device)
        self.visible.copy_((columns <= self.place[:, None])[:, None, None])

    def advance(self) -> None:
        """One token further; past the last slot nothing moves, so that a row that has ended cannot leave its own."""
        self.place.copy_((self.place + 1).clamp_(max=self.visible.shape[-1] - 1))
        self.see()


@dataclass
class LayerSlots:
    """One layer's keys and values, (batch, slots, groups, head_size) each, as a layer's attention calls a cache."""

    keys: Tensor
    values: Tensor
    filled: Filled

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new token's ``key`` and ``value`` (batch, groups, 1, head_size); the whole layer's, by slot."""
        rows, place = self.filled.rows, self.filled.place
        self.keys.index_put_((rows, place), key.squeeze(2))
        self.values.index_put_((rows, place), value.squeeze(2))
        return self.keys, self.values

    def attend_at_once(self, new: Tensor) -> bool:
        """One kernel rotates, writes and attends: see ``step_kernels.attention``. ``new`` (batch, 1, ...)."""
        return HAS_TRITON and has_kernel(self.keys) and new.dtype == self.keys.dtype

    @staticmethod
    def get_seq_length(*_: Any) -> int:
        """Something is cached. How much differs by row, and a tensor says it: masks and positions are given."""
        return 1


class SlotCache:
    """All layers' slots. They are made when the first prompt is laid in, on the devices that its keys lie on."""

    def __init__(self, batch: int, slots: int) -> None:
        self.batch, self.slots = batch, slots
        self.layers: list[LayerSlots] = []

    def fill(self, prompt: Cache, pads: Tensor, prefix: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Lay in what a forward over the prompts (batch, length) left in ``prompt``; each row's slots in use, (batch,).

        ``pads`` (batch,): pads in front of each row, which are left out. ``prefix``: by layer its keys and values
        (batch, groups, virtual tokens, head_size), which go in front; empty without one.
        """
        for index, (key, value) in enumerate(keys_and_values(prompt)):
            if len(self.layers) <= index:
                self.layers.append(self._layer(key))
            layer = self.layers[index]
            for slots, states, at in ((layer.keys, key, 0), (layer.values, value, 1)):
                start = 0
                if prefix:
                    given = prefix[index][at]
                    start = given.shape[2]
                    slots[:, :start].copy_(given.transpose(1, 2))
                slots[:, start : start + states.shape[2]].copy_(_without_pads(states, pads).transpose(1, 2))
        length = key.shape[2] + (prefix[0][0].shape[2] if prefix else 0)
        return length - pads

    def _layer(self, like: Tensor) -> LayerSlots:
        groups, head_size = like.shape[1], like.shape[3]
        shape = (self.batch, self.slots, groups, head_size)
        filled = next((one.filled for one in self.layers if one.keys.device == like.device), None)
        return LayerSlots(
            keys=torch.zeros(shape, dtype=like.dtype, device=like.device),
            values=torch.zeros(shape, dtype=like.dtype, device=like.device),
            filled=filled or Filled.empty(self.batch, self.slots, like.device),
        )

    @property
    def filled(self) -> list[Filled]:
        """What is filled, once a device."""
        return list({id(layer.filled): layer.filled for layer in self.layers}.values())

    def bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.layers)


def keys_and_values(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Each layer's (key, value) of a transformers cache, (batch, groups, length, head_size)."""
    found = []
    for layer in cache.layers:
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
        assert isinstance(key, Tensor), "a prompt leaves keys in every layer"
        assert isinstance(value, Tensor), "and values"
        found.append((key, value))
    return found


def _without_pads(states: Tensor, pads: Tensor) -> Tensor:
    """``states`` (batch, groups, length, head_size), each row moved left by its pads; what is behind is never seen."""
    length = states.shape[2]
    columns = torch.arange(length, device=states.device) + pads.to(states.device)[:, None]
    columns = columns.clamp_(max=length - 1)[:, None, :, None]
    return states.gather(2, columns.expand_as(states))


def slots_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    filled: Filled | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One new token a row against its slots. ``query`` (batch, heads, 1, head_size); ``key``, ``value`` (batch, slots,
    groups, head_size). Returns (batch, 1, heads, head_size) and None for the weights.

    On a GPU a kernel reads the used slots only: our own, or PyTorch's flash attention where there is no Triton.
    Elsewhere the heads of a group are the queries of one attention, so that nothing is repeated.
    """
    assert filled is not None, "a step says which slots are filled"
    assert attention_mask is None and query.shape[2] == 1, "slots are for one token a row"  # noqa: PT018
    batch, heads, _, head_size = query.shape
    slots, groups = key.shape[1:3]
    if has_kernel(query) and HAS_TRITON:
        assert scaling is not None, "attention says how it scales"
        context = torch.ops.glmexp.attend_slots(query.flatten(1, 2), key, value, filled.used, scaling)
        return context.view(batch, 1, heads, head_size), None
    if has_kernel(query):
        context = torch.ops.aten._flash_attention_forward(
            query.reshape(batch, heads, head_size), key.flatten(0, 1), value.flatten(0, 1),
            filled.query_ends, filled.key_ends, 1, slots, 0.0, False, False, scale=scaling, seqused_k=filled.used,
        )[0]  # fmt: skip
        return context.unsqueeze(1), None
    context = F.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, head_size),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=filled.visible,
        scale=scaling,
    )
    return context.reshape(batch, 1, heads, head_size), None
