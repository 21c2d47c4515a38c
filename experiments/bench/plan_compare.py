"""The plan beside what was measured: peak of the GPU's memory, host memory, seconds of a step.

    python experiments/bench/plan_compare.py experiments/bench/results/plan_h200.jsonl

Reads lines of plan.py, plans each line's configuration with the shapes of its micro batches, and prints a table. The
peak is that of network, engine and steps; the leak gate before the first step is left out (it took whole rows of logits
when these lines were measured, and takes less now). The step is without the time in which its batch was made: the bench
makes batches in the loop, training makes them ahead. ``fit``: this line served to fit rates of the time, or constants
of memory.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from glmexp.config.compose import run_config
from glmexp.config.load import dump, load
from glmexp.config.schema import RunConfig
from glmexp.plan.activations import Batch
from glmexp.plan.cards import card
from glmexp.plan.estimate import Memory, memory_of
from glmexp.plan.report import HOST_PROCESS
from glmexp.plan.timing import step_of

GIB = 2**30
H200 = card("H200")
MEMORY_FIT = (
    "chatglm3-4-2048-lora-s2", "chatglm3-4-512-lora-s2-ckpt", "chatglm3-28-2048-lora-s2-ckpt",
    "chatglm3-4-2048-lora-s3", "chatglm3-4-2048-full-s2-accum", "chatglm3-4-512-full-s0-ckpt",
    "chatglm3-4-2048-full-s3-ckpt", "chatglm3-28-2048-full-s2-ckpt", "qwen2-4-512-full-s2",
    "qwen2-14-4096-full-s2-ladder-ckpt",
    "chatglm3-4-2048-full-s2-offload-ckpt", "qwen2-4-512-full-s3-all-ckpt", "chatglm3-4-2048-freeze-s2",
    "qwen2-4-512-freeze-s1-ckpt", "chatglm3-4-2048-full-s2-packed",
    "chatglm3-4-2048-lora-s2-fp8", "chatglm3-4-2048-lora-s2-fp8-once",
)  # fmt: skip
"""Lines that were looked at when constants were set (chunks of the loss, copies while an engine is made, gradients on
their way, what rounding to fp8 takes). The others were not."""
TIME_FIT = (
    "qwen2-4-4096-lora-s2-packed-ckpt", "qwen2-4-8192-lora-s2-packed", "chatglm3-4-2048-lora-s2",
    "chatglm3-4-2048-lora-s3", "chatglm3-4-2048-full-s2-accum", "chatglm3-4-512-ptuning-s0-ckpt",
    "qwen2-4-2048-lora-s2-accum", "qwen2-4-512-full-s2", "qwen2-4-2048-freeze-s3", "qwen2-4-8192-full-s3-packed-ckpt",
    "chatglm3-28-2048-lora-s2-ckpt", "chatglm3-28-2048-freeze-s2", "qwen2-28-512-freeze-s2",
    "chatglm3-28-2048-full-s2-ckpt", "qwen2-14-4096-full-s2-ladder-ckpt", "chatglm3-4-2048-full-s2-offload-ckpt",
)  # fmt: skip
"""Lines whose passes fitted the rates of ``plan/timing.py``."""


INSTRUCTIONS = Batch(1, 8192, 5067, 48)
"""The largest micro batch of ``instruction_data.py``'s rows that plan.py met."""
BEFORE = ("17c3aba", "5deb15a")
"""Commits at which gradients of further micro batches had a buffer of their own, and norms several kernels."""
PASSING_BEFORE = ("33bc9b3", "265686e")
"""Commits at which states that pass through the GPU came in smaller pieces, and the next batch waited for them."""
_OWN = ("data", "data.train_file", "data.cache_dir", "run.dir", "run.overwrite", "launcher.timeout_s")
"""What of a command line is a bench's own."""


@dataclass(frozen=True)
class Row:
    """One configuration, planned and measured."""

    case: str
    ranks: int
    planned_bytes: int
    measured_bytes: int
    phase: str
    planned_host: float | None
    measured_host: float | None
    planned_s: float
    measured_s: float
    memory_fit: bool
    time_fit: bool

    @property
    def memory_error(self) -> float:
        """Of the peak, as a share of what was measured."""
        return self.planned_bytes / self.measured_bytes - 1

    @property
    def time_error(self) -> float:
        """Of the step."""
        return self.planned_s / self.measured_s - 1


@dataclass(frozen=True)
class Rung:
    """One micro batch of a ladder that grows until memory is out."""

    case: str
    rows: int
    ran: bool
    planned: Memory
    measured_bytes: int | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    asked = parser.parse_args()
    for file in asked.results:
        if "_speed" in file.name or "two_gpus" in file.name:
            print("\n".join(table([side(line) for line in sides(file)])))
            continue
        lines = read(file)
        print("\n".join(table([row(line) for line in lines])))
        print()
        print("\n".join(rungs_table([one for line in lines for one in rungs(line)])))


def read(file: Path) -> list[dict[str, Any]]:
    """Lines of configurations that ran."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["outcome"] == "ran"]


def config_of(line: dict[str, Any]) -> RunConfig:
    """Its configuration; sections and keys that came later stand at their defaults, but for ``zero.whole_blocks``: what
    it does by itself now, nothing did then."""
    tree = dict(_base())
    if line["config"]["zero"]["stage"] == 3:
        tree["zero"] = {**tree["zero"], "whole_blocks": False}
    for name, section in line["config"].items():
        whole = name in ("method", "tracker", "eval") or not isinstance(section, dict)
        tree[name] = section if whole else {**tree[name], **section}
    return load(tree)


@cache
def _base() -> dict[str, Any]:
    return dump(run_config(["tracker=none", "eval=none"]))


def row(line: dict[str, Any]) -> Row:
    """Plan and measurement of a line: of one rank."""
    config, ranks, last = config_of(line), line["ranks"], line["steps"][-1]
    shapes = [shape for step in line["steps"] for shape in step["batches"]]
    largest = _batch(max(shapes, key=lambda one: (one["rows"] * one["length"], one["labels"])))
    memory = memory_of(config, ranks, largest, rank=line["rank"])
    one = _batch(last["batches"][0])
    seconds = step_of(config, memory.model, memory.states, one, memory.kind, H200, ranks)
    assert seconds is not None, "the H200 is known"
    phases = [phase for step in line["steps"] for phase in step["phases"].values()]
    load_peak = max(line["load"][name]["peak"] for name in ("network", "initialize"))
    offloads = bool(memory.states.host)
    worst = max((phase for phase in memory.phases if phase.name != "leak gate"), key=lambda phase: phase.total)
    return Row(
        case=line["case"],
        ranks=ranks,
        planned_bytes=worst.total,
        measured_bytes=max(load_peak, *(phase["peak"] for phase in phases)),
        phase=worst.name,
        planned_host=ranks * (memory.states.host_bytes + HOST_PROCESS) if offloads else None,
        measured_host=line["host_peak"] - line["host_before"] if offloads else None,
        planned_s=seconds.total,
        measured_s=line["step_s"] - last["perf/data_s"],
        memory_fit=line["case"] in MEMORY_FIT,
        time_fit=line["case"] in TIME_FIT,
    )


def side(line: dict[str, Any]) -> Row:
    """Plan and measurement of the product's side in a bench of speeds: hundreds of steps, the memory of all of them."""
    words = shlex.split(line["command"].partition("-m glmexp")[2])
    ranks = next(int(word.partition("=")[2]) for word in words if word.startswith("launcher.nproc="))
    config = run_config([word for word in words if word.partition("=")[0] not in _OWN], ranks=ranks, gpus=ranks)
    memory = memory_of(config, ranks, INSTRUCTIONS)
    seconds = step_of(config, memory.model, memory.states, INSTRUCTIONS, memory.kind, H200, ranks)
    assert seconds is not None, "the H200 is known"
    offloads = bool(memory.states.host) and "host_peak_gib" in line
    return Row(
        case=f"{line['case']}, {line['side']}, {ranks} GPU{'s' if ranks > 1 else ''}",
        ranks=ranks,
        planned_bytes=memory.peak,
        measured_bytes=round(line["peak_gib"] * GIB),
        phase=memory.worst.name,
        planned_host=ranks * (memory.states.host_bytes + HOST_PROCESS) if offloads else None,
        measured_host=line["host_peak_gib"] * GIB if offloads else None,
        planned_s=seconds.total,
        measured_s=line["step_s"],
        memory_fit=False,
        time_fit=False,
    )


def sides(file: Path) -> list[dict[str, Any]]:
    """Rows of a bench of speeds that the product's plan is for: stages 1 and 2, and 3 with blocks fetched as one piece,
    on GPUs, packed rows of 8,192."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        line
        for line in lines
        if line["kind"] == "side"
        and "step_s" in line
        and line["commit"] not in BEFORE
        and not (line["commit"] in PASSING_BEFORE and "offload.adam=gpu" in line["command"])
        and all(word in line["command"] for word in ("-m glmexp", "data.max_length=8192"))
        and any(f"zero=stage{stage}" in line["command"] for stage in (1, 2, 3))
        and not any(word in line["command"] for word in ("zero.leaf_modules", "zero.whole_blocks=false"))
    ]


def rungs(line: dict[str, Any]) -> Iterator[Rung]:
    """The growing micro batches of a line, each once; the last one may have run out of memory."""
    config, shape = config_of(line), line["steps"][0]["batches"][0]
    last: dict[int, dict[str, Any]] = {rung["rows"]: rung for rung in line["ladder"]}
    for rows, rung in last.items():
        batch = Batch(rows, shape["length"], shape["labels"] // shape["rows"] * rows)
        yield Rung(line["case"], rows, rung["ran"], memory_of(config, line["ranks"], batch), rung["peak"])


def _batch(shape: dict[str, int]) -> Batch:
    return Batch(shape["rows"], shape["length"], shape["labels"], shape.get("segments", 0))


def table(rows: list[Row]) -> list[str]:
    """Markdown."""
    lines = [
        "| configuration | peak planned | measured | error | in | step planned | measured | error | fit |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for one in rows:
        fit = " ".join(name for name, used in (("memory", one.memory_fit), ("time", one.time_fit)) if used)
        lines.append(
            f"| {one.case} | {one.planned_bytes / GIB:.2f} | {one.measured_bytes / GIB:.2f} | "
            f"{one.memory_error:+.1%} | {one.phase} | {one.planned_s:.3f} | "
            f"{one.measured_s:.3f} | {one.time_error:+.1%} | {fit} |"
        )
    lines += [""]
    for one in (one for one in rows if one.planned_host is not None and one.measured_host is not None):
        lines.append(
            f"host memory, {one.case}: planned {one.planned_host / GIB:.1f} GiB, measured "
            f"{one.measured_host / GIB:.1f} ({one.planned_host / one.measured_host - 1:+.1%})"
        )
    return lines


def rungs_table(found: list[Rung]) -> list[str]:
    """Markdown."""
    lines = ["| growing micro batch | planned | measured | said to fit | ran |", "| --- | ---: | ---: | --- | --- |"]
    for one in found:
        measured = "out of memory" if one.measured_bytes is None else f"{one.measured_bytes / GIB:.1f}"
        said = "yes" if one.planned.fits(H200) else "no"
        lines.append(
            f"| {one.case}, {one.rows} rows | {one.planned.peak / GIB:.1f} | {measured} | {said} | "
            f"{'yes' if one.ran else 'no'} |"
        )
    return lines


if __name__ == "__main__":
    main()
