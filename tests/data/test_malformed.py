"""Rows of any shape: each is used, dropped or refused by its line, and none ends in a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glmexp.config.errors import DataError
from glmexp.data.questions import read_questions

from .fakes import ANY, pairs, read_rows

CALL = {"function": {"name": "look", "arguments": {"what": "weather"}}}
ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "q", "response": "a", "history": [["b", "c"]], "system": "s", "id": 1},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [CALL]}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "tools": [{"name": "look"}]},
    {"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"text": "a"}]}]}]}]},
    {"context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}},
)
VALUES: tuple[Any, ...] = (None, True, 5, 1.5, "x", "[1", "[1]", "\ud800", [], [5], [None], [[5]], {}, {"a": 1})


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value stands in a row, at any depth."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[key], (*path, key))


def changed(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(row)
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return made


def test_no_value_at_any_place_of_a_row_ends_in_a_traceback(tmp_path: Path) -> None:
    rows = [changed(row, path, value) for row in ROWS for path in paths(row) for value in VALUES]
    rows += [{**row, "\ud800": 1} for row in ROWS]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (*ROWS, *rows)))
    read = read_rows(str(file), ANY, on_error="skip")
    assert read.report[0].startswith(f"{file}: ")
    assert len(read.rows) >= len(ROWS)
    with pytest.raises(DataError):
        read_questions(str(file), None, None)


@pytest.mark.parametrize(
    "answers",
    [{"answers": "Paris"}, {"answers": {"text": "Paris"}}, {"answer": "Paris"}, {"answers": ["Paris"]}],
    ids=json.dumps,
)
def test_an_answer_that_stands_outside_of_a_list_is_one_answer_not_its_letters(
    tmp_path: Path, answers: dict[str, Any]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"context": "In Paris.", "question": "Where?", **answers}) + "\n")
    assert [answer for _, answer in pairs(read_rows(str(file), ANY, format="squad"))] == ["Paris"]


@pytest.mark.parametrize("wrap", ["{}\n", "[{}]", '{{"data": [{}]}}'])
def test_of_a_key_that_stands_twice_no_value_is_chosen_without_a_word(wrap: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(wrap.format('{"instruction": "q", "output": "a", "output": "b"}'), encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.json:1: broken JSON: the key 'output' stands twice in one object"):
        read_rows(str(file))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"\x1f\x8b\x08\x00", "is compressed by gzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a pointer of Git LFS, not the file itself"),
        (b"\n<!DOCTYPE html><html>", "is a web page"),
    ],
)
def test_what_is_no_file_of_rows_is_named_as_what_it_is(head: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(head)
    with pytest.raises(DataError, match=said):
        read_rows(str(file))
