"""From rows to token ids and labels: rendered by the chat template, cut to length, packed into flat arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from glmexp.config.errors import DataError
from glmexp.data.files import Fault
from glmexp.data.readers import Row
from glmexp.data.template import Message, Renderer

CUT = " ... "
"""Stands where the middle of an over-long prompt was cut out."""
SHORTEST_PROMPT = 16
"""Characters that must be left of a prompt that is cut: an answer to less than that teaches nothing."""
PROMPT_CUT = "the prompt is cut"
TURNS_CUT = "the first turns are left out"


@dataclass(frozen=True)
class Encoding:
    """What decides the ids of a row besides its text."""

    max_length: int
    supervise: Literal["last", "all"]


@dataclass(frozen=True)
class Encoded:
    """One example as ids."""

    ids: list[int]
    supervised: list[bool]
    prompt_length: int
    """Ids that a generation starts from."""
    messages: list[Message]
    """As they were rendered, cut where that was needed."""


@dataclass
class Part:
    """Examples of one block in flat arrays, to be appended to a store."""

    tokens: bytes = b""
    """int32; a learned id is stored as its bitwise complement, which is negative."""
    texts: bytes = b""
    """One JSON object an example."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """length, prompt_length, supervised, text_length, line, row: one number an example."""
    cut: dict[str, list[str]] = field(default_factory=dict)
    """What was cut -> places."""
    too_long: list[str] = field(default_factory=list)
    """Places of rows whose answer does not fit."""
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    """Rows that the chat template has no place for, with their places."""


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
COLUMNS = ("length", "prompt_length", "supervised", "text_length", "line", "row")


def encode_rows(rows: Iterable[Row], encoding: Encoding, renderer: Renderer) -> Part:
    """Encode the rows of a block. Numbers in ``row`` count from 0 within the block."""
    part = Part()
    tokens: list[np.ndarray] = []
    texts: list[bytes] = []
    numbers: list[tuple[int, ...]] = []
    ordinal = -1
    for row in rows:
        try:
            examples = [fit(messages, encoding, renderer) for messages in _examples(row.messages, encoding, renderer)]
        except DataError as error:
            problem = error.problems[0]
            part.faults.append((row.label, Fault(row.line, f"{problem.where}: {problem.message}", problem.fix)))
            continue
        ordinal += 1
        fitting = [one for one in examples if one is not None]
        if not fitting:
            part.too_long.append(row.label)
        for example, done in fitting:
            for reason in done:
                part.cut.setdefault(reason, []).append(row.label)
            stored, count = _packed(example)
            text = _text(row, example.messages)
            tokens.append(stored)
            texts.append(text)
            numbers.append((len(stored), example.prompt_length, count, len(text), row.line, ordinal))
    part.tokens = b"".join(array.tobytes() for array in tokens)
    part.texts = b"".join(texts)
    table = np.array(numbers, dtype=np.int64).reshape(-1, len(COLUMNS))
    part.columns = {name: table[:, index].copy() for index, name in enumerate(COLUMNS)}
    return part


def _packed(example: Encoded) -> tuple[np.ndarray, int]:
    learned = np.array(example.supervised, dtype=np.int32)
    # x ^ -1 is the complement of x. The first token of a row has nothing before it to be predicted from.
    return np.array(example.ids, dtype=np.int32) ^ -learned, sum(example.supervised) - example.supervised[0]


def _text(row: Row, messages: list[Message]) -> bytes:
    content: dict[str, Any] = {"messages": messages, "label": row.label}
    if row.id is not None:
        content["id"] = row.id
    if row.answers:
        content["answers"] = row.answers
    return _JSON.encode(content).encode()


def _examples(messages: list[Message], encoding: Encoding, renderer: Renderer) -> Iterator[list[Message]]:
    """The conversation; where a row can learn one answer only and all are wanted, the conversation up to each."""
    if encoding.supervise == "last" or not renderer.one_answer_a_row:
        yield messages
        return
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            yield messages[: place + 1]


def encode(messages: list[Message], encoding: Encoding, renderer: Renderer) -> Encoded:
    """Ids and labels of one example, whatever their length."""
    one_answer = renderer.one_answer_a_row
    ids, supervised = renderer.train(messages, "last" if one_answer else encoding.supervise)
    assert len(ids) == len(supervised), "the chat template gives one flag for each id"
    assert True in supervised[1:], "the chat template leaves nothing of the answer to learn"
    backwards = supervised[::-1]
    last = backwards.index(True)
    start = len(ids) - (backwards.index(False, last) if False in backwards[last:] else len(ids))
    return Encoded(ids, supervised, start + renderer.given_labels, messages)


def fit(messages: list[Message], encoding: Encoding, renderer: Renderer) -> tuple[Encoded, list[str]] | None:
    """Encode; what is too long loses its first turns, then the middle of its question. Answers stay whole.

    Returns the example and what was cut; None where the answer and too little of the question would be left.
    """
    example = encode(messages, encoding, renderer)
    done: list[str] = []
    while len(example.ids) > encoding.max_length:
        shorter = _without_first_turn(messages)
        if shorter is None:
            break
        messages, done = shorter, [TURNS_CUT]
        example = encode(messages, encoding, renderer)
    if len(example.ids) <= encoding.max_length:
        return example, done
    cut = _cut_question(messages, encoding, renderer)
    return None if cut is None else (cut, [*done, PROMPT_CUT])


def _without_first_turn(messages: list[Message]) -> list[Message] | None:
    """The conversation from its second question on, with its system text; None where there is only one."""
    questions = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if len(questions) < 2:
        return None
    head = messages[:1] if messages[0]["role"] == "system" else []
    return [*head, *messages[questions[1] :]]


def _cut_question(messages: list[Message], encoding: Encoding, renderer: Renderer) -> Encoded | None:
    """Cut characters out of the middle of the question until the row fits: the task stands at its start or its end."""
    place = next(place for place, message in enumerate(messages) if message["role"] == "user")
    text = messages[place]["content"]
    best: Encoded | None = None
    low, high = SHORTEST_PROMPT, len(text) - len(CUT) - 1
    # Binary search over the characters kept. The number of tokens is not strictly monotone in it (a cut can split a
    # merge), so each candidate that is taken was itself measured.
    while low <= high:
        keep = (low + high) // 2
        head = (keep + 1) // 2
        shorter: Message = {**messages[place], "content": text[:head] + CUT + text[len(text) - (keep - head) :]}
        candidate = encode([*messages[:place], shorter, *messages[place + 1 :]], encoding, renderer)
        if len(candidate.ids) <= encoding.max_length:
            best, low = candidate, keep + 1
        else:
            high = keep - 1
    return best
