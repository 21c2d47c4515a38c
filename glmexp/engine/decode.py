"""From left padded prompts to new ids, token by token: every entry that generates goes through here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class Choosing:
    """How the next token is chosen from its scores."""

    temperature: float | None = None
    """None: the likeliest one. Else one is drawn from softmax(scores / temperature)."""
    top_p: float | None = None
    """Drawn from the fewest tokens whose probabilities reach this sum (Holtzman et al. 2019, arXiv:1904.09751)."""
    top_k: int | None = None
    """Drawn from the so many likeliest."""
    repetition_penalty: float | None = None
    """Scores of tokens that are there already are divided by this, negative ones multiplied (arXiv:1909.05858)."""


GREEDY = Choosing()


class Follower(Protocol):
    """Sees the new tokens as they come."""

    def tokens(self, ids: list[int]) -> None:
        """One new token a row; rows that have ended get the padding token."""

    def enough(self) -> bool:
        """Whether to end now; what has been generated so far is returned."""


def decode(
    network: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    choosing: Choosing = GREEDY,
    follower: Follower | None = None,
    synced: bool = False,
) -> Tensor:
    """New ids (batch, new) for ``input_ids`` and ``attention_mask`` (batch, length).

    Each row ends with a token of ``stop_ids`` and padding behind it, or has no end after ``max_new_tokens``. Nothing of
    the checkpoint's own generation_config.json is used. Positions follow from the mask. ``synced``: every forward is a
    collective (ZeRO-3), so all ranks go on until the last has finished.
    """
    drawn: dict[str, Any] = {}
    if choosing.temperature is not None:
        # transformers' own default is top_k=50; 0 is all.
        drawn = {"temperature": choosing.temperature, "top_p": choosing.top_p or 1.0, "top_k": choosing.top_k or 0}
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=choosing.temperature is not None,
        repetition_penalty=choosing.repetition_penalty or 1.0,
        eos_token_id=list(stop_ids),
        pad_token_id=pad_id,
        **drawn,
    )
    more: dict[str, Any] = {}
    if follower is not None:
        more = {"streamer": _Stream(follower), "stopping_criteria": StoppingCriteriaList([_Enough(follower)])}
    with torch.no_grad(), _only_ours(network):
        sequences = network.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=settings,
            synced_gpus=synced,
            **more,
        )
    return sequences[:, input_ids.shape[1] :]


@contextmanager
def _only_ours(network: Any) -> Iterator[None]:
    """transformers fills what a given GenerationConfig leaves open from the model's own: released ones hold a
    repetition penalty, which would also change greedy answers."""
    plain = network.get_base_model() if hasattr(network, "get_base_model") else network
    before = plain.generation_config
    plain.generation_config = GenerationConfig()
    try:
        yield
    finally:
        plain.generation_config = before


class _Stream(BaseStreamer):
    """Hands tokens on; the first call holds the prompts."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._begun = False

    def put(self, value: Tensor) -> None:
        if self._begun:
            self._follower.tokens(value.flatten().tolist())
        self._begun = True

    def end(self) -> None:
        """Nothing is held back."""


class _Enough(StoppingCriteria):
    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._follower.enough(), dtype=torch.bool, device=input_ids.device)
