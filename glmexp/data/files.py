"""JSON arrays and JSON lines as (line number, object) pairs. Lines are counted from 1, as an editor does."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmexp.config.errors import DataError, Problem

BUILTIN = "builtin:"
SHOWN_PROBLEMS = 5
_SPACE = re.compile(r"[ \t\r\n]*")
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
    """One JSON value of a file and the line it begins on."""

    line: int
    value: Any


@dataclass(frozen=True)
class JsonFile:
    """A data file, parsed: its absolute path, the SHA-256 of its bytes and its records."""

    path: str
    sha256: str
    records: list[Record]


def resolve(path: str) -> Path:
    """Absolute path of a data file; ``builtin:demo/train.jsonl`` lies in this package. Raises DataError."""
    if path.startswith(BUILTIN):
        folder = Path(__file__).parent
        file = folder / path.removeprefix(BUILTIN)
        if not file.is_file():
            known = sorted(f"{BUILTIN}{found.relative_to(folder).as_posix()}" for found in folder.glob("*/*.jsonl"))
            raise DataError(Problem(path, "no such shipped file", f"use one of {', '.join(known)}"))
        return file
    file = Path(path).expanduser().absolute()
    if file.is_dir():
        raise DataError(Problem(str(file), "is a folder", "name one JSON or JSON lines file"))
    if not file.is_file():
        raise DataError(Problem(str(file), "no such file", "paths are relative to the folder the command runs in"))
    return file


def json_type(value: Any) -> str:
    """What JSON calls the value, for messages."""
    return "null" if value is None else _JSON_NAMES[type(value)]


def raise_all(path: str, problems: list[Problem]) -> None:
    """Raise a DataError with the first problems and the count of the others; nothing if there are none."""
    if not problems:
        return
    hidden = len(problems) - SHOWN_PROBLEMS
    more = [Problem(path, f"and {hidden} more, {len(problems)} problems in all")] if hidden > 0 else []
    raise DataError(*problems[:SHOWN_PROBLEMS], *more)


def parse_file(path: str) -> JsonFile:
    """Parse a UTF-8 file (with or without byte order mark, any line ends) that is a JSON array or JSON lines.

    Raises DataError naming the file and line: no such file, not UTF-8, broken JSON, nothing in it.
    """
    file = resolve(path)
    content = file.read_bytes()
    name = path if path.startswith(BUILTIN) else str(file)
    text = _decode(name, content)
    start = _SPACE.match(text)
    assert start is not None, "a pattern that may match nothing always matches"
    if start.end() == len(text):
        raise DataError(Problem(name, "the file is empty: it has no example", "JSON array or JSON lines are expected"))
    parse = _array if text[start.end()] == "[" else _lines
    records, problems = parse(name, text)
    raise_all(name, problems)
    if not records:
        raise DataError(Problem(name, "the array is empty: it has no example"))
    return JsonFile(path=name, sha256=hashlib.sha256(content).hexdigest(), records=records)


def _decode(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        # utf-8-sig counts from behind the byte order mark.
        byte = error.start + len(content) - len(error.object)
        where = f"{name}:{line}"
        found = f"not UTF-8 (line {line}, byte {byte}: 0x{content[byte]:02x})"
        fix = "save it as UTF-8, for example: iconv -f GB18030 -t UTF-8 FILE > FILE.utf8"
        raise DataError(Problem(where, found, fix)) from error


def _lines(name: str, text: str) -> tuple[list[Record], list[Problem]]:
    records: list[Record] = []
    problems: list[Problem] = []
    # Not splitlines(): U+2028 and U+0085 are allowed inside JSON text.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(Record(number, json.loads(line)))
        except ValueError as error:
            problems.append(Problem(f"{name}:{number}", f"broken JSON: {_reason(error)}"))
        except RecursionError:
            problems.append(Problem(f"{name}:{number}", "broken JSON: nested too deeply"))
    if problems and not records and _is_json(text):
        fix = "put the rows in an array [...], or one object a line"
        return [], [Problem(name, "the file is one JSON object over several lines", fix)]
    return records, problems


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (character {error.colno})"
    return str(error)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _array(name: str, text: str) -> tuple[list[Record], list[Problem]]:
    """Walk the array element by element: json.loads alone would not tell where each begins."""
    decoder = json.JSONDecoder()
    records: list[Record] = []
    line, counted = 1, 0
    position = text.index("[") + 1

    def problem(at: int, reason: str) -> tuple[list[Record], list[Problem]]:
        return [], [Problem(f"{name}:{text.count(chr(10), 0, at) + 1}", f"broken JSON: {reason}")]

    position = _skip(text, position)
    if text[position : position + 1] == "]":
        return [], []
    while True:
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            return problem(error.pos, error.msg)
        except ValueError as error:  # a number with too many digits
            return problem(position, str(error))
        except RecursionError:
            return problem(position, "nested too deeply")
        records.append(Record(line, value))
        position = _skip(text, position)
        mark = text[position : position + 1]
        if mark == "]":
            break
        if mark != ",":
            return problem(position, "',' or ']' expected after an element of the array")
        position = _skip(text, position + 1)
    rest = _skip(text, position + 1)
    if rest != len(text):
        return problem(rest, "text after the end of the array")
    return records, []


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None, "a pattern that may match nothing always matches"
    return found.end()
