"""The comparison as tables of text, by rich."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from glmexp.compare.pairs import Difference
from glmexp.compare.statistics import Spread
from glmexp.compare.table import Row, Table, short
from glmexp.compare.where import as_text
from glmexp.tracker.outcome import LOSS

if TYPE_CHECKING:
    from rich.console import Console

TOLD = (LOSS, "eval/generate/exact_match", "eval/rouge/rougeL_char", "eval/cmrc/f1", "eval/cmrc/em")
"""Metrics of which differences are told; the page has all."""
_FIRST = (
    *(*TOLD, "best/loss", "best/step", "train/loss", "perf/tokens_per_s", "mem/peak_bytes", "time/train_s"),
    "model/trainable_parameters",
)
"""Results in the order in which they get room; the others follow."""
_OF = {"best/step": "best/loss"}
"""Results that say nothing without another one: they get room beside it alone."""
NARROWEST = 40
"""Characters: less has no room for a name and a number."""
_GAP = 2
_LONG_HEAD = 14
_Column = list[str]
"""The head and a cell a row."""


def print_table(table: Table, asked: Sequence[str], width: int | None) -> None:
    """Rows in their order: run, state, what differs, what came out; as many columns as there is room for.

    asked: columns that come before all others. width: characters; None: the terminal's, without limit in a pipe.
    """
    console, limited = _console(width)
    names = list(dict.fromkeys([*asked, *_in_order(table)]))
    columns = {name: [_head(name, limited), *(_cell(row, name) for row in table.rows)] for name in names}
    first = [
        ["run", *(row.name for row in table.rows)],
        ["state", *(row.state.replace("_", " ") for row in table.rows)],
    ]
    kept = _fitting(first, columns, [*asked, table.sorted_by], console.width) if limited else names
    _print(console, [*first, *(columns[name] for name in kept)], limited)
    if len(kept) < len(names):
        count = len(names) - len(kept)
        print(f"{count} more column{'s' * (count != 1)}: --columns, --csv, --html, or a pipe")
    for row in table.rows:
        for run in row.runs:
            if run.reason:
                print(f"{run.place}: {run.state.replace('_', ' ')}: {run.reason}")


def _in_order(table: Table) -> list[str]:
    """What differs between these rows (of a single one: between all), evaluations, other results, versions."""
    several = [key for key in table.differing if len({as_text(row.config.get(key)) for row in table.rows}) > 1]
    results = [name for name in _FIRST if name in table.results]
    evaluated = [name for name in (*results, *table.results) if name.startswith("eval/")]
    given = several if len(table.rows) > 1 else table.differing
    return [*given, *evaluated, *results, *table.results, *table.environment]


def _fitting(first: Sequence[_Column], columns: dict[str, _Column], before: Sequence[str], width: int) -> list[str]:
    """Names of the columns that there is room for, in their order; those of ``before`` are given room first."""
    room = width - min(_wide(first[0]), _of_the_run(width)) - _GAP - _wide(first[1])
    kept: set[str] = set()
    for name in dict.fromkeys([*(name for name in before if name in columns), *columns]):
        needed = _GAP + _wide(columns[name])
        alone = name not in before and _OF.get(name, name) not in (name, *kept)
        if needed <= room and not alone:
            kept.add(name)
            room -= needed
    return [name for name in columns if name in kept]


def _of_the_run(width: int) -> int:
    """Characters that a run's name takes at most: longer ones are folded."""
    return max(16, width // 3)


def _wide(column: _Column) -> int:
    from rich.cells import cell_len

    return max(cell_len(line) for cell in column for line in cell.split("\n"))


def _head(name: str, limited: bool) -> str:
    """``eval/loss/`` above ``loss`` where room is short; one line where lines are searched."""
    if not limited:
        return name
    group, leaf = re.fullmatch(r"(.*[./])?(.*)", name).groups(default="")  # type: ignore[union-attr]
    middle = leaf.find("_", len(leaf) // 3) + 1
    lines = [leaf[:middle], leaf[middle:]] if len(leaf) > _LONG_HEAD else [leaf]
    return "\n".join(line for line in (group, *lines) if line)


def _cell(row: Row, name: str) -> str:
    if name in row.spreads:
        return figure(name, row.spreads[name])
    return short(row.cells[name]) if name in row.cells else ""


def figure(name: str, value: Spread) -> str:
    """``0.3675``; of several seeds ``0.3675 ± 0.012 (3)``: mean, standard deviation, seeds."""
    text = number(name, value.mean)
    if value.sd is None:
        return text
    return f"{text} ± {number(name, value.sd)} ({value.seeds})"


def number(name: str, value: float) -> str:
    """Bytes in GiB, counts with commas, everything else with four digits."""
    if name.endswith("_bytes"):
        return f"{value / 2**30:.3g} GiB"
    if name.endswith("_s") or value.is_integer():
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.4g}"


def print_differences(found: Sequence[Difference], labels: Sequence[str], baseline: str, width: int | None) -> None:
    """One line a run and metric; what the interval says and what it does not."""
    told = [one for one in found if one.metric in TOLD]
    if not told:
        return
    console, limited = _console(width)
    print(f"\nagainst {baseline}, paired over the same held-out examples (95 % interval):")
    rows = []
    for one in told:
        interval = one.interval
        bounds = f"{interval.low:+.4g} to {interval.high:+.4g}" if interval.enough and not one.note else ""
        mean = "" if one.note else f"{interval.difference:+.4g}"
        rows.append([labels[one.run], one.metric, mean, bounds, str(interval.examples), one.verdict])
    heads = ["run", "metric", "difference", "interval", "examples", "verdict"]
    if not limited:
        _print(console, _turned([heads, *rows]), limited)
    for metric in dict.fromkeys(one.metric for one in told) if limited else ():  # a table each: a column less
        print(f"\n{metric}")
        _print(
            console, _turned([[row[0], *row[2:]] for row in (heads, *rows) if row[1] in ("metric", metric)]), limited
        )
    print(
        "\nAn interval is over held-out examples of these very artifacts; other seeds may differ by more.\n"
        f"Where nothing truly differs, one comparison in 20 is called different all the same; here are {len(told)}."
    )


def _turned(rows: Sequence[Sequence[str]]) -> list[_Column]:
    return [list(column) for column in zip(*rows, strict=True)]


def _console(width: int | None) -> tuple[Console, bool]:
    """Where to print, and whether its width is a limit."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, width=width)
    return console, width is not None or console.is_terminal


def _print(console: Console, columns: Sequence[_Column], limited: bool) -> None:
    """Columns side by side. Where room is short the first one, and the last one if that is words, are folded."""
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for place, (head, *_) in enumerate(columns):
        folds = limited and (place == 0 or head == "verdict")
        grid.add_column(Text(head), overflow="fold", no_wrap=not folds, vertical="top")
    for cells in zip(*(column[1:] for column in columns), strict=True):
        grid.add_row(*map(Text, cells))
    if not limited:
        width = Console(width=100_000).measure(grid).maximum
        console = Console(file=sys.stdout, highlight=False, width=width)
    console.print(grid)
