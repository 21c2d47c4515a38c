"""From logits to the next token, on the device: what a decoding step can hold in a CUDA graph."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Choosing(Protocol):
    """How the next token is chosen from its logits. None of all: greedy."""

    @property
    def temperature(self) -> float | None:
        """Drawn from softmax(logits / temperature). None: the likeliest one."""

    @property
    def top_k(self) -> int | None:
        """Drawn from the so many likeliest."""

    @property
    def top_p(self) -> float | None:
        """Drawn from the fewest tokens whose probabilities reach this sum."""

    @property
    def repetition_penalty(self) -> float | None:
        """Logits of tokens that are there already, in the prompt too, are divided by it, negative ones multiplied."""


def choose(logits: Tensor, choosing: Choosing | None, seen: Tensor | None) -> Tensor:
    """Tokens (batch,) for ``logits`` (batch, vocabulary). Nothing waits for the host, as torch.multinomial would.

    ``seen`` (batch, vocabulary): True for tokens that are there; read with a repetition penalty.
    """
    if choosing is None:
        return logits.argmax(dim=-1)
    if choosing.repetition_penalty is not None and seen is not None:
        penalty, logits = choosing.repetition_penalty, logits.float()  # as transformers: not rounded to 16 bit again
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if choosing.temperature is None:
        return logits.argmax(dim=-1)
    probabilities = warped(logits, choosing).softmax(dim=-1)
    # The largest of p / e with exponential e falls on token i with probability p[i].
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def warped(logits: Tensor, choosing: Choosing) -> Tensor:
    """Logits divided by the temperature, -inf for tokens outside of top_k and top_p; float32. The warpers are those of
    transformers, in its order."""
    assert choosing.temperature is not None, "greedy decoding warps nothing"
    logits = logits.float() / choosing.temperature
    if choosing.top_k is not None:
        least = logits.topk(min(choosing.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if choosing.top_p is not None:
        ascending, order = logits.sort(dim=-1)
        outside = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - choosing.top_p
        outside[..., -1:] = False
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return logits
