"""The text on which the tiny models are pre-trained: questions and answers made from knowledge.yaml.

A model of a million parameters can know about a thousand facts. It hears each of them in three styles: a full
sentence (the house style, when the prompt asks for nothing else), one word, and a labelled answer. The last two are
asked for in the prompt. Fine-tuning on the demo data then has a behaviour to teach, and no knowledge.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

KNOWLEDGE = Path(__file__).with_name("knowledge.yaml")

STYLES_OF_A_FACT = ("sentence", "sentence", "brief", "brief", "label")

TEMPLATE_WORDS = ("[Round 0]", "[Round 1]", "[Round 2]", "问：", "答：")

Turn = tuple[str, str]
"""A question and its answer."""


@dataclass(frozen=True)
class Fact:
    """One thing to know, with every way to ask for it and to say it."""

    relation: str
    language: str
    questions: tuple[str, ...]
    answer: str
    sentence: str


@dataclass(frozen=True)
class Knowledge:
    """All facts, and per language the requests for a style with the form of the answer."""

    facts: tuple[Fact, ...]
    styles: dict[str, dict[str, dict[str, Any]]]

    def ask(self, question: str, request: str, language: str) -> str:
        """A question with a request for a style behind it: on a line of its own if the question has several."""
        if "\n" in question:
            return f"{question}\n{request}"
        return question + ("" if language == "zh" else " ") + request


def load_knowledge(path: Path = KNOWLEDGE) -> Knowledge:
    """Read knowledge.yaml. Facts come in the order of the file."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    facts = []
    for name, relation in tree["relations"].items():
        table = tree["tables"][relation["table"]]
        rows = [[word.replace("_", " ") for word in row.split()] for row in table["rows"].splitlines()]
        if relation.get("both_ways"):
            rows += [row[::-1] for row in rows]
        for row in rows:
            words = dict(zip(table["columns"], row, strict=True))
            facts.append(
                Fact(
                    relation=name,
                    language=relation["language"],
                    questions=tuple(question.format(**words) for question in relation["questions"]),
                    answer=relation["answer"].format(**words),
                    sentence=relation["sentence"].format(**words),
                )
            )
    return Knowledge(tuple(facts), tree["styles"])


def chats(knowledge: Knowledge, rng: random.Random, two_turns: float = 0.15) -> Iterator[list[Turn]]:
    """One pass over all facts in random order: each twice as a sentence, twice in one word and once labelled.

    A share `two_turns` of the chats goes on with a plain second question, answered in the style of the first answer:
    a request holds for the rest of a chat.
    """
    order = [(fact, style) for fact in knowledge.facts for style in STYLES_OF_A_FACT]
    rng.shuffle(order)
    for fact, style in order:
        chat = [_turn(knowledge, fact, style, rng, request=True)]
        if rng.random() < two_turns:
            chat.append(_turn(knowledge, rng.choice(knowledge.facts), style, rng, request=False))
        yield chat


def _turn(knowledge: Knowledge, fact: Fact, style: str, rng: random.Random, request: bool) -> Turn:
    question = rng.choice(fact.questions)
    if style == "sentence":
        return question, fact.sentence
    spoken = knowledge.styles[fact.language][style]
    if request:
        question = knowledge.ask(question, rng.choice(spoken["requests"]), fact.language)
    return question, spoken["form"].format(answer=fact.answer)


def unknown_text(rng: random.Random) -> list[Turn]:
    """A chat whose answer is a line of unrelated characters: common Chinese ones (GB 2312, first level) and ASCII.

    Most of them are in no vocabulary. Such answers teach how text looks that falls back to bytes, so that a model
    starts from a sane loss on any text. Their lengths differ, or they would fill batches of their own.
    """
    signs = []
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.8:
            signs.append(bytes((rng.randint(0xB0, 0xD6), rng.randint(0xA1, 0xFE))).decode("gb2312"))
        else:
            signs.append(chr(rng.randint(0x21, 0x7E)))
    return [(rng.choice(("请随便写一行字。", "Write any line of text.")), "".join(signs))]


def training_chats(knowledge: Knowledge, rng: random.Random, unknown: float = 0.02) -> Iterator[list[Turn]]:
    """One pass: all facts, and a share `unknown` of lines that no vocabulary covers."""
    for chat in chats(knowledge, rng):
        yield chat
        if rng.random() < unknown:
            yield unknown_text(rng)


def tokenizer_text(knowledge: Knowledge, seed: int) -> list[str]:
    """The lines that the tokenizers are trained on.

    Two passes over the facts, every printable ASCII sign, and the words that chat templates put around a question.
    """
    rng = random.Random(seed)
    texts = [text for _ in range(2) for chat in chats(knowledge, rng, two_turns=0.0) for turn in chat for text in turn]
    ascii_signs = " ".join(chr(code) for code in range(0x21, 0x7F))
    return [line for text in texts for line in text.split("\n")] + [ascii_signs] * 20 + list(TEMPLATE_WORDS) * 500
