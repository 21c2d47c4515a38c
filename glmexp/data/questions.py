"""Rows that are to be answered: a question or a conversation, perhaps with what is expected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glmexp.config.errors import DataError, Problem
from glmexp.data.files import Fault, json_type, parse_block, raise_all
from glmexp.data.forms import PAIRS, TURNS
from glmexp.data.opening import blocks, open_file
from glmexp.data.template import Message
from glmexp.data.turns import TurnError, read_history, read_turns, text_of, unpacked

_PROMPTS = tuple(dict.fromkeys((prompt, extra) for prompt, extra, _ in sorted(PAIRS, key=lambda pair: pair[1] is None)))
"""(question, further material) as training rows name them."""
_ANSWERS = ("expected", *dict.fromkeys(answer for _, _, answer in PAIRS))
_FIX = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True)
class Question:
    """One row."""

    place: str
    """File and line, for messages."""
    messages: list[Message]
    """Perhaps a system text, turns, and last what is to be answered."""
    expected: str
    """The answer in the row, or empty."""
    id: str | None


def read_questions(path: str, encoding: str | None, system: str | None) -> list[Question]:
    """The rows of a file that training could read, with or without answers; ``system`` for those without a system text.

    Raises DataError with the first rows that hold no question.
    """
    file = open_file(path, encoding)
    found: list[Question] = []
    problems: list[Problem] = []
    for block in blocks(file):
        for record in parse_block(block, file.line_encoding):
            where = f"{file.path}:{record.line}" if file.unit != "row" else f"{file.path}: row {record.line}"
            if isinstance(record, Fault):
                problems.append(Problem(where, record.reason, "repair the line"))
                continue
            try:
                found.append(_question(record.value, where, system))
            except TurnError as error:
                problems.append(Problem(where, error.reason, error.fix or _FIX))
    raise_all(file.path, problems)
    if not found:
        raise DataError(Problem(file.path, "holds no prompt", _FIX))
    return found


def _question(row: Any, where: str, system: str | None) -> Question:
    if not isinstance(row, dict):
        raise TurnError(f"a row must be a JSON object, found {json_type(row)}")
    expected = next((text_of(row[name], f"{name!r}") for name in _ANSWERS if name in row), "")
    turns = next((name for name in TURNS if row.get(name)), None)
    if turns is not None:
        listed = unpacked(row[turns])
        first = listed[0] if isinstance(listed, list) and listed else None
        speaker = "from" if isinstance(first, dict) and "from" in first else "role"
        messages = read_turns(listed, turns, speaker, "value" if speaker == "from" else "content")
        if messages[-1]["role"] == "assistant":
            expected = expected or str(messages[-1]["content"])
            messages = messages[:-1]
    else:
        messages = _asked(row)
    own = text_of(row.get("system"), "'system'")
    head = own or (system or "")
    if head.strip() and messages[:1] and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": head}, *messages]
    if not messages or messages[-1]["role"] == "system":
        raise TurnError("nothing is asked: the conversation ends before a question")
    name = row.get("id")
    return Question(where, messages, expected, str(name) if isinstance(name, str | int) else None)


def _asked(row: dict[str, Any]) -> list[Message]:
    """Earlier turns and the question of a row without turns."""
    pair = next(((prompt, extra) for prompt, extra in _PROMPTS if prompt in row), None)
    if pair is None:
        raise TurnError(f"no question among its columns {', '.join(row) or '(none)'}")
    prompt, extra = pair
    parts = [text_of(row[prompt], f"{prompt!r}"), text_of(row.get(extra), f"{extra!r}") if extra else ""]
    question = "\n".join(part for part in parts if part.strip())
    if not question:
        raise TurnError(f"{prompt!r} is empty")
    history, _ = read_history(row.get("history"), "history")
    return [*history, {"role": "user", "content": question}]
