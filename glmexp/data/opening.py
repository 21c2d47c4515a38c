"""A data file is found, looked at and handed on in blocks: JSON arrays, JSON lines, CSV, Parquet and hub names.

In blocks a large file is never whole in memory as Python objects, and several processes can share the work.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glmexp.config.data_rules import BUILTIN, HUB
from glmexp.config.errors import DataError, Problem
from glmexp.data import files, tables
from glmexp.data.files import Block, DataFile, Fault, Kind, Record, parse_block


def open_file(path: str, encoding: str | None) -> DataFile:
    """Find a file and say what it is. Raises DataError: no such file, not in this encoding, nothing in it."""
    if path.startswith(HUB):
        name, place, fingerprint = tables.from_hub(path)
        return DataFile(name, "hub", place, "utf-8", fingerprint=fingerprint)
    file = resolve(path)
    name = path if path.startswith(BUILTIN) else str(file)
    with file.open("rb") as stream:
        head = stream.read(files.BLOCK_BYTES)
    if head.startswith(b"PAR1"):
        return DataFile(name, "Parquet", file, "utf-8")
    _refuse_wrapped(name, head)
    encoding = encoding or "utf-8"
    if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        encoding = "utf-8-sig"
    kind, separator = _look(name, file, head, encoding)
    return DataFile(name, kind, file, encoding, separator)


_WRAPPED = (
    (b"\x1f\x8b", "is compressed by gzip", "unpack it: gzip -dk FILE"),
    (b"PK\x03\x04", "is a zip archive", "unpack it: unzip FILE"),
    (b"BZh", "is compressed by bzip2", "unpack it: bzip2 -dk FILE"),
    (b"\xfd7zXZ", "is compressed by xz", "unpack it: xz -dk FILE"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd", "unpack it: zstd -dk FILE"),
    (b"version https://git-lfs", "is a pointer of Git LFS, not the file itself", "git lfs pull, or download the file"),
    (b"<!doctype html", "is a web page", "download the file itself"),
    (b"<html", "is a web page", "download the file itself"),
)


def _refuse_wrapped(name: str, head: bytes) -> None:
    """What stands where rows were meant and is not text of rows: said as what it is, not as broken JSON."""
    start = head[:64].lstrip().lower() if head[:64].lstrip()[:1] == b"<" else head
    for mark, found, way_out in _WRAPPED:
        if start.startswith(mark):
            raise DataError(Problem(name, found, way_out))


def resolve(path: str) -> Path:
    """Absolute path of a data file; ``builtin:demo/train.jsonl`` lies in this package. Raises DataError."""
    if path.startswith(BUILTIN):
        folder = Path(__file__).parent
        file = folder / path.removeprefix(BUILTIN)
        if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
            known = sorted(f"{BUILTIN}{found.relative_to(folder).as_posix()}" for found in folder.glob("*/*.jsonl"))
            raise DataError(Problem(path, "no such shipped file", f"use one of {', '.join(known)}"))
        return file
    file = Path(path).expanduser().absolute()
    if file.is_dir():
        raise DataError(Problem(str(file), "is a folder", "name one JSON, JSON lines, CSV or Parquet file"))
    if not file.is_file():
        raise DataError(Problem(str(file), "no such file", "paths are relative to the folder the command runs in"))
    return file


def blocks(file: DataFile) -> Iterator[Block]:
    """The file's rows in order. Raises DataError for what cannot be read past."""
    if file.kind == "JSON lines":
        yield from files.line_blocks(file)
    else:
        readers = {"JSON array": files.json_array, "JSON object": files.json_object, "CSV": tables.csv_rows}
        yield from _grouped(readers.get(file.kind, tables.arrow_rows)(file))


def sample(file: DataFile) -> tuple[Iterator[Block], list[dict[str, Any]]]:
    """All blocks, and the rows of the first ones until a row was found."""
    every = blocks(file)
    looked: list[Block] = []
    problems: list[Problem] = []
    for block in every:
        looked.append(block)
        records = parse_block(block, file.line_encoding)
        rows = [one.value for one in records if not isinstance(one, Fault) and isinstance(one.value, dict)]
        if rows:
            return itertools.chain(looked, every), rows
        for one in records:
            fault = (
                one
                if isinstance(one, Fault)
                else Fault(one.line, f"a row must be a JSON object, found {files.json_type(one.value)}")
            )
            problems.append(Problem(f"{file.path}:{fault.line}", fault.reason, fault.fix))
    files.raise_all(file.path, problems)
    raise DataError(Problem(file.path, "the file is empty: it has no example", "rows of questions and answers"))


def _look(name: str, file: Path, head: bytes, encoding: str) -> tuple[Kind, str]:
    """What kind of text file it is, by its name and its first characters."""
    start = head[: 1 << 16].decode(encoding, errors="replace").lstrip("\ufeff")
    stripped = start.lstrip()
    suffix = file.suffix.lower()
    if not stripped and file.stat().st_size == len(head):
        raise DataError(Problem(name, "the file is empty: it has no example", "JSON, JSON lines, CSV or Parquet"))
    if suffix in (".csv", ".tsv"):
        return "CSV", "\t" if suffix == ".tsv" else tables.separator(start)
    if stripped.startswith("["):
        return "JSON array", ","
    first_line = stripped.partition("\n")[0]
    one_line = len(first_line) == len(stripped.rstrip())
    wraps = re.match(r'\{\s*"data"\s*:\s*\[', first_line) if one_line else not _is_json(first_line)
    if files.wide(encoding) or (stripped.startswith("{") and wraps):
        text = files.decode(name, file.read_bytes(), encoding)
        if _is_json(text):
            return "JSON object", ","
    return "JSON lines", ","


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _grouped(records: Iterator[Record | Fault]) -> Iterator[Block]:
    group: list[Record | Fault] = []
    for record in records:
        group.append(record)
        if len(group) == files.BLOCK_RECORDS:
            yield Block(group[0].line, None, group)
            group = []
    if group:
        yield Block(group[0].line, None, group)
