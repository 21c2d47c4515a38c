"""metrics.jsonl: the run's own record of its numbers, whatever the tracker does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glmexp.config.errors import DataError, Problem

STEP = "step"
_FIX = "mend or delete that line"
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsFile:
    """Appends one JSON object a line: ``{"step": 3, "train/loss": 1.25}``, flushed at once.

    Floats keep all digits; those that JSON has no number for are the words "nan", "inf" and "-inf".
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, metrics: Mapping[str, float] | Mapping[str, list[float]]) -> None:
        """Add a line. Raises OSError if the file cannot be written."""
        assert STEP not in metrics, f"{STEP!r} is the name of the step itself"
        line = json.dumps({STEP: step, **{name: _plain(value) for name, value in metrics.items()}}, ensure_ascii=False)
        # Opened for each line: a line costs far less than the step it is about, and nothing is left to close.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def truncate_after(self, step: int) -> None:
        """Drop lines of later steps, for a resume from the checkpoint of ``step``: so each step stands once."""
        if not self.path.exists():
            return
        kept = [json.dumps(line, ensure_ascii=False) + "\n" for line in _parse(self.path) if line[STEP] <= step]
        # To another name first: a run that is killed now must not lose what it had.
        temporary = self.path.with_name(f".{self.path.name}.new")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self.path)


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics, in order; lines of one step (training, evaluation) are put together.

    Raises DataError for a broken line; a last line without its end (the run was killed) is left out.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in _parse(path):
        step = line.pop(STEP)
        values = {name: _WORDS[value] if isinstance(value, str) else value for name, value in line.items()}
        steps.setdefault(step, {}).update(values)
    return steps


def _plain(value: float | list[float]) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return str(float(value)) if not math.isfinite(value) else value


def _parse(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            Problem(str(path), f"is no text: byte {error.start} is not UTF-8", "restore the file")
        ) from error
    # What stands behind the last line end was being written when the run was killed.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(Problem(f"{path}:{number}", f"broken JSON: {error.msg}", _FIX)) from error
        if not isinstance(found, dict) or type(found.get(STEP)) is not int or not all(map(_is_number, found.values())):
            raise DataError(Problem(f"{path}:{number}", "is not a step and its numbers", _FIX))
        lines.append(found)
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | list) or (isinstance(value, str) and value in _WORDS)
