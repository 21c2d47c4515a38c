"""TensorBoard through torch's own writer: scalars, and generated answers as a table of text. Needs no account."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from glmexp.config.registry import register
from glmexp.config.schema import Named
from glmexp.tracker.base import RunInfo, Status

FOLDER = "tensorboard"
_CELL = 500
"""Characters of a cell: TensorBoard draws whole tables at once."""


@register("tracker", "tensorboard")
@dataclass
class TensorBoard(Named):
    """Event files of one run."""

    dir: str | None
    """Folder of the event files; each run gets one below it, named as the run and its folder. Null: tensorboard/ in
    the run folder."""

    def build(self) -> TensorBoardTracker:
        """A tracker with these settings, not started."""
        return TensorBoardTracker(self)


class TensorBoardTracker:
    """Appends to one folder: a resumed run writes a further file there, and TensorBoard joins them by step."""

    def __init__(self, settings: TensorBoard) -> None:
        self._settings = settings
        self._writer: Any = None
        self._folder = Path()

    def start(self, info: RunInfo) -> list[str]:
        """Open the files; the configuration is the text ``config``."""
        from torch.utils.tensorboard import SummaryWriter

        given = self._settings.dir
        place = info.folder / FOLDER if given is None else Path(given).expanduser() / info.name / info.folder.name
        self._folder = place.absolute()
        self._writer = SummaryWriter(str(self._folder))
        self._writer.add_text("config", f"```yaml\n{yaml.safe_dump(info.config, allow_unicode=True)}```", 0)
        return []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric, at the optimizer step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A Markdown table; the rows have the same keys in the same order."""
        if rows:
            lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
            self._writer.add_text(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)

    def summary(self, values: Mapping[str, Any]) -> None:
        """The last values as a table; TensorBoard has no place beside a run's name."""
        lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
        self._writer.add_text("summary", "\n".join(["| metric | value |", "| --- | --- |", *lines]), 0)

    def artifact(self, folder: Path) -> None:
        """TensorBoard keeps no files."""

    def finish(self, status: Status) -> list[str]:
        """Close the files; how to look at them."""
        if self._writer is None:
            return []
        self._writer.add_text("status", status, 0)
        self._writer.close()
        self._writer = None
        folder = self._folder.relative_to(Path.cwd()) if self._folder.is_relative_to(Path.cwd()) else self._folder
        return [f"look at the metrics: tensorboard --logdir {shlex.quote(str(folder))}"]


def _cell(value: Any) -> str:
    """One line of Markdown without a column of its own."""
    text = str(value)
    text = text if len(text) <= _CELL else text[: _CELL - 1] + "…"
    return text.replace("|", "\\|").replace("\n", "<br>")
