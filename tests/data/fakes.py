"""A chat template of one token a character, for tests of what does not depend on the model."""

from __future__ import annotations

from glmexp.config.schema import Columns, DataSection
from glmexp.data.prepare import Example
from glmexp.data.template import Message

PAD, END, USER, ASSISTANT = 0, 1, 2, 3
FIRST_CHARACTER = 4
ANY = Columns(prompt=None, input=None, answer=None)


class CharacterTemplate:
    """<user> text <assistant> answer <end>: the answer and its end token are learned."""

    stop_ids = (END,)
    pad_id = PAD

    def train(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        supervised: list[bool] = []
        for message in messages:
            answer = message["role"] == "assistant"
            text = [FIRST_CHARACTER + ord(character) for character in message["content"]]
            ids += [ASSISTANT if answer else USER, *text, *([END] if answer else [])]
            supervised += [False, *([answer] * (len(text) + answer))]
        return ids, supervised

    def prompt(self, messages: list[Message]) -> list[int]:
        ids, _ = self.train(messages)
        return [*ids, ASSISTANT]


def text_of(ids: list[int]) -> str:
    return "".join(chr(token - FIRST_CHARACTER) for token in ids if token >= FIRST_CHARACTER)


def section(train_file: str | None, **values: object) -> DataSection:
    settings: dict[str, object] = {
        "name": "test",
        "train_file": train_file,
        "eval_file": None,
        "holdout": None,
        "columns": ANY,
        "max_length": 64,
        "shuffle": True,
    }
    return DataSection(**{**settings, **values})  # type: ignore[arg-type]


def example(prompt: str = "ab", answer: str = "c", line: int = 1) -> Example:
    template = CharacterTemplate()
    messages: list[Message] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    ids, supervised = template.train(messages)
    labels = [token if learned else -100 for token, learned in zip(ids, supervised, strict=True)]
    return Example(ids, labels, template.prompt(messages[:1]), prompt, answer, line)
