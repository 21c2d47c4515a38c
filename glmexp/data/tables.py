"""Tables as records: CSV by Python's own reader, Parquet and hub data sets by Arrow. No value is ever guessed."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from glmexp.config.data_rules import HUB
from glmexp.config.errors import DataError, Problem, first_line
from glmexp.data.files import DataFile, Fault, Record, whole_text
from glmexp.launcher import hub

SEPARATORS = (",", ";", "\t")
LONGEST_CELL = 1 << 30
"""Characters; Python's default of 131,072 is less than a long document."""


def separator(start: str) -> str:
    """Comma, semicolon or tab: whichever stands most often in the header line."""
    header = start.lstrip("\r\n").partition("\n")[0]
    return max(SEPARATORS, key=header.count)


def csv_rows(file: DataFile) -> Iterator[Record | Fault]:
    """Rows under a header line as texts. Rows with more or fewer cells than the header are faults."""
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(io.StringIO(whole_text(file), newline=""), delimiter=file.separator, strict=True)
    header: list[str] | None = None
    line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            fix = "every quotation mark that opens a cell has to be closed; inside a cell write it twice"
            raise DataError(Problem(f"{file.path}:{line}", f"broken CSV: {error}", fix)) from error
        if cells is None:
            return
        here, line = line, reader.line_num + 1
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            _check_header(file, header)
        elif len(cells) != len(header):
            count = f"{len(cells)} cell{'s' if len(cells) != 1 else ''}, the header has {len(header)}"
            yield Fault(here, f"broken CSV: {count}", "put cells that hold a comma, a quote or a line end into quotes")
        else:
            yield Record(here, dict(zip(header, cells, strict=True)))


def _check_header(file: DataFile, header: list[str]) -> None:
    doubled = sorted({name for name in header if header.count(name) > 1})
    if doubled:
        raise DataError(Problem(file.path, f"its header names {', '.join(doubled)} twice", "give each column a name"))


def arrow_rows(file: DataFile) -> Iterator[Record | Fault]:
    """Rows of a Parquet file, or of a hub data set's Arrow files."""
    number = 0
    for batch in _batches(file):
        for value in batch.to_pylist():
            number += 1
            yield Record(number, value)


def _batches(file: DataFile) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if file.kind == "hub":
        for path in sorted(file.place.glob("*.parquet")):
            yield from pyarrow.parquet.ParquetFile(path).iter_batches(1000)
        return
    try:
        yield from pyarrow.parquet.ParquetFile(file.place).iter_batches(1000)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(Problem(file.path, f"broken Parquet: {error}", "write or download the file again")) from error


def from_hub(path: str) -> tuple[str, Path, str]:
    """Fetch ``hub:OWNER/NAME[:CONFIG]:SPLIT``: its name, the folder of its rows as Parquet, its fingerprint.

    Raises DataError where it cannot be had.
    """
    name, *rest = path.removeprefix(HUB).split(":")
    if not name or len(rest) not in (1, 2) or not all(rest):
        raise DataError(Problem(path, "names no split of a hub data set", "hub:OWNER/NAME:SPLIT, such as :train"))
    import datasets

    quiet = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    silent = None if Path(name).exists() else hub.silent()
    try:
        with _offline() if silent else nullcontext():
            found = datasets.load_dataset(name, *rest[:-1], split=rest[-1])
    except Exception as error:
        fix = (
            "check name, config and split; HF_ENDPOINT=URL names another address of the hub, HF_HUB_OFFLINE=1 takes "
            "what was fetched before without asking; or download it and name its file, data.train_file=FILE"
        )
        asked = f"{silent} does not answer; " if silent else ""
        raise DataError(Problem(path, f"cannot be loaded: {asked}{first_line(error)}", fix)) from error
    finally:
        if quiet:
            datasets.enable_progress_bars()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "glmexp" / found._fingerprint
    if not (folder / "rows.parquet").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # every rank comes here, perhaps at the same time
            found.to_parquet(str(Path(own) / "part"))
            (Path(own) / "part").replace(folder / "rows.parquet")
    return path, folder, found._fingerprint


@contextmanager
def _offline() -> Iterator[None]:
    """As HF_HUB_OFFLINE=1, which is read only once: what was fetched before is used, and nothing is asked."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
