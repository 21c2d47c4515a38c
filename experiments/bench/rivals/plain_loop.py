"""A hand-made loop, no DeepSpeed, no Trainer: what one GPU gives for these shapes.

    python experiments/bench/rivals/plain_loop.py --model chatglm3 --ids FOLDER/ids.npz --metrics FILE [--full]

bf16 weights, rows of ``--pack`` tokens filled with whole examples (the same rows as the product's), torch's flash
attention over their lengths, torch.compile on each layer, loss on labelled positions, fused AdamW over float32 masters,
gradients clipped to 1. LoRA rank 8, or with ``--full`` all weights. It trains until it is ended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import DEVICE, IGNORED, Steps, arguments, network, rows, targets
from torch import Tensor, nn
from transformers import AttentionInterface

from glmexp.data.packing import packs

SEED = 42
CHUNK = 2048
"""Labelled positions whose logits are in memory at a time."""
GROUP = 2**28
"""Weights whose float32 gradients are in memory at a time."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pack", type=int, default=8192)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument(
        "--compile", choices=["inductor", "aot_eager", "no"], default="inductor" if DEVICE == "cuda" else "no"
    )
    parser.add_argument("--checkpointing", action="store_true")
    asked = parser.parse_args()
    AttentionInterface.register("bench_varlen", varlen)
    model = network(asked, "bench_varlen").train()
    if not asked.full:
        adapt(model, targets(asked))
    if asked.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if asked.compile != "no":
        for layer in model.model.layers:
            layer.compile(backend=asked.compile)
    optimizer = MasterAdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    steps = Steps(asked.metrics)
    batches = packed(rows(asked.ids), asked.pack)
    while True:
        tokens = 0
        micro_batches = list(itertools.islice(batches, asked.accum))
        labelled = sum(len(batch["labels"]) for batch in micro_batches)
        for batch in micro_batches:
            tokens += batch.pop("tokens")
            on_device = {name: move(value) for name, value in batch.items()}
            labels, kept = on_device.pop("labels"), on_device.pop("kept")
            hidden = model.model(use_cache=False, **on_device).last_hidden_state[0]
            LossSum.apply(hidden.index_select(0, kept), model.lm_head.weight, labels, 1 / labelled).backward()
        optimizer.step()
        steps.done(tokens)


def move(value: Any) -> Any:
    if not isinstance(value, Tensor) or DEVICE == "cpu":
        return value
    return value.pin_memory().to(DEVICE, non_blocking=True)


def packed(examples: Sequence[tuple[np.ndarray, np.ndarray]], budget: int) -> Iterator[dict[str, Any]]:
    """Rows of exactly ``budget`` ids, again and again; every tensor but labels and kept has one shape.

    labels: of the positions ``kept``, those that predict a learned token. What is left of a row is examples of zeros.
    """
    lengths = np.array([len(ids) for ids, _ in examples])
    longest = int(lengths.max())
    held = packs(lengths, budget, SEED)
    most = max(map(len, held)) + math.ceil(budget / longest)
    chance = np.random.default_rng(SEED)
    while True:
        for row in chance.permutation(len(held)):
            parts = [examples[index] for index in held[row]]
            ids = np.concatenate([ids for ids, _ in parts])
            following = np.concatenate([np.append(labels[1:], IGNORED) for _, labels in parts])
            counts, left = [len(ids) for ids, _ in parts], budget - len(ids)
            while left > 0:
                counts.append(min(left, longest))
                left -= counts[-1]
            ends = np.cumsum([0, *counts])
            kept = np.flatnonzero(following != IGNORED)
            yield {
                "input_ids": torch.from_numpy(np.pad(ids, (0, budget - len(ids))))[None],
                "position_ids": torch.from_numpy(np.concatenate([np.arange(count) for count in counts]))[None],
                "ends": torch.from_numpy(np.pad(ends, (0, most + 1 - len(ends)), mode="edge").astype(np.int32)),
                "longest": longest,
                "labels": torch.from_numpy(following[kept]),
                "kept": torch.from_numpy(kept),
                "tokens": len(ids),
            }


def varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float | None = None,
    ends: Tensor | None = None, longest: int = 0, **other: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention within each example; (1, heads, length, head_size) -> (1, length, heads, head_size)."""
    assert ends is not None
    if DEVICE == "cuda":
        flat = [one[0].transpose(0, 1) for one in (query, key, value)]
        out = torch.ops.aten._flash_attention_forward(
            *flat, ends, ends, longest, longest, 0.0, True, False, scale=scaling
        )[0]
        return out[None], None
    parts = []
    for first, last in itertools.pairwise(ends.tolist()):  # a rehearsal without a GPU
        one = (tensor[:, :, first:last] for tensor in (query, key, value))
        if last > first:
            parts.append(F.scaled_dot_product_attention(*one, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(parts, dim=2).transpose(1, 2), None


class LoraLinear(nn.Module):
    """W x + b + s B A x with W frozen."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        place = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Parameter(torch.empty(rank, base.in_features, **place))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **place))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.down), self.up) * self.scale


def adapt(model: nn.Module, names: Sequence[str]) -> None:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                setattr(module, name, LoraLinear(child))


class LossSum(torch.autograd.Function):
    """Cross entropy of (positions, hidden) states, summed and scaled; gradients are made chunk by chunk on the way."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for states, into, right in zip(hidden.split(CHUNK), to_hidden.split(CHUNK), labels.split(CHUNK), strict=True):
            summed, to_logits = softmax_part(F.linear(states, weight), right, scale)
            loss += summed
            torch.mm(to_logits, weight, out=into)
            if to_weight is not None:
                to_weight += to_logits.t() @ states
        ctx.save_for_backward(to_hidden, *([] if to_weight is None else [to_weight.to(weight.dtype)]))
        return loss

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, *to_weight = ctx.saved_tensors
        return to_hidden, (to_weight[0] if to_weight else None), None, None


def _softmax_part(logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    right = wide.gather(1, labels[:, None])
    total = wide.logsumexp(1, keepdim=True)
    to_logits = (wide - total).exp()
    hit = torch.arange(wide.shape[1], device=wide.device)[None] == labels[:, None]
    return (total - right).sum() * scale, ((to_logits - hit.float()) * scale).to(logits.dtype)


softmax_part = torch.compile(_softmax_part, dynamic=True) if DEVICE == "cuda" else _softmax_part


class MasterAdamW:
    """float32 masters of bf16 weights, in groups, so that few float32 gradients exist at a time."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        groups: list[list[nn.Parameter]] = [[]]
        for parameter in parameters:
            if sum(one.numel() for one in groups[-1]) > GROUP:
                groups.append([])
            groups[-1].append(parameter)
        self._groups = []
        for group in groups:
            masters = [nn.Parameter(parameter.detach().float()) for parameter in group]
            self._groups.append((group, masters, torch.optim.AdamW(masters, lr=1e-5, fused=True)))

    @torch.no_grad()
    def step(self) -> None:
        norm = nn.utils.get_total_norm([one.grad for group, _, _ in self._groups for one in group])
        factor = torch.clamp(1.0 / (norm.float() + 1e-6), max=1.0)
        for group, masters, adam in self._groups:
            for parameter, master in zip(group, masters, strict=True):
                master.grad = parameter.grad.float().mul_(factor)
                parameter.grad = None
            adam.step()
            torch._foreach_copy_(group, masters)
            adam.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
