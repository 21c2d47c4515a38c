"""The comparison as one page that needs no network: a table, curves, heat map, trade-off, answers, differences.

Plotly's script (MIT), the page's own and all data lie in the file; its policy forbids fetching anything else.
"""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from glmexp.compare.pairs import Difference, read_lines
from glmexp.compare.runs import Run, whole
from glmexp.compare.table import LOWER_IS_BETTER, Table
from glmexp.config.errors import ConfigError, DataError, Problem
from glmexp.tracker.outcome import LOSS, trained_s, trained_tokens

POINTS = 200
"""Points of a curve: longer ones are thinned out, first and last kept."""
ANSWERS = 30
"""Prompts of which answers are shown."""
_TEXT = 2000
"""Characters of an answer."""
_CURVES = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "perf/tokens_per_s",
    "perf/mfu",
    "perf/step_s",
    "mem/peak_bytes",
)
_RANKED = ("eval/", "best/loss", "train/loss", "perf/", "mem/peak_bytes", "time/train_s")


def page(
    table: Table,
    runs: Sequence[Run],
    labels: Sequence[str],
    found: Sequence[Difference],
    baseline: int,
    axes: Sequence[str],
) -> str:
    """The page's text. runs and labels: those of the table's rows, in the order that ``found`` counts them in."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:  # machines that only train have been set up without
        raise ConfigError(Problem("--html", "plotly is not installed", "pip install plotly")) from error

    content = {
        **_head(table, runs),
        **_table(table, runs),
        "axes": _axes(table, axes),
        "runs": [_run(run, label) for run, label in zip(runs, labels, strict=True)],
        "longEval": any(sum(LOSS in values for values in run.metrics.values()) > 2 for run in runs),
        "differences": [_difference(one) for one in found],
        "baseline": labels[baseline],
        "answers": _answers(runs, labels),
    }
    text = json.dumps(_finite(content), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    parts = {
        "TITLE": html.escape(content["title"]),
        "STYLE": _file("page.css"),
        # "<" may begin a tag that ends the script.
        "DATA": text.replace("<", "\\u003c"),
        "PLOTLY": get_plotlyjs(),
        "SCRIPT": _file("page.js"),
    }
    # Pieces between marks, so that a mark inside of a script or of data is none.
    return "".join(parts.get(piece, piece) for piece in _file("page.html").split("@"))


def _file(name: str) -> str:
    return (resources.files("glmexp.compare") / name).read_text(encoding="utf-8")


def _head(table: Table, runs: Sequence[Run]) -> dict[str, Any]:
    states = Counter(run.state.replace("_", " ") for run in runs)
    counted = ", ".join(f"{number} {state}" for state, number in states.most_common())
    names = list(dict.fromkeys(run.name.split("#")[0] for run in runs))
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {
        "title": f"{len(runs)} run{'s' * (len(runs) != 1)} of {some}",
        "subtitle": f"{counted}; {len(table.rows)} configurations; written {when}",
    }


def _table(table: Table, runs: Sequence[Run]) -> dict[str, Any]:
    """Rows, with cells that all have in common kept once."""
    config = list(dict.fromkeys(key for row in table.rows for key in (*row.config, *row.environment)))
    everywhere = [key for key in config if all(key in row.cells for row in table.rows)]
    texts = {key: {json.dumps(row.cells[key], default=str) for row in table.rows} for key in everywhere}
    constants = {key: table.rows[0].cells[key] for key in everywhere if len(texts[key]) == 1}
    numbers = {id(run): number for number, run in enumerate(runs)}
    results = table.results
    columns = [("run", "text"), ("state", "text")]
    columns += [(key, "config") for key in table.differing] + [(key, "result") for key in results]
    columns += [(key, "config") for key in table.environment]
    if any(row.cells["reason"] for row in table.rows):
        columns.append(("reason", "config"))
    return {
        "rows": [
            {
                "name": row.name,
                "label": row.label,
                "state": row.state,
                "reason": row.cells["reason"],
                "cells": {key: value for key, value in row.cells.items() if key not in constants},
                "spreads": {key: [one.sd, one.seeds] for key, one in row.spreads.items() if one.sd is not None},
                "runs": [numbers[id(run)] for run in row.runs],
            }
            for row in table.rows
        ],
        "constants": constants,
        "columns": [{"key": key, "kind": kind} for key, kind in columns],
        "keys": table.keys,
        "config": config,
        "differing": table.differing,
        "results": results,
        "ranked": [key for key in results if key.startswith(_RANKED)],
        "lower": [key for key in results if key in LOWER_IS_BETTER],
        "sort": table.sorted_by,
        "descending": table.descending,
    }


def _axes(table: Table, asked: Sequence[str]) -> list[str]:
    """The keys that were asked for, else the first two that the sweep goes over, else the first two that differ."""
    if asked:
        return list(asked)
    return [*table.swept, *(key for key in table.differing if key not in table.swept), "", ""][:2]


def _run(run: Run, label: str) -> dict[str, Any]:
    names = list(dict.fromkeys(name for values in run.metrics.values() for name in values))
    curves = {}
    for name in (name for name in names if name in _CURVES or name.startswith("eval/")):
        points = _thinned([(step, values[name]) for step, values in run.metrics.items() if name in values])
        curves[name] = [[step for step, _ in points], [_rounded(value) for _, value in points]]
    seconds, tokens = trained_s(run.metrics), trained_tokens(run.metrics)
    steps = _thinned(list(seconds))
    axis = {
        "steps": steps,
        "seconds": [_rounded(seconds[step]) for step in steps],
        "tokens": [_rounded(tokens[step]) for step in steps],
    }
    return {"label": label, "curves": curves, "axis": axis}


def _thinned(points: list[Any]) -> list[Any]:
    if len(points) <= POINTS:
        return points
    return [points[round(place * (len(points) - 1) / (POINTS - 1))] for place in range(POINTS)]


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")


def _difference(one: Difference) -> dict[str, Any]:
    interval = one.interval
    return {
        "run": one.run,
        "metric": one.metric,
        "mean": interval.difference,
        "low": interval.low,
        "high": interval.high,
        "examples": interval.examples,
        "verdict": one.verdict,
    }


def _answers(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Any]:
    """The last answers of each run, by prompt; those before training of the first run that has them."""
    prompts: dict[tuple[str, str], dict[str, Any]] = {}
    before = ""
    for number, run in enumerate(runs):
        files = _sample_files(run)
        if not files:
            continue
        for row in list(_sample_rows(run, files[-1]))[:ANSWERS]:
            key = (row["prompt"], row["expected"])
            if key not in prompts and len(prompts) < ANSWERS:
                prompts[key] = {"prompt": key[0], "expected": key[1], "before": None, "answers": {}}
            if key in prompts:
                prompts[key]["answers"][number] = row["generated"][:_TEXT]
        if not before and files[0] == 0 and len(files) > 1:
            before = labels[number]
            for row in _sample_rows(run, 0):
                key = (row["prompt"], row["expected"])
                if key in prompts:
                    prompts[key]["before"] = row["generated"][:_TEXT]
    return {"prompts": list(prompts.values()), "before": before}


def _sample_files(run: Run) -> list[int]:
    """Steps after which answers were written."""
    if run.folder is None:
        return []
    return sorted(int(file.stem.removeprefix("step-")) for file in (run.folder / "samples").glob("step-*.jsonl"))


def _sample_rows(run: Run, step: int) -> list[dict[str, Any]]:
    assert run.folder is not None, "it has samples"
    file = run.folder / "samples" / f"step-{step}.jsonl"
    with whole(file):
        rows = list(read_lines(file))
    for number, row in enumerate(rows, start=1):
        if not {"prompt", "expected", "generated"} <= row.keys():
            raise DataError(Problem(f"{file}:{number}", "is no generated answer", "leave this folder out"))
    return rows


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity: null."""
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value
