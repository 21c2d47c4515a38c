"""Lengths of training rows without a tokenizer, from characters: an estimate for the plan, which loads no library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from glmexp.config.data_rules import BUILTIN
from glmexp.config.families import FAMILIES
from glmexp.config.schema import ModelSection, RunConfig
from glmexp.data import forms
from glmexp.data.files import parse_block
from glmexp.data.opening import open_file, sample
from glmexp.data.readers import read_records

WIDE_FROM = "\u2e80"
"""Characters from here on are Chinese, Japanese, Korean: about a token each."""
TOKENS_A_CHARACTER = {"released": (0.65, 0.28), "shipped": (0.95, 0.55)}
"""Of wide and of other characters: vocabularies of 65,000 ids and more, and the small ones of the shipped models."""
TEMPLATE = 8
"""Tokens that a chat template adds to a row."""
MOST_ROWS = 20_000


@dataclass(frozen=True)
class Lengths:
    """Tokens of training rows, estimated and cut to data.max_length."""

    rows: int
    """Of the whole file, estimated from its size where only its beginning was read."""
    tokens: np.ndarray
    """(rows that were read,)."""
    labels: np.ndarray
    """(rows that were read,): tokens that are learned."""
    source: str

    @property
    def label_share(self) -> float:
        """Of all tokens, those that are learned."""
        return float(self.labels.sum() / self.tokens.sum())


def lengths(config: RunConfig) -> Lengths | None:
    """Estimated lengths of ``data.train_file``. None where it is not a file on this machine. Raises DataError."""
    data = config.data
    if data.train_file is None or data.train_file.startswith("hub:"):
        return None
    file = open_file(data.train_file, data.encoding)
    blocks, first = sample(file)
    found = forms.resolve(file.path, first, data.columns, data.format)
    wide, other = TOKENS_A_CHARACTER["shipped" if _shipped(config.model) else "released"]
    tokens: list[int] = []
    labels: list[int] = []
    read_bytes, complete = 0, True
    for block in blocks:
        rows, _ = read_records(file, parse_block(block, file.line_encoding), found, "skip")
        for row in rows:
            counts = [(one["role"], _tokens(one["content"], wide, other)) for one in row.messages]
            answers = [count + 1 for role, count in counts if role == "assistant"]
            total = min(data.max_length, TEMPLATE + sum(count for _, count in counts))
            tokens.append(total)
            labels.append(min(total - 1, sum(answers) if data.supervise == "all" else answers[-1]))
        read_bytes += len(block.text or b"")
        if len(tokens) >= MOST_ROWS:
            complete = next(blocks, None) is None
            break
    if not tokens:
        return None
    size = file.place.stat().st_size if file.place.is_file() else 0
    count = len(tokens) if complete or not read_bytes else round(len(tokens) * size / read_bytes)
    source = f"estimated from the characters of {len(tokens):,} rows of {file.path}; entry=inspect counts tokens"
    return Lengths(count, np.array(tokens), np.array(labels), source)


def stands_in(config: RunConfig) -> bool:
    """The training file is the shipped demo, as long as no other is named, and the model is none of those that are
    shipped to be tried out on it: its rows say nothing of what the run will be."""
    file, path = config.data.train_file, config.model.path
    return file is not None and file.startswith(BUILTIN) and (path is None or not path.startswith(BUILTIN))


def _shipped(model: ModelSection) -> bool:
    """The tokenizer is a small one that is shipped."""
    builtin = model.path is not None and model.path.startswith(BUILTIN)
    return builtin or (model.init == "random" and FAMILIES[model.family].tiny is not None)


def _tokens(text: object, wide: float, other: float) -> int:
    characters = str(text)
    many = sum(character >= WIDE_FROM for character in characters)
    return round(many * wide + (len(characters) - many) * other)
