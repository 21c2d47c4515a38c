"""What entry=smoke asks of a short run: gates as functions of recorded numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

Steps = Mapping[int, Mapping[str, float]]
"""Optimizer step -> its line of metrics.jsonl."""
Ranks = Mapping[int, Mapping[str, list[float]]]
"""Optimizer step -> its line of ranks.jsonl: one value a rank."""

MEMORY_SHARE, MEMORY_BYTES = 0.01, 32 * 2**20
"""A process or device may grow by the larger of the two in the last half of the steps: allocators round."""
DATA_SHARE = 1 / 3
"""Of a step, spent waiting for its batch: beyond it the loader and not the model decides how long training takes."""
SLOWER = 2.0
"""Time a token, last quarter of the steps against the quarter before the middle."""
GPU_LOSS, GPU_STATE = 1e-4, 1e-2
"""Relative differences that a GPU's unordered sums may make in one step; without Adam's moments the second is about 1.
On a CPU, and with train.deterministic, every bit is the same."""


@dataclass(frozen=True)
class Gate:
    """One question and its answer. ``passed`` is None where the run did not come so far."""

    name: str
    passed: bool | None
    measured: str
    allowed: str
    helps: str


@dataclass(frozen=True)
class Continued:
    """A checkpoint loaded into a fresh engine, and one further step, held against the run that went on."""

    step: int
    loss: float
    elements: int
    """Masters and moments, all of them."""
    differing: int
    """Those that are not the same bits."""
    difference: float
    """Largest ||a - b|| / ||b|| over masters, means and squares."""


def finite(steps: Steps, failure: str | None) -> Gate:
    """Loss and gradients are numbers. failure: what ended the loop early."""
    return Gate(
        "loss is finite",
        failure is None,
        failure or f"{len(steps)} steps, last loss {_losses(steps)[-1]:.4f}",
        "every loss and gradient norm",
        "a lower optim.lr, optim.max_grad_norm=1, precision=bf16 in place of fp16",
    )


def falling(steps: Steps) -> Gate:
    """The mean loss of the last third lies below that of the first."""
    losses = _losses(steps)
    third = max(1, len(losses) // 3)
    first, last = fmean(losses[:third]), fmean(losses[-third:])
    return Gate(
        "loss falls",
        last < first,
        f"{last:.4f} in the last {third} steps",
        f"below {first:.4f}, the first {third} steps",
        "another optim.lr (a sweep over it is short), entry=inspect to see what is learned, more smoke.steps",
    )


def flat_memory(steps: Steps, ranks: Ranks) -> list[Gate]:
    """No rank's process, and on a GPU its tensors, grow in the last half; the rank that grows most is told."""
    found = []
    for key, name in (("process_bytes", "memory of the process"), ("device_bytes", "memory of the GPU")):
        growths = []
        for rank, values in enumerate(_by_rank(steps, ranks, key)):
            # Not the last step: the checkpoint before it has taken its copy of the state by then.
            half = values[:-1][(len(values) - 1) // 2 :]
            if half and all(half):  # else no GPU, or no Linux
                few = max(1, len(half) // 5)
                begin, end = median(half[:few]), median(half[-few:])
                allowed = max(MEMORY_SHARE * begin, MEMORY_BYTES)
                growths.append((end - begin - allowed, rank, end, end - begin, allowed, len(half)))
        if not growths:
            continue
        beyond, rank, end, more, allowed, count = max(growths)
        found.append(
            Gate(
                f"{name} is flat",
                beyond <= 0,
                f"{_mib(more)} more over the last {count} steps, {_mib(end)} in all"
                + (f" (rank {rank})" if len(growths) > 1 else ""),
                f"{_mib(allowed)} more",
                "something is kept from step to step: a loss without .detach(), a list in a plugin, a callback",
            )
        )
    return found


def _by_rank(steps: Steps, ranks: Ranks, key: str) -> list[list[float]]:
    """A rank's values over the steps; one rank alone has them in its metrics."""
    if ranks:
        rows = [line[key] for line in ranks.values() if key in line]
        return [list(column) for column in zip(*rows, strict=True)]
    return [[line[f"mem/{key}"] for line in steps.values() if f"mem/{key}" in line]]


def data_wait(steps: Steps) -> Gate:
    """The loader keeps up."""
    half = _last_half(steps)
    share = median(line["perf/data_s"] / line["perf/step_s"] for line in half)
    wait = median(line["perf/data_s"] for line in half)
    return Gate(
        "data is there in time",
        share <= DATA_SHARE,
        f"{share:.0%} of a step is waiting for data ({wait * 1000:.0f} ms)",
        f"{DATA_SHARE:.0%}",
        "data.num_workers=2, data.prefetch=4, a faster disk for data.cache_dir; a rank with other data (ranks.jsonl)",
    )


def step_time(steps: Steps) -> Gate:
    """Steps do not get slower."""
    # Time a token: batches differ in length.
    costs = [1 / line["perf/tokens_per_s"] for line in steps.values()]
    quarter = max(1, len(costs) // 4)
    before, after = median(costs[quarter : 2 * quarter]), median(costs[-quarter:])
    return Gate(
        "step time is steady",
        after <= SLOWER * before,
        f"{after / before:.2f} times as long a token at the end, {_last_half(steps)[-1]['perf/step_s']:.3f} s a step",
        f"{SLOWER:g} times",
        "train.profile=true shows where it goes; swapping hosts, other programs, growing state",
    )


def continues(steps: Steps, found: Continued | str | None, exact: bool) -> Gate:
    """The checkpoint before the last step gives the last step again. found: what happened, or why it cannot be read."""
    name, helps = (
        "checkpoint loads and continues",
        "train.resume would not go on as the run would have: train without a stop until this passes",
    )
    allowed = "the same bits" if exact else f"loss to {GPU_LOSS:g}, masters and moments to {GPU_STATE:g}"
    if found is None:
        return Gate(name, None, "not reached", allowed, helps)
    if isinstance(found, str):
        return Gate(name, False, found, allowed, helps)
    recorded = steps[found.step]["train/loss"]
    off = abs(found.loss - recorded) / max(abs(recorded), 1e-12)
    same = off == 0 and found.differing == 0
    near = off <= GPU_LOSS and found.difference <= GPU_STATE
    measured = (
        f"step {found.step} again: loss {found.loss:.9g}, it was {recorded:.9g}; {found.differing:,} of "
        f"{found.elements:,} masters and moments differ, by {found.difference:.2g}"
    )
    return Gate(name, same if exact else near, measured, allowed, helps)


def proves(faults: list[str] | None) -> Gate:
    """A fresh process finds what was trained in the artifact. faults: what it found; None: there is none."""
    return Gate(
        "artifact proves itself",
        None if faults is None else not faults,
        "not reached" if faults is None else "; ".join(faults) or "trained tensors moved and reload; same logits",
        "no fault",
        "see proof.json; the artifact of a long run would be as useless",
    )


def of_training(steps: Steps, failure: str | None, ranks: Ranks | None = None) -> list[Gate]:
    """The gates that look at the steps alone; those that need a half of them are left out where there are too few.

    ranks: nothing where there is one.
    """
    if len(steps) < 4:
        assert failure is not None, "the rules ask for more steps"
        return [finite(steps, failure)]
    return [
        finite(steps, failure),
        falling(steps),
        *flat_memory(steps, ranks or {}),
        data_wait(steps),
        step_time(steps),
    ]


def _losses(steps: Steps) -> list[float]:
    return [line["train/loss"] for line in steps.values() if math.isfinite(line["train/loss"])]


def _last_half(steps: Steps) -> list[Mapping[str, float]]:
    lines = list(steps.values())
    return lines[len(lines) // 2 :]


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"
