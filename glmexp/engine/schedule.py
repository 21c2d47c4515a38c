"""Learning rate as a share of its top value, by optimizer step. Pure arithmetic: the plan draws the same curve."""

from __future__ import annotations

import math

from glmexp.config.schema import OptimSection


def warmup_steps(optim: OptimSection, total_steps: int) -> int:
    """Steps of warm-up: warmup_steps, else warmup_ratio of all steps (rounded), else none."""
    if optim.warmup_steps is not None:
        return optim.warmup_steps
    return round((optim.warmup_ratio or 0.0) * total_steps)


def lr_factor(optim: OptimSection, total_steps: int, step: int) -> float:
    """Share of ``optim.lr`` that optimizer step ``step`` (from 0) uses.

    The warm-up climbs from lr / warmup to lr, so no step is wasted at zero; the decay ends above zero for the same
    reason: step ``total_steps`` would be the first at zero.
    """
    warmup = warmup_steps(optim, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if optim.schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, total_steps - warmup)
    if optim.schedule == "linear":
        return max(0.0, 1.0 - progress)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))
