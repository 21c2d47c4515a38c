"""The plan beside a training run: said first, held against what is measured, and heeded before weights are loaded."""

from __future__ import annotations

import os

import torch

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.schema import RunConfig
from glmexp.data.prepare import Prepared
from glmexp.plan import cards, report, search, shapes
from glmexp.plan.cards import Card
from glmexp.plan.report import Plan, Shape

SURE = 1.1
"""A run is refused where its tensors alone are planned to be so many times the card: plans were off by 3 % at most
where they were measured, but for offloads (docs/plan.md)."""
HELD_BACK = 615 * 2**20
"""What the driver tells of a card's memory and does not give to CUDA (H200)."""


def of(config: RunConfig, data: Prepared) -> Plan | None:
    """The plan of this run with its own rows; None for a method whose trained parameters are not known beforehand."""
    if not shapes.knows(config) or not len(data.train):
        return None
    ranks = int(os.environ["WORLD_SIZE"])
    return report.plan_of(config, ranks, _card(), _shape(config, data))


def refuse(plan: Plan) -> None:
    """Raise ConfigError where the run cannot fit on the card that is there, with what would."""
    if plan.card is None or not plan.config.plan.enforce or plan.memory.peak <= SURE * plan.card.memory_bytes:
        return
    batch = plan.memory.batch
    shape = Shape(batch.length, batch.labels / batch.places, batch.places / (batch.segments or batch.rows), "")
    found = search.first_that_fits(plan, shape)
    way = "a smaller model, or more GPUs" if found is None else f"{found[0].text} would fit: {report.price(found[1])}"
    raise ConfigError(
        Problem("plan", report.verdict(plan), f"{way}; plan.enforce=false trains all the same"),
    )


def metrics(plan: Plan | None) -> dict[str, float]:
    """What each line of metrics gets, to be held against mem/peak_bytes and perf/step_s."""
    if plan is None:
        return {}
    seconds = {} if plan.seconds is None else {"perf/planned_step_s": plan.seconds.total}
    return {"mem/planned_bytes": float(plan.memory.peak), **seconds}


def _card() -> Card | None:
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(int(os.environ["LOCAL_RANK"]))
    return cards.of_device(found.name, found.total_memory + HELD_BACK, torch.cuda.device_count())


def _shape(config: RunConfig, data: Prepared) -> Shape:
    lengths = data.train.lengths
    share = float(data.train.column("supervised").sum() / lengths.sum())
    return Shape(int(lengths.max()), share, float(lengths.mean()), "the rows of the run")
