"""A chat template of one token a character, for tests of what does not depend on the model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from glmexp.config.data_schema import Columns, DataSection
from glmexp.data.prepare import prepare
from glmexp.data.store import Example
from glmexp.data.template import Message

PAD, END, USER, ASSISTANT = 0, 1, 2, 3
FIRST_CHARACTER = 4
ANY = Columns(prompt=None, input=None, answer=None, system=None, history=None, messages=None, tools=None)


class CharacterTemplate:
    """<user> text <assistant> answer <end>: the answer and its end token are learned."""

    stop_ids = (END,)
    pad_id = PAD
    given_labels = 0
    one_answer_a_row = False
    fingerprint = "characters"

    def train(self, messages: list[Message], supervise: str = "last") -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        supervised: list[bool] = []
        for place, message in enumerate(messages):
            assistant = message["role"] == "assistant"
            answer = assistant and (supervise == "all" or place == len(messages) - 1)
            text = [FIRST_CHARACTER + ord(character) for character in message["content"]]
            ids += [ASSISTANT if assistant else USER, *text, *([END] if assistant else [])]
            supervised += [False, *([answer] * (len(text) + assistant))]
        return ids, supervised

    def prompt(self, messages: list[Message]) -> list[int]:
        ids, _ = self.train(messages)
        return [*ids, ASSISTANT]


def text_of(ids: Iterable[int]) -> str:
    return "".join(chr(token - FIRST_CHARACTER) for token in map(int, ids) if token >= FIRST_CHARACTER)


def section(train_file: str | None, **values: object) -> DataSection:
    settings: dict[str, object] = {
        "name": "test",
        "train_file": train_file,
        "eval_file": None,
        "holdout": None,
        "format": None,
        "columns": ANY,
        "encoding": None,
        "on_error": "error",
        "max_length": 64,
        "supervise": "last",
        "packing": False,
        "shuffle": True,
        "group_by_length": False,
        "num_workers": 0,
        "prefetch": 2,
        "prepare_workers": None,
        "cache_dir": None,
    }
    return DataSection(**{**settings, **values})  # type: ignore[arg-type]


def example(prompt: str = "ab", answer: str = "c", line: int = 1) -> Example:
    template = CharacterTemplate()
    messages: list[Message] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    ids, supervised = template.train(messages)
    labels = [token if learned else -100 for token, learned in zip(ids, supervised, strict=True)]
    text = json.dumps({"messages": messages, "label": str(line)}).encode()
    return Example(np.array(ids, np.int32), np.array(labels, np.int32), len(prompt) + 2, line, text)


@dataclass(frozen=True)
class Read:
    """A file read with the character template."""

    rows: list[Example]
    report: list[str]


def read_rows(path: str, columns: Columns = ANY, **settings: object) -> Read:
    """What ``prepare`` makes of one file; every message short enough to be whole."""
    prepared = prepare(section(path, columns=columns, **{"max_length": 4096, **settings}), 0, CharacterTemplate())
    return Read(list(prepared.train), prepared.report)


def named(**columns: str | None) -> Columns:
    """Some columns by name."""
    return replace(ANY, **columns)


def pairs(read: Read) -> list[tuple[str, str]]:
    """(question, answer) of each row."""
    return [(row.prompt, row.answer) for row in read.rows]
