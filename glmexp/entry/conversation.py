"""A conversation on its way to an answer: what fits, the request to the model, why the answer ended."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from glmexp.config.entries import GenerateSection
from glmexp.config.errors import ConfigError, Problem
from glmexp.data.template import Message
from glmexp.engine import kv_cache
from glmexp.engine.decode import Choosing, Follower
from glmexp.entry.serving import Served
from glmexp.model.renderer import Renderer
from glmexp.model.streaming import HALF


class TooLongError(Exception):
    """A question that leaves no room for an answer."""

    def __init__(self, tokens: int, max_length: int) -> None:
        super().__init__(
            f"{tokens} tokens of a question leave no room for an answer in generate.max_length={max_length}"
        )


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits, and what its answer may take."""

    messages: list[Message]
    """Without the turns that did not fit."""
    ids: list[int]
    dropped: int
    """Turns that were left out: a question and its answer are two."""
    room: int
    """Tokens of the answer at most."""


def fitted(template: Renderer, messages: Sequence[Message], settings: GenerateSection) -> Fitted:
    """Leave out the oldest rounds until prompt and ``max_new_tokens`` fit into ``max_length``.

    The system text and the question always stay. Where they leave less than ``max_new_tokens``, the answer has what is
    left. Raises TooLongError where nothing is left, DataError for messages that the template has no place for.
    """
    kept, dropped = list(messages), 0
    ids = template.prompt(kept)
    while len(ids) + settings.max_new_tokens > settings.max_length:
        first = 1 if kept[0]["role"] == "system" else 0
        end = next((place for place in range(first + 1, len(kept)) if kept[place]["role"] == "user"), None)
        if end is None:
            break
        dropped += end - first
        del kept[first:end]
        ids = template.prompt(kept)
    room = min(settings.max_new_tokens, settings.max_length - len(ids))
    if room < 1:
        raise TooLongError(len(ids), settings.max_length)
    return Fitted(kept, ids, dropped, room)


@dataclass(frozen=True)
class Answer:
    """What the model said."""

    text: str
    tokens: int
    """That were generated, the stop token among them."""
    finish_reason: str
    """stop: the model ended it; length: max_new_tokens or max_length did; interrupted: the user did."""

    def row(self, index: int, prompt: Fitted) -> dict[str, Any]:
        """A line of answers.jsonl."""
        return {
            "index": index,
            "prompt": str(prompt.messages[-1]["content"]),
            "answer": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(prompt.ids),
            "new_tokens": self.tokens,
            "dropped_turns": prompt.dropped,
        }


class Speaker:
    """Asks a model as the generate section says.

    Raises ConfigError where the cache of ``max_length`` has no room beside the weights, or the network ends before.
    """

    def __init__(self, served: Served, settings: GenerateSection, rows: int) -> None:
        self.served, self.settings, self._rows = served, settings, rows
        self._choosing = Choosing(settings.temperature, settings.top_p, settings.top_k, settings.repetition_penalty)
        self.cache = served.cache
        self.cache_bytes = self.cache.bytes(rows, settings.max_length)
        self._check(rows)
        self.draw_anew(0)

    def _check(self, rows: int) -> None:
        length, most = self.settings.max_length, kv_cache.max_positions(self.served.model)
        if length > most:
            found = f"{length} tokens, and the network was made for {most}"
            raise ConfigError(Problem("generate.max_length", found, f"generate.max_length={most}"))
        lack = kv_cache.too_large(self.cache, rows, length, kv_cache.free_bytes(self.served.device))
        if lack is not None:
            way = "a smaller generate.max_length" + (" or generate.batch_size" if rows > 1 else "")
            raise ConfigError(Problem("generate.max_length", lack, way))

    def draw_anew(self, place: int) -> None:
        """What is drawn from here on follows from ``generate.seed`` and the ``place`` of a prompt in its file: not from
        the number of ranks, each of which would otherwise draw the same for its first prompts."""
        torch.manual_seed(random.Random(f"{self.settings.seed} {place}").getrandbits(63))

    def facts(self, rows: int) -> dict[str, str]:
        """For the terminal."""
        settings = self.settings
        times = f"{rows} x {settings.max_length}" if rows > 1 else str(settings.max_length)
        drawn = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "seed")}
        words = ", ".join(f"{name} {value:g}" for name, value in drawn.items() if value is not None)
        return {
            **self.served.facts(),
            "length": f"{times} tokens, {self.cache_bytes / 1e6:,.1f} MB of keys and values ({self.cache.formula})",
            "answers": f"up to {settings.max_new_tokens} tokens, "
            + (words if settings.temperature is not None else "the likeliest each time"),
        }

    def answers(self, prompts: Sequence[Fitted], follower: Follower | None = None) -> list[Answer]:
        """One answer a prompt. The prompts are answered together and must have the same room."""
        (room,) = {prompt.room for prompt in prompts}
        template, device = self.served.template, self.served.device
        length = max(len(prompt.ids) for prompt in prompts)
        pads = [length - len(prompt.ids) for prompt in prompts]
        rows = [[template.pad_id] * pad + prompt.ids for pad, prompt in zip(pads, prompts, strict=True)]
        seen = [[0] * pad + [1] * (length - pad) for pad in pads]
        new = self.served.write(
            torch.tensor(rows, device=device),
            torch.tensor(seen, device=device),
            max_new_tokens=room,
            choosing=self._choosing,
            follower=follower,
            length=self.settings.max_length,
            rows=self._rows,
        )
        interrupted = follower is not None and follower.enough()
        return [self._answer(ids, room, interrupted) for ids in new.tolist()]

    def _answer(self, ids: list[int], room: int, interrupted: bool) -> Answer:
        template: Any = self.served.template
        stops = set(template.stop_ids)
        end = next((place for place, token in enumerate(ids) if token in stops), None)
        text = template.answer(ids)
        if end is not None:
            return Answer(text, end + 1, "stop")
        reason = "interrupted" if interrupted and len(ids) < room else "length"
        return Answer(text.rstrip(HALF).rstrip(), len(ids), reason)
