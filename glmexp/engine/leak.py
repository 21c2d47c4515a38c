"""The leak gate: no supervised position may see the token that it has to predict, or a later one.

Measured, not read off a layout: embeddings from a place on are replaced, and the predictions of what stands up to that
place must keep their bits. (Attention gives a hidden token the weight 0 exactly, and shapes do not change, so an honest
row gives equal bits in float32, bfloat16 and float16 alike; where a kernel is not deterministic, the difference between
two equal passes is allowed.) Embeddings are changed, not ids: ChatGLM-6B reads its mask and positions off the ids.

The best known leak: a tutorial for ChatGLM-6B encodes prompt and answer in one text, so that [gMASK] and sop stand
behind both, and learns the answer, which now lies in the prefix that sees itself in both directions. Its loss falls to
0.0 on random answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from glmexp.config.errors import DataError, Problem
from glmexp.engine import distributed
from glmexp.engine.loss import IGNORED, chunks, only

Batch = Mapping[str, Any]
SPLITS = 3
"""Places of a row that are tested: its first, a middle and its last label."""


@dataclass(frozen=True)
class Row:
    """One row of the training data, as a batch of its own on the CPU."""

    batch: Batch
    """At least input_ids, labels of (1, length) and lengths of (1,): what lies behind is padding."""
    prompt: int | None
    """So many tokens at its start are given, not learned. None: not known (several answers in a row)."""
    name: str
    """The row in words, for messages."""


@dataclass(frozen=True)
class Change:
    """By how much predictions change with what they must not see, and between two equal passes."""

    split: int
    size: float
    noise: float


def check(model: Any, rows: Sequence[Row], inputs: Callable[[Batch], dict[str, Any]], ends: Collection[int]) -> str:
    """Refuse rows that cannot be learned from. Collective: all ranks give the same rows; a few forwards of one row.

    ``model``: an engine or a network; ``inputs``: from a batch on the device to what the network is given; ``ends``:
    the tokens that end an answer. Returns a line for the log. Raises DataError with everything that is wrong.
    """
    problems = [problem for row in rows for problem in faults(row, ends)]
    measured = [row for row in rows if bool((row.batch["labels"][0, 1:] != IGNORED).any())]
    training = model.training
    model.eval()
    tested = 0
    for row in measured:
        batch = distributed.to_device(row.batch)
        changes = _changes(model, inputs(batch), row.batch["labels"][0])
        tested += len(changes)
        # Every rank takes the same decision, whatever its own kernels did.
        excess = distributed.max_over_ranks([change.size - change.noise for change in changes])
        leaks = [change for change, above in zip(changes, excess, strict=True) if above > 0]
        if leaks:
            problems.append(_leak(model, row, leaks[0]))
    model.train(training)
    if problems:
        raise DataError(*problems)
    return (
        f"leak gate: passed; no prediction of {tested} answer tokens in {len(rows)} rows sees its token or a later one"
    )


def faults(row: Row, ends: Collection[int]) -> Iterator[Problem]:
    """What labels alone show: nothing to learn, padding or prompt learned, answers that do not end."""
    ids, labels = row.batch["input_ids"][0], row.batch["labels"][0]
    length = int(row.batch["lengths"][0])
    learned = labels != IGNORED
    if not bool(learned[1:].any()):
        yield Problem(row.name, "has no supervised token", "a row needs an answer")
        return
    if bool(learned[length:].any()):
        yield Problem(
            row.name,
            f"{int(learned[length:].sum())} tokens of padding are learned",
            "labels are -100 where the mask is 0; do not go by the id: the pad token may be the end token",
        )
    if bool(learned[1:length].all()):
        yield Problem(
            row.name,
            "every token of the prompt is learned: the labels are a copy of the ids",
            "labels are -100 up to where the answer begins",
        )
    elif row.prompt is not None and bool(learned[: row.prompt].any()):
        yield Problem(
            row.name,
            f"{int(learned[: row.prompt].sum())} tokens of the prompt are learned",
            "labels are -100 up to where the answer begins",
        )
    last = learned & ~torch.cat([learned[1:], learned.new_zeros(1)])
    last[length:] = False
    endless = [place for place in last.nonzero().flatten().tolist() if int(labels[place]) not in ends]
    if endless:
        yield Problem(
            row.name,
            f"the answer that ends at token {endless[0]} has no end token behind it: the model would never stop",
            f"append one of {sorted(ends)} to each answer and learn it",
        )
    wrong = learned & (labels != ids)
    if bool(wrong[:length].any()):
        place = int(wrong.nonzero()[0])
        yield Problem(
            row.name,
            f"label {int(labels[place])} at token {place} is not the token there ({int(ids[place])})",
            "labels are the ids, not shifted: the loss shifts",
        )


@torch.no_grad()
def _changes(model: Any, given: dict[str, Any], labels: torch.Tensor) -> list[Change]:
    """What predictions of the labels up to a split do when the embeddings from it on are others.

    Always SPLITS splits, whatever the row holds: under ZeRO-3 each forward is a collective.
    """
    places = (labels[1:] != IGNORED).nonzero().flatten() + 1
    network = getattr(model, "module", model)
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()

    def predictions() -> torch.Tensor:
        # Of the answer's positions alone: in float32, and of a whole row, these were the largest of a LoRA run.
        with only(head, (places - 1).to(distributed.device())):
            return model(**given, use_cache=False).logits.flatten(0, -2)

    first, again = predictions(), predictions()
    changes = []
    for number in range(SPLITS):
        index = (len(places) - 1) * number // (SPLITS - 1)
        with _replaced(embedding, int(places[index])):
            other = predictions()
        noise, change = (_difference(first[: index + 1], one[: index + 1]) for one in (again, other))
        changes.append(Change(int(places[index]), change, noise))
    return changes


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference. Logits that are no numbers give none: the first step's loss stops the run."""
    largest = torch.zeros((), device=one.device)
    for rows in chunks(one):
        change = (one[rows].float() - other[rows].float()).abs_().nan_to_num_(0.0)
        largest = torch.maximum(largest, change.max())
    return float(largest)


@contextmanager
def _replaced(embedding: nn.Module, split: int) -> Iterator[None]:
    """Inside, the embeddings of all tokens from ``split`` on are others of the same size."""

    def replace(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, split:] = -output[:, split:].roll(1, dims=-1)
        return output

    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def _leak(model: Any, row: Row, change: Change) -> Problem:
    ids = row.batch["input_ids"][0].tolist()
    config = getattr(model, "module", model).config
    sop = config.bos_token_id if hasattr(config, "position_encoding_2d") else None
    message = (
        f"a prediction sees its own answer: predictions of the tokens up to {change.split} change by {change.size:.3g} "
        f"when only the tokens from {change.split} on are others"
    )
    fix = "a supervised position may see only what stands before it: use a causal mask over the answer"
    if sop in ids and ids.index(sop) > change.split:
        message += (
            f". The answer stands before sop (token {ids.index(sop)}), in the part of a ChatGLM-6B row that sees "
            "itself in both directions: the loss falls to 0 by copying, and nothing is learned"
        )
        fix = "build rows as prompt [gMASK] sop answer eop, with labels behind sop"
    return Problem(row.name, message, fix)
