"""Rows that are to be answered: the forms that training reads, without their answers; what is none is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glmexp.config.errors import DataError
from glmexp.data.questions import Question, read_questions


def read(folder: Path, *rows: Any, system: str | None = None) -> list[Question]:
    file = folder / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("\n".join(lines), encoding="utf-8")
    return read_questions(str(file), None, system)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("row", "messages", "expected"),
    [
        ({"prompt": "你好"}, [user("你好")], ""),
        ({"instruction": "Add.", "input": "1 + 1", "output": "2"}, [user("Add.\n1 + 1")], "2"),
        ({"content": "类型#上衣", "summary": "好看"}, [user("类型#上衣")], "好看"),
        (
            {"prompt": "b?", "history": [["a?", "a."]]},
            [user("a?"), {"role": "assistant", "content": "a."}, user("b?")],
            "",
        ),
        (
            {"messages": [user("a?"), {"role": "assistant", "content": "a."}]},
            [user("a?")],
            "a.",
        ),
        ({"conversations": [{"from": "human", "value": "a?"}]}, [user("a?")], ""),
    ],
)
def test_the_forms_of_training_are_read(
    row: dict[str, Any], messages: list[dict[str, str]], expected: str, tmp_path: Path
) -> None:
    (question,) = read(tmp_path, row)
    assert (question.messages, question.expected) == (messages, expected)


def test_a_row_s_own_system_text_comes_before_that_of_the_settings(tmp_path: Path) -> None:
    own = {"prompt": "a?", "system": "own"}
    turn = {"messages": [{"role": "system", "content": "turn"}, user("a?")]}
    found = read(tmp_path, {"prompt": "a?"}, own, turn, system="general")
    assert [question.messages[0]["content"] for question in found] == ["general", "own", "turn"]


def test_every_row_that_asks_nothing_is_named(tmp_path: Path) -> None:
    silent = {"messages": [{"role": "system", "content": "s"}]}
    with pytest.raises(DataError) as caught:
        read(tmp_path, {"prompt": "a?"}, {"text": "x"}, {"prompt": " "}, "[1]", "{", silent)
    said = caught.value.report()
    for part in (
        "rows.jsonl:2: no question among its columns text",
        "rows.jsonl:3: 'prompt' is empty",
        "rows.jsonl:4: a row must be a JSON object, found a list",
        "rows.jsonl:5: broken JSON",
        "rows.jsonl:6: nothing is asked",
    ):
        assert part in said
