"""Rows of question and answer out of data files: which column is which, what is dropped, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from glmexp.config.errors import DataError, Problem
from glmexp.config.schema import Columns
from glmexp.data.files import JsonFile, Record, json_type, parse_file, raise_all

KNOWN_COLUMNS: tuple[tuple[str, str | None, str], ...] = (
    ("instruction", "input", "output"),
    ("prompt", None, "response"),
    ("prompt", None, "answer"),
    ("prompt", None, "completion"),
    ("question", None, "answer"),
    ("query", None, "response"),
    ("query", None, "answer"),
    ("content", None, "summary"),
    ("instruction", "input", "response"),
)
"""(prompt, input, answer) as public instruction sets name them, most usual first."""

EMPTY_ANSWER = "empty answer"
EMPTY_PROMPT = "empty prompt"
SHOWN_LINES = 10


@dataclass(frozen=True)
class Row:
    """One question and its answer, as text, and the line of the file it stands on."""

    prompt: str
    answer: str
    line: int


@dataclass(frozen=True)
class ReadResult:
    """What a file held. ``read`` is the number of rows in ``rows`` and ``dropped`` together."""

    path: str
    sha256: str
    read: int
    rows: list[Row]
    dropped: dict[str, list[int]]
    """Reason -> line numbers."""
    columns: Columns
    """The names that were used; ``input`` stays null where there is none."""
    unused: list[str]
    """Columns of the file that were not read."""

    def report(self) -> str:
        """One line: read, used, dropped with the lines, columns, fingerprint."""
        names = [self.columns.prompt, self.columns.input, self.columns.answer]
        parts = [counts(self.path, self.read, len(self.rows), self.dropped)]
        parts.append("columns " + ", ".join(name for name in names if name))
        if self.unused:
            parts.append("not used: " + ", ".join(self.unused))
        parts.append(f"sha256 {self.sha256[:12]}")
        return "; ".join(parts)


def counts(path: str, read: int, used: int, dropped: dict[str, list[int]]) -> str:
    """``FILE: 6 rows read, 2 used, 4 dropped (empty answer: lines 2, 3, 4, 5)``."""
    gone = sum(len(lines) for lines in dropped.values())
    assert used + gone == read, f"{path}: {used} rows used and {gone} dropped are not the {read} read"
    text = f"{path}: {read} {'row' if read == 1 else 'rows'} read, {used} used, {gone} dropped"
    reasons = [f"{reason}: {line_list(lines)}" for reason, lines in dropped.items() if lines]
    return f"{text} ({'; '.join(reasons)})" if reasons else text


def line_list(lines: list[int]) -> str:
    """``line 3`` or ``lines 3, 5 and 40 more``."""
    shown = ", ".join(str(line) for line in lines[:SHOWN_LINES])
    more = f" and {len(lines) - SHOWN_LINES} more" if len(lines) > SHOWN_LINES else ""
    return f"{'line' if len(lines) == 1 else 'lines'} {shown}{more}"


def read_rows(path: str, columns: Columns) -> ReadResult:
    """Read a JSON array or JSON lines file of single questions and answers.

    ``columns`` names the columns; null ones are found from the first row. Rows without an answer (null, empty, blank
    or missing) or without a question are dropped and counted. Raises DataError with all problems of the file.
    """
    file = parse_file(path)
    _check_objects(file)
    found = _resolve_columns(file, columns)
    rows: list[Row] = []
    dropped: dict[str, list[int]] = {}
    problems: list[Problem] = []
    for record in file.records:
        row = _row(file, record, found, problems)
        if isinstance(row, Row):
            rows.append(row)
        elif row is not None:
            dropped.setdefault(row, []).append(record.line)
    raise_all(file.path, problems)
    read = len(file.records)
    if not rows:
        reasons = "; ".join(f"{reason}: {line_list(lines)}" for reason, lines in dropped.items())
        raise DataError(Problem(file.path, f"no example with an answer is left (0 of {read}; {reasons})"))
    used = {found.prompt, found.input, found.answer}
    unused = [name for name in _names(file.records) if name not in used]
    return ReadResult(file.path, file.sha256, read, rows, dropped, found, unused)


def _check_objects(file: JsonFile) -> None:
    problems = [
        Problem(f"{file.path}:{record.line}", f"a row must be a JSON object, found {json_type(record.value)}")
        for record in file.records
        if not isinstance(record.value, dict)
    ]
    raise_all(file.path, problems)


def _names(records: Iterable[Record]) -> list[str]:
    """Column names in order of first appearance."""
    seen: dict[str, None] = {}
    for record in records:
        seen.update(dict.fromkeys(record.value))
    return list(seen)


def _resolve_columns(file: JsonFile, wanted: Columns) -> Columns:
    names = _names(file.records)
    problems = [
        Problem(
            f"data.columns.{key}",
            f"{name!r} is not a column of {file.path}: its columns are {', '.join(names) or '(none)'}",
            f"set data.columns.{key} to one of them" + (", or to null if there is none" if key == "input" else ""),
        )
        for key, name in (("prompt", wanted.prompt), ("input", wanted.input), ("answer", wanted.answer))
        if name is not None and name not in names
    ]
    raise_all(file.path, problems)
    # The first row decides. Where a column is left out of it, the columns of the whole file do.
    found = _match(list(file.records[0].value), names, wanted) or _match(names, names, wanted)
    if found is None:
        missing = [key for key in ("prompt", "answer") if getattr(wanted, key) is None]
        raise DataError(
            Problem(
                file.path,
                f"cannot tell the question and the answer among its columns {', '.join(names) or '(none)'}",
                f"set {' and '.join(f'data.columns.{key}' for key in missing)}",
            )
        )
    return found


def _match(names: list[str], everywhere: list[str], wanted: Columns) -> Columns | None:
    if wanted.prompt is not None and wanted.answer is not None:
        return wanted
    for prompt, extra, answer in KNOWN_COLUMNS:
        question = prompt if wanted.prompt is None else wanted.prompt
        reply = answer if wanted.answer is None else wanted.answer
        if question == reply or question not in names or reply not in names:
            continue
        # The further material belongs to its own pair: with a named prompt it is only used when it is named too.
        material = extra if wanted.prompt is None and extra in everywhere else None
        return Columns(prompt=question, input=wanted.input or material, answer=reply)
    return None


def _row(file: JsonFile, record: Record, columns: Columns, problems: list[Problem]) -> Row | str | None:
    """The row, or why it is dropped, or None after adding to ``problems``."""
    where = f"{file.path}:{record.line}"
    assert columns.prompt is not None, "columns are resolved before rows are read"
    assert columns.answer is not None, "columns are resolved before rows are read"
    if columns.prompt not in record.value:
        first = file.records[0]
        problems.append(
            Problem(
                where,
                f"the row has no {columns.prompt!r}: its columns are {', '.join(record.value) or '(none)'}, "
                f"those of line {first.line} are {', '.join(first.value)}",
                "put rows of different forms into files of their own",
            )
        )
        return None
    before = len(problems)
    prompt = _text(where, record.value, columns.prompt, problems)
    extra = _text(where, record.value, columns.input, problems) if columns.input else ""
    answer = _text(where, record.value, columns.answer, problems)
    if len(problems) > before:
        return None
    if not answer.strip():
        return EMPTY_ANSWER
    question = "\n".join(part for part in (prompt, extra) if part.strip())
    return Row(question, answer, record.line) if question else EMPTY_PROMPT


def _text(where: str, values: dict[str, Any], column: str, problems: list[Problem]) -> str:
    value = values.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        fix = "write it as text in double quotes"
        problems.append(Problem(where, f"{column!r} must be text, found {json_type(value)}", fix))
        return ""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        broken = f"{column!r} holds half of a character (\\u{ord(value[error.start]):04x} at {error.start})"
        problems.append(Problem(where, broken, "write the character itself, or both halves of its \\u escape"))
        return ""
    return value
