"""The reference of a parity table: the same steps in one process, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from glmexp.config.schema import RunConfig
from glmexp.engine import build, distributed, states
from glmexp.engine.loop import Batch, Loop
from glmexp.engine.loss import forward_loss, supervised_tokens


@dataclass(frozen=True)
class Trace:
    """What two ways of taking the same steps must share."""

    losses: list[float]
    """Of each step."""
    gradients: dict[str, torch.Tensor]
    """Of the first step, before clipping: flattened, float32 on the CPU; by parameter."""


def plain(
    model: Any, config: RunConfig, micro_batches: Sequence[Batch], inputs: Any, dtype: torch.dtype, steps: int
) -> Trace:
    """``steps`` steps on the same micro batches, weights and gradients in ``dtype``: torch's AdamW and clipping."""
    build.make_ready(model, config)
    model = model.to(distributed.device(), dtype).train()
    optimizer = build.optimizer(model, config)
    schedule = build.schedule(optimizer, config, steps)
    trained = build.trainable(model)
    tokens = sum(supervised_tokens(batch["labels"]) for batch in micro_batches)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(steps):
        total = 0.0
        for batch in map(distributed.to_device, micro_batches):
            loss = forward_loss(model, inputs(batch), batch)
            (loss / tokens).backward()
            total += float(loss.detach())
        if not gradients:
            reached = [(name, one.grad) for name, one in trained if one.grad is not None]
            gradients = {name: grad.detach().float().flatten().to("cpu", copy=True) for name, grad in reached}
        if config.optim.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([one for _, one in trained], config.optim.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total / tokens)
    return Trace(losses, gradients)


def engine_trace(engine: Any, config: RunConfig, micro_batches: Sequence[Batch], inputs: Any, steps: int) -> Trace:
    """The same through DeepSpeed and our loop, on every rank. Collective."""
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}

    def after_step(step: int, reason: str | None) -> str | None:
        if not gradients:
            gradients.update(_first_gradients(engine, config, loop.grad_norm))
        return reason

    loop = Loop(
        engine=engine,
        steps=((step + 1, micro_batches) for step in range(steps)),
        log_steps=1,
        on_metrics=lambda _, metrics: losses.append(metrics["train/loss"]),
        after_step=after_step,
        inputs=inputs,
    )
    loop.run()
    return Trace(losses, gradients)


def _first_gradients(engine: Any, config: RunConfig, norm: float) -> dict[str, torch.Tensor]:
    """Adam's mean after its first step is (1 - beta) times the clipped gradient, wherever ZeRO and offload keep it.

    ``norm``: of all gradients before they were clipped.
    """
    clip = config.optim.max_grad_norm
    unclipped = 1.0 if clip is None else max(1.0, (norm + 1e-6) / clip)
    factor = unclipped / (1 - config.optim.betas[0])
    sizes = {name: getattr(one, "ds_numel", one.numel()) for name, one in build.trainable(engine.module)}
    found = {name: torch.zeros(size) for name, size in sizes.items()}

    def keep(piece: states.Piece) -> None:
        if states.MEAN in piece.tensors:
            place = slice(piece.offset, piece.offset + piece.length)
            found[piece.name][place] = piece.tensors[states.MEAN].detach().float().cpu() * factor

    states.read(engine, keep)
    if distributed.world_size() > 1:
        for one in found.values():
            dist.all_reduce(one)
    return found
