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

import yaml

KNOWLEDGE = Path(__file__).with_name("knowledge.yaml")

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
    styles: dict[str, dict[str, list[str]]]

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
                    questions=tuple(_fill(question, words) for question in relation["questions"]),
                    answer=relation["answer"].format(**words),
                    sentence=relation["sentence"].format(**words),
                )
            )
    return Knowledge(tuple(facts), tree["styles"])


def _fill(question: str, words: dict[str, str]) -> str:
    return question.format(**words)


def chats(knowledge: Knowledge, rng: random.Random, two_turns: float = 0.08) -> Iterator[list[Turn]]:
    """One pass over all facts in random order: each twice as a sentence, twice in one word and once labelled.

    A share `two_turns` of the chats goes on with a second question, so that the models know what follows an answer.
    """
    turns = [turn for fact in knowledge.facts for turn in _turns(knowledge, fact, rng)]
    rng.shuffle(turns)
    for turn in turns:
        yield [turn, rng.choice(turns)] if rng.random() < two_turns else [turn]


def _turns(knowledge: Knowledge, fact: Fact, rng: random.Random) -> list[Turn]:
    style = knowledge.styles[fact.language]
    first, second, third, fourth, fifth = (rng.choice(fact.questions) for _ in range(5))
    return [
        (first, fact.sentence),
        (second, fact.sentence),
        (knowledge.ask(third, rng.choice(style["brief"]), fact.language), fact.answer),
        (knowledge.ask(fourth, rng.choice(style["brief"]), fact.language), fact.answer),
        (knowledge.ask(fifth, style["label"][0], fact.language), style["label_form"][0].format(answer=fact.answer)),
    ]


def noise(rng: random.Random, length: int = 16) -> str:
    """A line of unrelated characters: common Chinese ones (the first level of GB 2312), letters, digits, punctuation.

    Most of them are in no vocabulary. Such lines teach how text looks when it falls back to bytes, so that a model
    starts from a sane loss on any text.
    """
    parts = []
    for _ in range(length):
        if rng.random() < 0.8:
            parts.append(bytes((rng.randint(0xB0, 0xD6), rng.randint(0xA1, 0xFE))).decode("gb2312"))
        else:
            parts.append(chr(rng.randint(0x21, 0x7E)))
    return "".join(parts)


def tokenizer_text(knowledge: Knowledge, seed: int) -> list[str]:
    """The lines that the tokenizers are trained on: two passes over the facts, and every printable ASCII sign."""
    rng = random.Random(seed)
    lines = [text for _ in range(2) for chat in chats(knowledge, rng, two_turns=0.0) for turn in chat for text in turn]
    ascii_signs = "".join(chr(code) for code in range(0x21, 0x7F))
    return [line for text in lines for line in text.split("\n")] + [" ".join(ascii_signs)] * 20
