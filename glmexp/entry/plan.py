"""Plan: memory by phase, time, batch numbers and the learning rate of a training run, before anything is loaded.

Only the parent runs it: nothing heavy is imported, no rank is started and no folder is made.
"""

from __future__ import annotations

import json
import math
from typing import Any

from glmexp.config.derived import GRAD_ACCUM, MICRO_BATCH_SIZE
from glmexp.config.ds_config import gathers_blocks
from glmexp.config.errors import EXIT_USER_MISTAKE, ConfigError, DataError, Problem
from glmexp.config.schema import OffloadSection, RunConfig
from glmexp.data import estimate
from glmexp.data.batches import StepPlan
from glmexp.data.look import padding_share
from glmexp.data.packing import packs
from glmexp.engine.schedule import lr_factor, warmup_steps
from glmexp.launcher.needs import available_memory_bytes
from glmexp.plan import cards, report, search, shapes
from glmexp.plan.cards import Card
from glmexp.plan.report import Plan, Shape

CURVE = 48
"""Columns of the learning-rate curve."""
BARS = "▁▂▃▄▅▆▇█"
ALTERNATIVES = 5


def tell(config: RunConfig) -> int:
    """Print the plan. Returns the exit code; raises ConfigError where the configuration does not fit."""
    if not shapes.knows(config):
        raise ConfigError(
            Problem("method", f"{config.method.name}: what it trains is not known before the network is built", "train")
        )
    card = cards.card(config.plan.gpu) if config.plan.gpu is not None else cards.here()
    if card is not None and config.precision.base == "fp8":
        cards.check_fp8(card)
    rows = _rows(config)
    shape = _shape(config, rows)
    ranks = (config.launcher.nproc or 1) * config.launcher.nnodes
    plan = report.plan_of(config, ranks, card, shape, _host_limit(config, card))
    fitting = search.fitting(plan, shape) if config.plan.search and card is not None else []
    found = search.best(fitting, ALTERNATIVES)
    if not (plan.fits or fitting or card is None):
        first = search.first_that_fits(plan, shape)
        found = [] if first is None else [first]
    run = _run(plan, rows)
    if config.plan.json:
        told = report.as_json(plan) | {"rows": shape.source, "run": run, "fitting": [_as_json(one) for one in found]}
        told["more_fit"] = max(0, len(fitting) - len(found))
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return 0 if plan.fits else EXIT_USER_MISTAKE
    print("\n".join([*_head(plan, shape), *report.table(plan), "", *_foot(plan, rows, run)]))
    if config.plan.search:
        print("\n".join(_searched(fitting, card)))
    if plan.fits:
        return 0
    raise ConfigError(refusal(plan, found))


def refusal(plan: Plan, found: list[tuple[search.Change, Plan]]) -> Problem:
    """What does not fit, and what would."""
    if plan.card is not None and not plan.memory.fits(plan.card):
        where, what = "plan.gpu", report.verdict(plan)
    else:
        where = "plan.host_memory"
        what = f"{report.size(plan.host_bytes)} on a host with {report.size(plan.host_limit or 0)}"
    if not found:
        return Problem(where, what, "nothing that this project can change makes it fit: a smaller model, larger cards")
    change, other = found[0]
    return Problem(where, what, f"{change.text} would fit: {report.price(other)}")


def _host_limit(config: RunConfig, card: Card | None) -> int | None:
    if config.plan.host_memory is not None:
        return cards.amount(config.plan.host_memory, "plan.host_memory")
    return available_memory_bytes() if config.plan.gpu is None and card is not None else None


def _rows(config: RunConfig) -> estimate.Lengths | None:
    if estimate.stands_in(config):
        return None
    try:
        return estimate.lengths(config)
    except DataError:  # entry=inspect and training say what is wrong with the file
        return None


def _shape(config: RunConfig, rows: estimate.Lengths | None) -> Shape:
    if rows is None:
        return Shape.in_place_of_the_demo(config) if estimate.stands_in(config) else Shape.unknown(config)
    return Shape(int(rows.tokens.max()), rows.label_share, float(rows.tokens.mean()), rows.source)


def _head(plan: Plan, shape: Shape) -> list[str]:
    config, memory, card = plan.config, plan.memory, plan.card
    model, train = memory.model, config.train
    name = "no card: planned without a limit (plan.gpu=24GB or a name sets one)" if card is None else (
        f"{plan.ranks} x {card.name}, {report.size(card.memory_bytes)} each"
    )  # fmt: skip
    return [
        f"plan of {config.run.name} on {name}",
        f"  model     {config.model.name}: {model.elements:,} parameters, {model.trained_elements:,} trained by "
        f"{config.method.name}; sizes from {model.network.source}",
        f"  engine    ZeRO stage {config.zero.stage}, {config.precision.dtype}, offload of optimizer "
        f"{_optimizer(config.offload)}, of params {config.offload.params or 'none'}; attention "
        f"{memory.kind.attention}{', blocks fetched as one piece' if gathers_blocks(config) else ''}"
        f"{', compiled blocks' if memory.kind.compiled else ''}"
        f"{', checkpointing' if memory.kind.checkpointing else ''}",
        f"  batch     {train.batch_size} rows = {train.micro_batch_size} x {train.grad_accum} x {plan.ranks} (micro "
        "batch x accumulation x ranks)",
        f"  rows      {shape.source}: longest {shape.longest} tokens, mean {shape.mean:.0f}, {shape.label_share:.0%} "
        f"learned; largest micro batch {memory.batch.rows} x {memory.batch.length}, {memory.batch.labels} labels",
        "",
        "  bytes of one rank's GPU by phase, the largest marked",
    ]


def _optimizer(offload: OffloadSection) -> str:
    """Where the optimizer's states are, and which AdamW takes the step where that is not the GPU alone."""
    if offload.optimizer is None:
        return "none"
    steps = {
        "gpu": "the GPU steps, states pass through it",
        "deepspeed": "DeepSpeedCPUAdam steps on the host",
        "torch": "torch's AdamW steps on the host",
        None: "DeepSpeedCPUAdam steps on the host, or torch's AdamW where it cannot be compiled",
    }
    return f"{offload.optimizer} ({steps[offload.adam]})"


def _foot(plan: Plan, rows: estimate.Lengths | None, run: dict[str, Any]) -> list[str]:
    lines = [report.verdict(plan)]
    states = plan.memory.states
    if states.host or plan.host_limit is not None:
        terms = ", ".join(f"{name} {report.size(value)}" for name, value in states.host.items())
        rounding = (
            f", rounding of pinned buffers {report.size(states.pinned_rounding)}" if states.pinned_rounding else ""
        )
        limit = "" if plan.host_limit is None else f" of {report.size(plan.host_limit)}"
        lines.append(f"host memory {report.size(plan.host_bytes)}{limit}: {terms or 'no offload'}{rounding}")
    lines.append(f"disk {report.size(plan.disk_bytes)} (checkpoints that are kept, artifact, offload to nvme)")
    if plan.seconds is not None:
        one = plan.seconds
        parts = {
            "passes": one.compute,
            "communication": one.communication,
            "optimizer": one.optimizer,
            "offload": one.offload,
        }
        shown = ", ".join(f"{name} {value:.3g} s" for name, value in parts.items() if value)
        lines.append(
            f"a step {one.total:.3g} s ({shown})" + (f"; {run['steps']:,} steps {_long(run['run_s'])}" if run else "")
        )
    elif plan.card is not None:
        lines.append(
            "time: not known for this card or precision (plan.gpu=NAME of a card that is known: H100, RTX 4090)"
        )
    lines.append(report.rules_of_thumb(plan))
    if rows is not None:
        lines.append(_padding(plan.config, rows))
    if run:
        lines += run["curve"]
    return lines


def _padding(config: RunConfig, rows: estimate.Lengths) -> str:
    """What the rows waste in each way of making batches."""
    shares = [padding_share(rows.tokens, _step_plan(config, rows, grouped)) for grouped in (False, True)]
    packed = packs(rows.tokens, config.data.max_length, config.train.seed)
    share = 1 - rows.tokens.sum() / (len(packed) * config.data.max_length)
    chosen = "packed" if config.data.packing else "grouped" if config.data.group_by_length else "as they come"
    return (
        f"padding: {shares[0]:.0%} of the places as rows come, {shares[1]:.0%} with data.group_by_length, {share:.0%} "
        f"with data.packing; now: {chosen}"
    )


def _step_plan(
    config: RunConfig, rows: estimate.Lengths, grouped: bool, count: int | None = None, ranks: int = 1
) -> StepPlan:
    """Of ``count`` rows; None: of those whose lengths are known."""
    train = config.train
    return StepPlan(
        rows=len(rows.tokens) if count is None else count,
        micro_batch_size=train.micro_batch_size or MICRO_BATCH_SIZE,
        grad_accum=train.grad_accum or GRAD_ACCUM,
        ranks=ranks,
        rank=0,
        seed=train.seed,
        shuffle=config.data.shuffle,
        lengths=rows.tokens if grouped else None,
    )


def _run(plan: Plan, rows: estimate.Lengths | None) -> dict[str, Any]:
    """Steps of the run, its seconds and its learning rates. Empty where the number of rows is not known."""
    config = plan.config
    train, optim = config.train, config.optim
    if rows is None and train.max_steps is None:
        return {}
    steps = train.max_steps
    if steps is None:
        assert rows is not None
        count = max(1, rows.rows - (config.data.holdout or 0))
        if config.data.packing:
            count = math.ceil(count * float(rows.tokens.mean()) / config.data.max_length)
        steps = _step_plan(config, rows, False, count, plan.ranks).total_steps(train.epochs, None)
    factors = [lr_factor(optim, steps, min(steps - 1, column * steps // CURVE)) for column in range(CURVE)]
    warm = warmup_steps(optim, steps)
    bars = "".join(BARS[min(len(BARS) - 1, int(factor * len(BARS)))] for factor in factors)
    last = optim.lr * lr_factor(optim, steps, steps - 1)
    curve = [
        f"learning rate {bars}  {warm} steps up to {optim.lr:.3g}, {optim.schedule}, {last:.3g} in step {steps:,}",
    ]
    return {
        "steps": steps,
        "run_s": None if plan.seconds is None else steps * plan.seconds.total,
        "learning_rates": [optim.lr * factor for factor in factors],
        "curve": curve,
    }


def _long(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return (
        f"{seconds:.0f} s"
        if seconds < 600
        else f"{seconds / 60:.0f} min"
        if seconds < 36_000
        else f"{seconds / 3600:.1f} h"
    )


def _searched(fitting: list[tuple[search.Change, Plan]], card: Card | None) -> list[str]:
    if card is None:
        return ["", "search: no card to fit into (plan.gpu=...)"]
    if not fitting:
        return ["", "search: this batch fits with no micro batch, checkpointing, stage or offload of this method"]
    timed = fitting[0][1].seconds is not None
    lines = ["", "fits, fastest first:" if timed else "fits, cheapest change first (no rates are known for this card):"]
    lines += [f"  {report.price(plan)}: {change.text}" for change, plan in search.best(fitting, ALTERNATIVES)]
    more = len(fitting) - ALTERNATIVES
    return [*lines, f"  {more} more fit"] if more > 0 else lines


def _as_json(one: tuple[search.Change, Plan]) -> dict[str, Any]:
    change, plan = one
    return {"overrides": list(change.words), **report.as_json(plan)}
