"""Out of GPU memory: where it went, and the next cheapest change that makes room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from glmexp.config.schema import RunConfig
from glmexp.engine import distributed
from glmexp.plan import shapes
from glmexp.plan.report import size
from glmexp.plan.search import ladder
from glmexp.plan.states import states_of


class OutOfMemory(RuntimeError):
    """The device's memory does not suffice for the run."""


@dataclass(frozen=True)
class Terms:
    """Bytes of one rank by what they are for. Activations are what is left of the peak."""

    weights: int
    gradients: int
    optimizer: int
    peak: int
    total: int
    """The device's memory; 0 where there is no GPU."""

    @property
    def fixed(self) -> int:
        """What no micro batch changes."""
        return self.weights + self.gradients + self.optimizer

    @property
    def activations(self) -> int:
        """Activations and buffers."""
        return max(0, self.peak - self.fixed)

    def words(self) -> str:
        """Largest first."""
        terms = {
            "weights": self.weights,
            "gradients": self.gradients,
            "masters and moments": self.optimizer,
            "activations and buffers": self.activations,
        }
        listed = sorted(terms.items(), key=lambda term: -term[1])
        return ", ".join(f"{name} {size(number)}" for name, number in listed if number)


def terms(config: RunConfig, model: Any, ranks: int) -> Terms:
    """By the plan's arithmetic of what DeepSpeed holds, over the parameters of the live model."""
    live = [(name, getattr(one, "ds_shape", one.shape), one.requires_grad) for name, one in model.named_parameters()]
    states = states_of(config, shapes.model_from(config, live), ranks, distributed.rank())
    return Terms(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.masters + states.moments + states.passing,
        peak=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        total=torch.cuda.get_device_properties(distributed.device()).total_memory if torch.cuda.is_available() else 0,
    )


def next_change(config: RunConfig, where: Terms, ranks: int) -> str:
    """The first change of the plan's ladder that helps. Where what stands fixed fills the device, that is none of
    micro batch, checkpointing and length."""
    crowded = where.total > 0 and where.fixed > 0.9 * where.total
    for change in ladder(config, ranks):
        smaller = replace(change.config, train=config.train, data=config.data) == config and change.ranks == ranks
        if change.words and not (crowded and smaller):
            return change.text
    return "more GPUs, or a smaller model"


@contextmanager
def explained(
    phase: str, config: RunConfig, model: Callable[[], Any], planned: Callable[[], list[str]] = list
) -> Iterator[None]:
    """What runs out of memory inside ends with OutOfMemory, which says where it went and what to do.

    ``planned``: lines of the plan that was made for the run, if any.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(_report(phase, config, model(), str(error), planned())) from error


def _report(phase: str, config: RunConfig, model: Any, error: str, planned: list[str]) -> str:
    ranks = distributed.world_size()
    lines = [f"rank {distributed.rank()} ran out of device memory in {phase}"]
    if model is not None:
        found = terms(config, model, ranks)
        of = f" of {size(found.total)}" if found.total else ""
        lines.append(f"a rank holds, largest first{of}: {found.words()}")
        lines.append(f"next: {next_change(config, found, ranks)}")
    else:
        lines.append("the weights alone do not fit: zero=stage3 with more ranks, offload=all, or a smaller model")
    first = error.strip().splitlines()[0] if error.strip() else "no details"
    return "\n  ".join([*lines, *planned, f"torch: {first}"])
