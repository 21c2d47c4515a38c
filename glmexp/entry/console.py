"""What a person sees of a run: what will run, a bar while it runs, answers before and after, where things lie."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_PLAIN_LINES = 20
_FILE_WIDTH = 160
"""Columns of a table where there is no terminal."""


class _Console(Console):
    """rich's own would end the process with exit code 1 and without a word."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(
            errno.EPIPE, "nobody reads standard output any more (head has seen enough, or tee is gone)"
        )


class Screen:
    """The terminal of rank 0; on other ranks every call does nothing.

    Without a terminal there is no bar: about twenty plain lines instead, so that log files stay short.
    """

    def __init__(self, active: bool) -> None:
        self.active = active
        self._console = _Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())

    def lines(self, lines: Iterable[str]) -> None:
        """Print lines as they are. The terminal itself breaks long ones, so that a command is copied in one piece."""
        if self.active:
            for line in lines:
                self._console.print(line, markup=False, soft_wrap=True)

    def facts(self, title: str, facts: dict[str, str]) -> None:
        """A block of ``name value`` lines."""
        if not self.active:
            return
        self._console.print(title, style="bold", markup=False)
        width = max(map(len, facts))
        for name, value in facts.items():
            self._console.print(f"  {name:<{width}}  {value}", markup=False)

    def answers(self, rows: Sequence[tuple[str, str, str, str]], first: int) -> None:
        """Table of (prompt, expected, answer before training, tuned answer). ``first``: the step of the former, 0 for
        the base; another one in a run that was taken up."""
        if not self.active or not rows:
            return
        before = "base" if first == 0 else f"step {first}"
        table = Table(title=f"held-out prompts: {before} against tuned", title_justify="left")
        for column in ("prompt", "expected", before, "tuned"):
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(_short(cell) for cell in row))
        self._console.print(table)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of texts."""
        if not self.active:
            return
        from rich.markup import escape

        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        console = self._console if self._console.is_terminal else _Console(file=sys.stdout, width=_FILE_WIDTH)
        console.print(table)

    def progress(self, total: int, done: int) -> Bar:
        """A bar over the optimizer steps."""
        return Bar(self, self._console, total, done)


def _short(text: str, most: int = 60) -> str:
    from rich.markup import escape

    text = text.replace("\n", "⏎")
    return escape(text if len(text) <= most else text[: most - 1] + "…")


class Bar:
    """Context manager: shows loss and tokens/s of each logged step."""

    def __init__(self, screen: Screen, console: Console, total: int, done: int) -> None:
        self._screen, self._total = screen, total
        self._live = screen.active and console.is_terminal
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=False, disable=not self._live)
        self._task = self._progress.add_task("train", total=total, completed=done, shown="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, step: int, loss: float, tokens_per_s: float) -> None:
        """Step ``step`` is done."""
        shown = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s"
        if self._live:
            self._progress.update(self._task, completed=step, shown=shown)
        elif step == self._total or step % max(1, self._total // _PLAIN_LINES) == 0 or step == 1:
            self._screen.lines([f"step {step}/{self._total}  {shown}"])


def relative(path: Path) -> str:
    """``path`` as seen from the caller's folder, where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
