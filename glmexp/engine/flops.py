"""Useful floating-point operations of a step, counted from what the network is and what of it is trained.

A matmul of n rows with a weight of N elements takes 2nN operations forward, 2nN for the gradient of its weight where it
is trained, and 2nN for the gradient of its input where something before it is trained. So full training is 6N a token,
LoRA about 4N, and below the first trained layer it is 2N. What is computed again under checkpointing, what padding
costs and the masked half of attention's square are not useful. (Chowdhery et al. 2022, arXiv:2204.02311, appendix B,
where the half is counted.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from glmexp.engine.build import trainable

Place = tuple[int, int, int]
"""Where in the forward pass: (layer, stage in it, part of the stage). Equal places run side by side."""

EMBEDDING: Place = (-1, 0, 0)
PREFIX: Place = (0, 1, 2)
"""A P-Tuning prefix is what the first layer's attention sees, beside its own keys."""
_ATTENDED = 2
"""Stage whose input is attention's output."""
_STAGES = {
    "input_layernorm": 0,
    "q_proj": 1, "k_proj": 1, "v_proj": 1, "query_key_value": 1,
    "o_proj": _ATTENDED, "dense": _ATTENDED,
    "post_attention_layernorm": 3,
    "gate_proj": 4, "up_proj": 4, "dense_h_to_4h": 4,
    "down_proj": 5, "dense_4h_to_h": 5,
}  # fmt: skip
_HEADS = ("output_layer", "lm_head")
_EMBEDDINGS = ("word_embeddings", "embed_tokens")
_PREFIXES = ("prefix_encoder", "prompt_encoder")


@dataclass(frozen=True)
class Work:
    """Operations by what they grow with; forward and backward together."""

    per_token: int
    """All linear layers but the output layer."""
    per_label: int
    """The output layer, which sees supervised positions alone (``engine.loss.forward_loss``)."""
    per_pair: int
    """Attention: of one query and one key that it sees, all heads and layers."""
    per_batch: int
    """The network that makes a prefix, where there is one."""
    virtual_tokens: int
    """Keys of a prefix, seen by every query."""
    opens_before: int | None
    """ChatGLM-6B: the id (sop) before which a row sees itself in both directions."""

    def of(self, batch: Mapping[str, Any]) -> int:
        """Useful operations of a micro batch as ``data.collate`` or ``data.packing`` makes it, on the CPU."""
        lengths, contexts = _segments(batch, self.opens_before)
        tokens = int(lengths.sum())
        pairs = int((lengths * (lengths + 1) // 2 + contexts * (contexts - 1) // 2).sum())
        pairs += self.virtual_tokens * tokens
        labels = len(batch["predicting"])
        return self.per_token * tokens + self.per_label * labels + self.per_pair * pairs + self.per_batch


def learned_rows(batch: Mapping[str, Any]) -> torch.Tensor:
    """(batch,) bool: rows with a label. Blank ones only fill the last step of an epoch up."""
    return (batch["labels"] != -100).any(dim=1)


def _segments(batch: Mapping[str, Any], opens_before: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of the examples that count, and how much of each sees itself in both directions; both (examples,)."""
    learned = learned_rows(batch)
    ids = batch["input_ids"][learned]
    if "segments" not in batch:
        lengths = batch["lengths"][learned]
        if opens_before is None:
            return lengths, torch.zeros_like(lengths)
        return lengths, ids.eq(opens_before).int().argmax(dim=1)
    segments = batch["segments"][learned]
    most = int(segments.max()) + 1 if segments.numel() else 1
    numbers = (segments + most * torch.arange(len(segments))[:, None]).flatten()
    slots = len(segments) * most
    lengths = torch.bincount(numbers, minlength=slots).view(-1, most)[:, 1:].flatten()
    contexts = torch.zeros_like(lengths)
    if opens_before is not None:
        opened = torch.bincount(numbers, batch["contexts"][learned].flatten().double(), minlength=slots)
        # sop is the last of the prompt and is written, not seen by what stands before it.
        contexts = (opened.long().view(-1, most)[:, 1:].flatten() - 1).clamp(min=0)
    return lengths, contexts


def count(model: nn.Module, layers: str, opens_before: int | None = None) -> Work | None:
    """What a token, a label and an attended pair cost. None where the network is built otherwise than those known.

    layers: path of the list of blocks (``families.FamilyFacts.layers``). Under ZeRO-3 too: no weight is looked into.
    """
    pattern = re.compile(rf"(?:^|\.){re.escape(layers)}\.(\d+)\.(.+)")
    trained = [_place(name, pattern) for name, _ in trainable(model)]
    linears = {
        name: (_place(name, pattern), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".original_module" not in name
    }
    if None in trained or any(place is None for place, _ in linears.values()):
        return None
    first = min(place for place in trained if place is not None)
    per_token = per_label = per_pair = per_batch = 0
    virtual = virtual_tokens(model)
    for name, (place, module) in linears.items():
        assert place is not None
        times = 1 + bool(module.weight.requires_grad) + (first < place)
        operations = 2 * module.in_features * module.out_features * times
        if place == PREFIX:
            per_batch += 2 * module.in_features * module.out_features * 3 * virtual
        elif _is_head(name):
            per_label += operations
        else:
            per_token += operations
        if place[1:] == (_ATTENDED, 0) and "lora_" not in name:
            # Scores and weighted values forward; four products of the same size backward.
            per_pair += 4 * module.in_features * (3 if first < place else 1)
    return Work(per_token, per_label, per_pair, per_batch, virtual, opens_before)


def virtual_tokens(model: nn.Module) -> int:
    """Length of the trained prefix; 0 without one."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in _PREFIXES and hasattr(module, "pre_seq_len"):
            return int(module.pre_seq_len)
    peft: Any = getattr(model, "peft_config", {}).get("default")
    return int(getattr(peft, "num_virtual_tokens", None) or 0)


def _is_head(name: str) -> bool:
    return any(part in _HEADS for part in name.split("."))


def _place(name: str, pattern: re.Pattern[str]) -> Place | None:
    """Where a parameter or module is used; None: unknown."""
    parts = name.split(".")
    if any(part in _PREFIXES for part in parts):
        return PREFIX
    found = pattern.search(name)
    if found is not None:
        inner = found[2].split(".")
        stage = next((_STAGES[part] for part in inner if part in _STAGES), None)
        return None if stage is None else (int(found[1]), stage, int(any("lora_B" in part for part in inner)))
    if any(part in _EMBEDDINGS for part in parts):
        return EMBEDDING
    last = 1 << 30
    return (last, 1, 0) if _is_head(name) else (last, 0, 0)
