"""Numbers about prepared examples, and the ones that look wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from glmexp.data.batches import StepPlan
from glmexp.data.store import Example, Examples

LOOKED_AT = 20_000
"""Examples whose texts are looked at; of more, as many are drawn."""
MARKS = re.compile(
    r"<\|(?:im_start|im_end|endoftext|user|assistant|system|observation)\|>|\[g?MASK\]|</s>|\[Round \d+\]"
)
GARBLED = re.compile("\ufffd|锟斤拷|烫烫烫|ï»¿|Ã[\x80-\xbf]|â€")
NO_WORDS = {"none", "null", "nan", "n/a", "undefined", "[]", "{}"}


@dataclass(frozen=True)
class Lengths:
    """Tokens of examples."""

    count: int
    shortest: int
    median: int
    mean: float
    p95: int
    longest: int
    supervised_share: float

    @staticmethod
    def of(examples: Examples) -> Lengths:
        """Over all examples."""
        lengths = examples.lengths
        return Lengths(
            count=len(lengths),
            shortest=int(lengths.min()),
            median=int(np.median(lengths)),
            mean=float(lengths.mean()),
            p95=int(np.percentile(lengths, 95)),
            longest=int(lengths.max()),
            supervised_share=float(examples.column("supervised").sum() / lengths.sum()),
        )


def padding_share(lengths: np.ndarray, plan: StepPlan) -> float:
    """Share of places that hold padding in the first epoch's micro batches of rank 0."""
    real = places = 0
    for step in range(plan.steps_per_epoch):
        for batch in plan.micro_batches(step):
            present = [int(lengths[place]) for place in batch if place is not None]
            if present:
                real += sum(present)
                places += max(present) * len(present)
    return 1 - real / places


@dataclass(frozen=True)
class Suspicion:
    """What looks wrong, and where."""

    reason: str
    count: int
    examples: list[Example]
    """The first few."""


CHECKS: tuple[tuple[str, Callable[[Example], bool]], ...] = (
    ("marks of a chat template in the text (they are learned as plain text)", lambda one: _any(MARKS, one)),
    ("characters that a wrong encoding leaves", lambda one: _any(GARBLED, one)),
    ("the answer is only a word for nothing", lambda one: one.answer.strip().lower() in NO_WORDS),
    ("the answer repeats the question", lambda one: one.answer.strip() == one.prompt.strip()),
    ("the answer starts or ends with white space", lambda one: one.answer != one.answer.strip()),
)


def _any(pattern: re.Pattern[str], example: Example) -> bool:
    return any(pattern.search(message["content"]) for message in example.messages)


def sample(examples: Examples, seed: int = 0) -> Sequence[Example]:
    """All examples, or of many a draw in the file's order."""
    if len(examples) <= LOOKED_AT:
        return examples
    drawn = sorted(random.Random(seed).sample(range(len(examples)), LOOKED_AT))
    return [examples[index] for index in drawn]


def suspicions(examples: Iterable[Example], most: int = 3) -> list[Suspicion]:
    """Everything that looks wrong in the examples, with the first few of each kind."""
    found: dict[str, list[Example]] = {}
    counts: dict[str, int] = {}

    def note(reason: str, example: Example) -> None:
        counts[reason] = counts.get(reason, 0) + 1
        if len(found.setdefault(reason, [])) < most:
            found[reason].append(example)

    answers: dict[str, set[str]] = {}
    for example in examples:
        for reason, wrong in CHECKS:
            if wrong(example):
                note(reason, example)
        question = "\x00".join(message["content"] for message in example.messages[:-1])
        known = answers.setdefault(question, set())
        if example.answer in known:
            note("the same question with the same answer again", example)
        elif known:
            note("the same question with another answer", example)
        known.add(example.answer)
    return [Suspicion(reason, counts[reason], few) for reason, few in found.items()]


def shared_questions(train: Iterable[Example], held: Iterable[Example]) -> list[Example]:
    """Held-out examples whose conversation up to the answer is trained on: their scores say nothing."""
    seen = {_question(example) for example in train}
    return [example for example in held if _question(example) in seen]


def _question(example: Example) -> str:
    return "\x00".join(message["content"] for message in example.messages[:-1])
