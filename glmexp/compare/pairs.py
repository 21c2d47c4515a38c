"""Two artifacts on the same held-out examples: what each example got in both, and an interval of the difference.

The hooks leave ``samples/<hook>-scores-step-<n>.jsonl``; an example is known by its text, wherever it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmexp.compare.runs import Run, whole
from glmexp.compare.statistics import FEWEST, Interval, paired
from glmexp.config.errors import DataError, Problem
from glmexp.eval.answers import example_key

NO_EVIDENCE = "no evidence of a difference"
_NUMBERED = re.compile(r"(?:(\w+)-scores-)?step-(\d+)\.jsonl")
_LOWER_IS_BETTER = ("eval/loss/loss",)
_NOT_SCORES = ("index", "example", "tokens")
Example = tuple[str, int]
"""A text's digest, and which of its occurrences."""


@dataclass(frozen=True)
class Scores:
    """What each held-out example got in one run."""

    values: dict[Example, float]
    tokens: dict[Example, float] | None
    """Supervised tokens, which a mean loss is weighted by."""


@dataclass(frozen=True)
class Difference:
    """One run against the baseline in one metric."""

    run: int
    """Place among the runs."""
    metric: str
    interval: Interval
    note: str = ""
    """What stands in the way of a judgement."""

    @property
    def verdict(self) -> str:
        """better, worse, or that there is no evidence."""
        if self.note:
            return self.note
        if not self.interval.enough:
            return f"too few examples ({self.interval.examples}; {FEWEST} are needed)"
        if not self.interval.evidence:
            return NO_EVIDENCE
        return "better" if (self.interval.difference < 0) == (self.metric in _LOWER_IS_BETTER) else "worse"


def scores(run: Run) -> dict[str, Scores]:
    """Metric to the scores of the last evaluation; empty where no hook has left any. Raises DataError."""
    if run.folder is None or not (run.folder / "samples").is_dir():
        return {}
    newest: dict[str, tuple[int, Path]] = {}
    for file in (run.folder / "samples").iterdir():
        found = _NUMBERED.fullmatch(file.name)
        if found is not None:
            hook, step = found[1] or "generate", int(found[2])
            newest[hook] = max(newest.get(hook, (-1, file)), (step, file))
    all_scores: dict[str, Scores] = {}
    for hook, (_, file) in sorted(newest.items()):
        with whole(file):
            all_scores |= _generated(file) if hook == "generate" else _scored(hook, file)
    return all_scores


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON lines file. Raises DataError with file and line."""
    # Not splitlines(): U+2028 and U+0085 stand in answers.
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            fix = "evaluate the artifact again, or leave this folder out"
            raise DataError(Problem(f"{file}:{number}", f"broken JSON: {error.msg}", fix)) from error


def _scored(hook: str, file: Path) -> dict[str, Scores]:
    rows = [row for row in read_lines(file) if "example" in row]  # older runs did not name their examples
    examples = _numbered([row["example"] for row in rows])
    named = list(zip(examples, rows, strict=True))
    columns = list(rows[0]) if rows else []
    tokens = {one: row["tokens"] for one, row in named} if "tokens" in columns else None
    return {
        f"eval/{hook}/{name}": Scores({one: row[name] for one, row in named if row[name] is not None}, tokens)
        for name in columns
        if name not in _NOT_SCORES
    }


def _generated(file: Path) -> dict[str, Scores]:
    judged = [row for row in read_lines(file) if row["expected"]]
    examples = _numbered([example_key(row["prompt"], row["expected"]) for row in judged])
    values = {one: float(row["exact"]) for one, row in zip(examples, judged, strict=True)}
    return {"eval/generate/exact_match": Scores(values, None)} if values else {}


def _numbered(names: Sequence[str]) -> list[Example]:
    seen: dict[str, int] = {}
    examples = []
    for name in names:
        seen[name] = seen.get(name, -1) + 1
        examples.append((name, seen[name]))
    return examples


def differences(all_scores: Sequence[dict[str, Scores]], baseline: int) -> list[Difference]:
    """Every other run minus the baseline, by metric and run; runs that share no example with it are left out."""
    import numpy as np

    found: list[Difference] = []
    for metric, base in all_scores[baseline].items():
        batches: dict[tuple[Example, ...], list[int]] = {}
        for number, one in enumerate(all_scores):
            if number != baseline and metric in one:
                common = tuple(example for example in base.values if example in one[metric].values)
                if common and _same_tokens(base, one[metric], common):
                    batches.setdefault(common, []).append(number)
                elif common:
                    note = "other tokens for the same text (tokenizer or template): losses cannot be compared"
                    nothing = Interval(float("nan"), float("nan"), float("nan"), len(common))
                    found.append(Difference(number, metric, nothing, note))
        for common, numbers in batches.items():
            at = np.array([base.values[example] for example in common])
            others = np.array([[all_scores[n][metric].values[example] for example in common] for n in numbers])
            weights = None if base.tokens is None else np.array([base.tokens[example] for example in common])
            intervals = paired(others - at, weights)
            found += [Difference(n, metric, one) for n, one in zip(numbers, intervals, strict=True)]
    return sorted(found, key=lambda one: (list(all_scores[baseline]).index(one.metric), one.run))


def _same_tokens(base: Scores, other: Scores, common: Sequence[Example]) -> bool:
    if base.tokens is None or other.tokens is None:
        return True
    return all(base.tokens[example] == other.tokens[example] for example in common)
