"""Run folders as runs leave them, written in milliseconds: a composed configuration, metrics, scores, answers."""

from __future__ import annotations

import copy
import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from glmexp.config.arguments import parse
from glmexp.config.compose import Machine, request
from glmexp.config.load import dump
from glmexp.eval.answers import example_key
from glmexp.launcher import failures, folder

EXAMPLES = 60
QUESTIONS = [(f"<b>question</b> {number} 一共多少？", f"answer {number}") for number in range(EXAMPLES)]


@cache
def _composed() -> dict[str, Any]:
    return dump(request(parse(["tracker=none", "train.max_steps=20"]), Machine(0, None, 2)).trials[0])


def changed(values: dict[str, Any]) -> dict[str, Any]:
    """The default configuration with these dotted keys."""
    tree = copy.deepcopy(_composed())
    for key, value in values.items():
        *path, leaf = key.split(".")
        section = tree
        for part in path:
            section = section[part]
        section[leaf] = value
    return tree


def write_run(
    place: Path,
    values: dict[str, Any] | None = None,
    *,
    loss: float = 0.5,
    steps: int = 20,
    state: str = "finished",
    error: BaseException | None = None,
    noise: int = 0,
    answers: bool = True,
) -> Path:
    """A run whose held-out loss falls to ``loss``. noise: seed of what its examples and steps got."""
    place.mkdir(parents=True)
    given = values or {}
    tree = changed({"run.dir": str(place), **given})
    (place / folder.CONFIG).write_text(yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
    draw = random.Random(noise)
    rank, bucket = tree["method"].get("rank", 8), tree["zero"]["reduce_bucket_size"]
    environment = {"versions": {"torch": "2.13.0"}, "git_commit": "a" * 40, "started": "2026-01-02T03:00:00+00:00"}
    folder.write_json(place / folder.ENVIRONMENT, environment)
    folder.write_json(place / folder.MODEL, {"parameters": 10**6, "trainable_parameters": 1536 * rank})
    lines: list[dict[str, Any]] = []
    for step in range(steps + 1):
        share = math.exp(-3 * step / 20)
        if step % 10 == 0:
            lines.append({"step": step, "eval/loss/loss": loss + (3 - loss) * share * (step < 20)})
        if step > 0:
            seconds = 0.1 + 1e5 / bucket * 0.01
            peak = (2 + rank / 16 + bucket / 1e9) * 2**30
            lines.append(
                {"step": step, "train/loss": loss + (3 - loss) * share + draw.gauss(0, 0.02), "perf/step_s": seconds}
                | {"perf/tokens_per_s": (1000 + draw.gauss(0, 5)) / seconds, "mem/peak_bytes": peak, "train/lr": 1e-3}
            )
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if answers:
        write_samples(place, steps, loss, draw)
    if error is not None:
        failures.record(place, failures.of_exception(0, error))
    status = {"state": state, "time": "2026-01-02T03:01:40+00:00", "pid": 1}
    folder.write_json(place / folder.STATUS, status | ({"exit_code": 1} if state == "failed" else {"steps": steps}))
    return place


def write_samples(place: Path, step: int, loss: float, draw: random.Random) -> None:
    """Answers before and after, and the loss of each held-out example."""
    samples = place / "samples"
    samples.mkdir()
    for when, right in ((0, 0.0), (step, max(0.0, 1 - loss))):
        rows = [
            {"index": number, "prompt": prompt, "expected": answer, "exact": (hit := draw.random() < right)}
            | {"generated": answer if hit else "</script><i>no</i>", "finished": True}
            for number, (prompt, answer) in enumerate(QUESTIONS[:40])
        ]
        write_lines(samples / f"step-{when}.jsonl", rows)
        scores = [
            {"index": number, "example": example_key(*question), "tokens": 3 + number % 7}
            | {"loss": (3.0 if when == 0 else loss) * (0.5 + number / EXAMPLES) + draw.gauss(0, 0.05)}
            for number, question in enumerate(QUESTIONS)
        ]
        write_lines(samples / f"loss-scores-step-{when}.jsonl", scores)


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_sweep(root: Path, trials: list[dict[str, Any]]) -> Path:
    """sweep.json over folders that are there or not: each ``{"folder", "values", "state", ...}``."""
    defaults = {"identity": "", "metrics": {}, "reason": "", "seconds": 1.0, "same_as": None}
    rows = [{"number": number, **defaults, **trial} for number, trial in enumerate(trials)]
    folder.write_json(root / "sweep.json", {"line": ["-m"], "plan": {"name": "grid"}, "trials": rows})
    return root
