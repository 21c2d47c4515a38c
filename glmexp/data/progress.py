"""How far the preparation of a large file is: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_EVERY_S = 30.0
"""Between two lines where there is no terminal."""
REFRESH_EVERY_S = 0.1


class Preparing:
    """Context manager; ``show`` after each block. Written to standard error.

    total_bytes: size of what is read, None where blocks do not tell how much of it they are (tables, arrays): the bar
    then only shows that something moves.
    """

    def __init__(self, path: str, size: int, total_bytes: int | None, processes: int) -> None:
        self._path, self._size, self._total, self._processes = path, size, total_bytes, processes
        self._started = self._shown_at = time.perf_counter()
        self._rows = 0
        self._bar = self._make_bar() if sys.stderr.isatty() else None

    def _make_bar(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        words = (TextColumn("preparing {task.description}"), BarColumn(), TaskProgressColumn())
        # No thread of its own: worker processes are forked while the bar stands.
        bar = Progress(
            *words,
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            auto_refresh=False,
        )
        bar.add_task(os.path.basename(self._path), total=self._total, shown="")
        return bar

    def __enter__(self) -> Preparing:
        plural = "es" if self._processes > 1 else ""
        what = f"preparing {self._path} ({self._size / 1e6:.0f} MB, {self._processes} process{plural})"
        if self._bar is None:
            print(what, file=sys.stderr, flush=True)
        else:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if self._bar is not None:
            if kind is None:
                self._update(self._total or 1, total=self._total or 1)
            self._bar.stop()
        if kind is None:
            seconds = time.perf_counter() - self._started
            print(f"prepared {self._path}: {self._said()} in {seconds:.0f} s", file=sys.stderr, flush=True)

    def show(self, rows: int, read_bytes: int) -> None:
        """``rows`` rows out of ``read_bytes`` bytes are done."""
        self._rows = rows
        now = time.perf_counter()
        if now - self._shown_at < (LINE_EVERY_S if self._bar is None else REFRESH_EVERY_S):
            return
        self._shown_at = now
        if self._bar is not None:
            self._update(read_bytes)
            return
        share = f"{read_bytes / self._total:.0%}, " if self._total else ""
        print(f"  {share}{self._said()}", file=sys.stderr, flush=True)

    def _update(self, done: int, total: int | None = None) -> None:
        assert self._bar is not None, "there is a bar on terminals only"
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, shown=self._said(), refresh=True)

    def _said(self) -> str:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        return f"{self._rows:,} rows, {self._rows / seconds:,.0f} rows/s"
