"""Data files as records: JSON arrays, JSON lines, CSV, Parquet and hub names. Values stay the text that they are.

A file is handed on in blocks, so that a large one is never whole in memory as Python objects and several processes can
share the work; lines are counted from 1, as an editor does.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from glmexp.config.data_rules import BUILTIN, HUB
from glmexp.config.errors import DataError, Problem

SHOWN_PROBLEMS = 5
BLOCK_BYTES = 1 << 20
BLOCK_RECORDS = 1000
Kind = Literal["JSON lines", "JSON array", "JSON object", "CSV", "Parquet", "hub"]
_JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


@dataclass(frozen=True)
class Record:
    """One row of a file."""

    line: int
    """Line on which it begins; in tables without lines the number of the row."""
    value: Any
    number: int | None = None
    """Place among the rows from 1, where that is not the line."""


@dataclass(frozen=True)
class Fault:
    """A piece of a file that is no row."""

    line: int
    reason: str
    fix: str = ""


@dataclass(frozen=True)
class Block:
    """A piece of a file: JSON lines as bytes (parsed where the work is done), or records."""

    first_line: int
    text: bytes | None
    records: list[Record | Fault]


@dataclass(frozen=True)
class DataFile:
    """A file that was found and looked at."""

    path: str
    """As messages name it."""
    kind: Kind
    place: Path
    encoding: str
    separator: str = ","
    """CSV: what stands between two cells."""
    fingerprint: str | None = None
    """Of a hub data set."""

    @cached_property
    def sha256(self) -> str:
        """Of its bytes; of a hub data set its own fingerprint."""
        return _sha256(self.place) if self.fingerprint is None else self.fingerprint

    @property
    def unit(self) -> str:
        """What the numbers in messages count."""
        words = {"Parquet": "row", "hub": "row", "JSON array": "record", "JSON object": "record"}
        return words.get(self.kind, "line")

    @property
    def line_encoding(self) -> str:
        """Encoding of the lines in blocks, which have no byte order mark."""
        return "utf-8" if self.encoding == "utf-8-sig" or _wide(self.encoding) else self.encoding

    def blocks(self) -> Iterator[Block]:
        """The file's rows in order. Raises DataError for what cannot be read past."""
        if self.kind == "JSON lines":
            yield from _line_blocks(self)
        else:
            from glmexp.data import tables

            readers = {"JSON array": json_array, "JSON object": json_object, "CSV": tables.csv_rows}
            reader = readers.get(self.kind, tables.arrow_rows)
            yield from _grouped(reader(self))


def open_file(path: str, encoding: str | None) -> DataFile:
    """Find a file and say what it is. Raises DataError: no such file, not in this encoding, nothing in it."""
    if path.startswith(HUB):
        from glmexp.data import tables

        name, place, fingerprint = tables.from_hub(path)
        return DataFile(name, "hub", place, "utf-8", fingerprint=fingerprint)
    file = resolve(path)
    name = path if path.startswith(BUILTIN) else str(file)
    with file.open("rb") as stream:
        head = stream.read(BLOCK_BYTES)
    if head.startswith(b"PAR1"):
        return DataFile(name, "Parquet", file, "utf-8")
    encoding = encoding or "utf-8"
    if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        encoding = "utf-8-sig"
    kind, separator = _look(name, file, head, encoding)
    return DataFile(name, kind, file, encoding, separator)


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


def json_type(value: Any) -> str:
    """What JSON calls the value, for messages; Python's name for what only tables hold."""
    return "null" if value is None else _JSON_NAMES.get(type(value), f"a {type(value).__name__}")


def raise_all(path: str, problems: list[Problem]) -> None:
    """Raise a DataError with the first problems and the count of the others; nothing if there are none."""
    if not problems:
        return
    hidden = len(problems) - SHOWN_PROBLEMS
    more = [Problem(path, f"and {hidden} more, {len(problems)} problems in all")] if hidden > 0 else []
    raise DataError(*problems[:SHOWN_PROBLEMS], *more)


def sample(file: DataFile) -> tuple[Iterator[Block], list[dict[str, Any]]]:
    """All blocks, and the rows of the first ones until a row was found."""
    blocks = file.blocks()
    looked: list[Block] = []
    problems: list[Problem] = []
    for block in blocks:
        looked.append(block)
        records = parse_block(block, file.line_encoding)
        rows = [one.value for one in records if not isinstance(one, Fault) and isinstance(one.value, dict)]
        if rows:
            return itertools.chain(looked, blocks), rows
        for one in records:
            fault = (
                one
                if isinstance(one, Fault)
                else Fault(one.line, f"a row must be a JSON object, found {json_type(one.value)}")
            )
            problems.append(Problem(f"{file.path}:{fault.line}", fault.reason, fault.fix))
    raise_all(file.path, problems)
    raise DataError(Problem(file.path, "the file is empty: it has no example", "rows of questions and answers"))


def parse_block(block: Block, encoding: str) -> list[Record | Fault]:
    """Records and faults of a block whose bytes were found to be in ``encoding`` (``DataFile.line_encoding``)."""
    if block.text is None:
        return block.records
    parsed: list[Record | Fault] = []
    # Not splitlines(): U+2028 and U+0085 are allowed inside JSON text.
    text = block.text.decode(encoding)
    for number, line in enumerate(text.split("\n"), start=block.first_line):
        if not line.strip("\ufeff \t\r\n\v\f"):
            continue
        try:
            parsed.append(Record(number, json.loads(line)))
        except ValueError as error:
            parsed.append(Fault(number, f"broken JSON: {_reason(error)}", _REPAIR))
        except RecursionError:
            parsed.append(Fault(number, "broken JSON: nested too deeply", _REPAIR))
    return parsed


_REPAIR = "repair it, or data.on_error=skip leaves such rows out and counts them"


def whole_text(file: DataFile) -> str:
    """The text of a file that cannot be read by lines. Raises DataError where it is in another encoding."""
    return decode(file.path, file.place.read_bytes(), file.encoding)


def decode(name: str, content: bytes, encoding: str, first_line: int = 1, first_byte: int = 0) -> str:
    """Text of ``content``; the error of another encoding names line, byte and the option that sets it."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        # Codecs that skip a byte order mark count from behind it.
        at = error.start + len(content) - len(error.object)
        line = first_line + content.count(b"\n", 0, at)
        shown = "UTF-8" if encoding.startswith("utf-8") else encoding
        found = f"not {shown} (line {line}, byte {first_byte + at}: 0x{content[at]:02x})"
        raise DataError(Problem(f"{name}:{line}", found, _encoding_hint(content))) from error
    except UnicodeError as error:
        raise DataError(Problem(name, f"not {encoding}: {error}", _encoding_hint(content))) from error


def _encoding_hint(content: bytes) -> str:
    for mark, codec in ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8")):
        if content.startswith(mark):
            return f"its byte order mark is that of {codec}: data.encoding={codec}"
    for codec, words in (("gb18030", "Chinese Windows saves so"), ("big5", "traditional Chinese")):
        try:
            sample = content[: 1 << 16].decode(codec, errors="strict" if len(content) <= 1 << 16 else "ignore")
        except UnicodeDecodeError:
            continue
        if any("\u4e00" <= sign <= "\u9fff" for sign in sample):
            return f"it reads as {codec} ({words}): data.encoding={codec}"
    return "data.encoding=NAME says how it is encoded, for example gb18030, big5, utf-16, cp1252"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _look(name: str, file: Path, head: bytes, encoding: str) -> tuple[Kind, str]:
    """What kind of text file it is, by its name and its first characters."""
    start = head[: 1 << 16].decode(encoding, errors="replace").lstrip("\ufeff")
    stripped = start.lstrip()
    suffix = file.suffix.lower()
    if not stripped and file.stat().st_size == len(head):
        raise DataError(Problem(name, "the file is empty: it has no example", "JSON, JSON lines, CSV or Parquet"))
    if suffix in (".csv", ".tsv"):
        from glmexp.data import tables

        return "CSV", "\t" if suffix == ".tsv" else tables.separator(start)
    if stripped.startswith("["):
        return "JSON array", ","
    first_line = stripped.partition("\n")[0]
    if _wide(encoding) or (stripped.startswith("{") and len(first_line) < len(stripped) and not _is_json(first_line)):
        text = decode(name, file.read_bytes(), encoding)
        if _is_json(text):
            return "JSON object", ","
    return "JSON lines", ","


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _wide(encoding: str) -> bool:
    """Encodings in which a line end is not the one byte 0x0a."""
    return encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32"))


def _line_blocks(file: DataFile) -> Iterator[Block]:
    """Whole lines, about BLOCK_BYTES at a time."""
    if _wide(file.encoding):
        yield Block(1, whole_text(file).encode(), [])
        return
    line, offset = 1, 0
    with file.place.open("rb") as stream:
        while lines := stream.readlines(BLOCK_BYTES):
            text = b"".join(lines)
            if offset == 0 and text.startswith(b"\xef\xbb\xbf"):
                text, offset = text[3:], 3
            decode(file.path, text, file.line_encoding, line, offset)
            yield Block(line, text, [])
            line, offset = line + len(lines), offset + len(text)


def _grouped(records: Iterator[Record | Fault]) -> Iterator[Block]:
    group: list[Record | Fault] = []
    for record in records:
        group.append(record)
        if len(group) == BLOCK_RECORDS:
            yield Block(group[0].line, None, group)
            group = []
    if group:
        yield Block(group[0].line, None, group)


def json_object(file: DataFile) -> Iterator[Record | Fault]:
    """A file that is one JSON object: the rows that it wraps, or itself (SQuAD)."""
    value = json.loads(whole_text(file))
    rows = value.get("data") if isinstance(value, dict) else None
    plain = isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)
    if isinstance(rows, list) and plain and not any("paragraphs" in row or "qas" in row for row in rows):
        yield from (Record(1, row, number) for number, row in enumerate(rows, start=1))
    else:
        yield Record(1, value, 1)


def json_array(file: DataFile) -> Iterator[Record | Fault]:
    """Walk an array element by element: json.loads alone would not tell where each begins.

    Raises DataError where it is broken: the rest of an array cannot be read past that.
    """
    text = whole_text(file)
    decoder = json.JSONDecoder()
    line, counted, number = 1, 0, 0
    position = _skip(text, text.index("[") + 1)
    if text[position : position + 1] == "]":
        return
    while True:
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _broken(file, text, error.pos, error.msg) from error
        except ValueError as error:  # a number with too many digits
            raise _broken(file, text, position, str(error)) from error
        except RecursionError as error:
            raise _broken(file, text, position, "nested too deeply") from error
        number += 1
        yield Record(line, value, number)
        position = _skip(text, position)
        mark = text[position : position + 1]
        if mark == "]":
            break
        if mark != ",":
            raise _broken(file, text, position, "',' or ']' expected after an element of the array")
        position = _skip(text, position + 1)
    rest = _skip(text, position + 1)
    if rest != len(text):
        raise _broken(file, text, rest, "text after the end of the array")


def _broken(file: DataFile, text: str, at: int, reason: str) -> DataError:
    line = text.count("\n", 0, at) + 1
    fix = "repair it; in JSON lines, one object a line, data.on_error=skip could leave the row out"
    return DataError(Problem(f"{file.path}:{line}", f"broken JSON: {reason}", fix))


_SPACE = re.compile(r"[ \t\r\n]*")


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None, "a pattern that may match nothing always matches"
    return found.end()


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (character {error.colno})"
    return str(error)
