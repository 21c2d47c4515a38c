"""What a data file is, and JSON as records. Values stay the text that they are; lines are counted from 1, as an editor
does."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

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
        return "utf-8" if self.encoding == "utf-8-sig" or wide(self.encoding) else self.encoding


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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys stand once: Python's reader would keep the last value and say nothing."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


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
            parsed.append(Record(number, _DECODER.decode(line)))
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


def wide(encoding: str) -> bool:
    """Encodings in which a line end is not the one byte 0x0a."""
    return encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32"))


def line_blocks(file: DataFile) -> Iterator[Block]:
    """Whole lines, about BLOCK_BYTES at a time."""
    if wide(file.encoding):
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


def json_object(file: DataFile) -> Iterator[Record | Fault]:
    """A file that is one JSON object: the rows that it wraps, or itself (SQuAD)."""
    text = whole_text(file)
    try:
        value = _DECODER.decode(text)
    except ValueError as error:  # that it is JSON was seen before
        raise _broken(file, text, 0, str(error)) from error
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
    line, counted, number = 1, 0, 0
    position = _skip(text, text.index("[") + 1)
    if text[position : position + 1] == "]":
        return
    while True:
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = _DECODER.raw_decode(text, position)
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
