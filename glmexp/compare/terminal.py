"""The comparison as tables of text, by rich."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from glmexp.compare.pairs import Difference
from glmexp.compare.statistics import Spread
from glmexp.compare.table import Row, Table, short

SHOWN = (
    *("eval/loss/loss", "best/loss", "train/loss", "eval/generate/exact_match", "eval/rouge/rougeL_char"),
    *("eval/cmrc/f1", "eval/cmrc/em", "perf/tokens_per_s", "mem/peak_bytes", "time/train_s"),
    "model/trainable_parameters",
)
"""Results that a terminal has room for; files and the page have all."""


def print_table(table: Table, columns: Sequence[str]) -> None:
    """Rows in their order: label, what differs, what came out, what became of it."""
    heads = ["run", *table.differing, *columns, *table.environment, "state"]
    _print(heads, [_cells(row, table, columns) for row in table.rows])
    for row in table.rows:
        for run in row.runs:
            if run.reason:
                print(f"{run.place}: {run.state.replace('_', ' ')}: {run.reason}")


def _cells(row: Row, table: Table, columns: Sequence[str]) -> list[str]:
    given = [short(row.config[key]) if key in row.config else "" for key in table.differing]
    came_out = [figure(name, row.spreads[name]) if name in row.spreads else "" for name in columns]
    versions = [str(row.environment.get(key, "")) for key in table.environment]
    return [row.name, *given, *came_out, *versions, row.state.replace("_", " ")]


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


def print_differences(found: Sequence[Difference], labels: Sequence[str], baseline: str) -> None:
    """One line a run and metric; what the interval says and what it does not."""
    told = [one for one in found if one.metric in SHOWN]
    if not told:
        return
    print(f"\nagainst {baseline}, paired over the same held-out examples (95 % interval):")
    rows = []
    for one in told:
        interval = one.interval
        bounds = f"{interval.low:+.4g} to {interval.high:+.4g}" if interval.enough and not one.note else ""
        mean = "" if one.note else f"{interval.difference:+.4g}"
        rows.append([labels[one.run], one.metric, mean, bounds, str(interval.examples), one.verdict])
    _print(["run", "metric", "difference", "interval", "examples", "verdict"], rows)
    print(
        "An interval is over held-out examples of these very artifacts; other seeds may differ by more.\n"
        f"Of {len(told)} comparisons without any true difference about {0.05 * len(told):.2g} would be called one."
    )


def _print(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as it needs to be where nobody's terminal cuts it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Grid

    grid = Grid()
    for head in heads:
        grid.add_column(escape(head), overflow="fold")
    for row in rows:
        grid.add_row(*map(escape, row))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        width = Console(width=100_000).measure(grid).maximum
        console = Console(file=sys.stdout, highlight=False, width=width)
    console.print(grid)
