"""The comparison as CSV and Parquet: every column, all digits."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glmexp.compare.table import Row, Table
from glmexp.compare.where import as_text
from glmexp.config.errors import ConfigError, Problem


def records(table: Table) -> list[dict[str, Any]]:
    """A dict a row with the same keys: what differs, results with ``:sd`` and ``:seeds``, versions, state, folders."""
    return [_record(row, table) for row in table.rows]


def _record(row: Row, table: Table) -> dict[str, Any]:
    record: dict[str, Any] = {"run": row.name, "label": row.label}
    record |= {key: row.config.get(key) for key in table.differing}
    several = any(len(one.runs) > 1 for one in table.rows)
    for name in table.results:
        found = row.spreads.get(name)
        record[name] = found.mean if found else None
        if several:
            record |= {f"{name}:sd": found.sd if found else None, f"{name}:seeds": found.seeds if found else 0}
    record |= {key: row.environment.get(key) for key in table.environment}
    reasons = " / ".join(dict.fromkeys(run.reason for run in row.runs if run.reason))
    return record | {"state": row.state, "reason": reasons, "folders": " ".join(str(run.place) for run in row.runs)}


def write_csv(table: Table, file: Path) -> None:
    """Floats keep all digits; what a row lacks is empty."""
    rows = records(table)
    with _writing(file, "--csv") as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([["" if value is None else _cell(value) for value in row.values()] for row in rows])


def _cell(value: Any) -> Any:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else as_text(value)


def write_parquet(table: Table, file: Path) -> None:
    """Numbers as numbers; a column with texts among them as texts."""
    import pyarrow
    from pyarrow import parquet

    rows = records(table)
    columns = {name: _column([row[name] for row in rows]) for name in rows[0]}
    with _writing(file, "--parquet") as temporary:
        parquet.write_table(pyarrow.table(columns), temporary)


def _column(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int} or kinds <= {bool}:
        return values
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values]
    return [None if value is None else as_text(value) for value in values]


def check_target(file: Path, option: str) -> None:
    """Raises ConfigError where the folder is not there: a misspelt one shall not be made."""
    if not file.parent.is_dir():
        fix = f"mkdir -p {file.parent}, or another place"
        raise ConfigError(Problem(f"{option} {file}", f"{file.parent} is no folder", fix))
    if file.is_dir():
        raise ConfigError(Problem(f"{option} {file}", "is a folder", f"a file in it, such as {file / 'compared'}"))


@contextmanager
def _writing(file: Path, option: str) -> Iterator[Path]:
    """A name to write under, renamed at the end. Raises ConfigError where the file cannot be written."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(file)
    except OSError as error:
        raise ConfigError(
            Problem(f"{option} {file}", f"cannot be written: {error.strerror}", "another file")
        ) from error


def write_text(text: str, file: Path, option: str) -> None:
    """A file that is there whole or not at all."""
    with _writing(file, option) as temporary:
        temporary.write_text(text, encoding="utf-8")
