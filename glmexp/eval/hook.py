"""What a held-out measurement gets and gives. The engine fills the context; a hook is one dataclass in one file.

Rules for hooks: every rank calls the model equally often (with ZeRO stage 3 each forward is a collective), so a hook
walks ``context.batches`` to its end on every rank; it leaves no gradient behind; memory does not grow with the number
of examples beyond their text. The engine sets evaluation mode and restores mode and random state afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from glmexp.config.schema import Count

if TYPE_CHECKING:
    import torch

Batch = Mapping[str, "torch.Tensor"]


class EvalExample(Protocol):
    """What hooks read of a held-out row."""

    @property
    def prompt(self) -> str:
        """The question as text."""

    @property
    def answer(self) -> str:
        """The answer that is expected."""

    @property
    def answers(self) -> Sequence[str]:
        """All accepted answers."""

    @property
    def id(self) -> str | None:
        """The row's name in its file."""


class Generate(Protocol):
    """Greedy generation. Under ZeRO stage 3 all ranks go on until the last has finished."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        max_new_tokens: int,
    ) -> torch.Tensor:
        """New ids (batch, new) for left padded prompts (batch, length); rows that ended are filled up."""


@dataclass(frozen=True)
class EvalContext:
    """One evaluation on one rank."""

    model: Callable[..., Any]
    """Called with input_ids and attention_mask (batch, length); gives ``.logits`` (batch, length, vocabulary)."""
    generate: Generate
    examples: Sequence[Any]
    """All held-out rows (EvalExample), the same on every rank."""
    batches: Callable[[int], Sequence[Sequence[int | None]]]
    """Of the first n examples, this rank's batches of indices: as many on each rank; None is a blank place."""
    pick: Callable[[Sequence[Any], Any], list[Any]]
    """(examples, one batch of indices) -> its rows, blank ones without labels."""
    collate: Callable[[list[Any]], Batch]
    """Rows -> right padded input_ids, attention_mask, labels (batch, length)."""
    collate_prompts: Callable[[list[Any]], Batch]
    """Rows -> left padded input_ids, attention_mask, position_ids (batch, length)."""
    decode: Callable[[list[int]], str]
    """Ids -> text, without special tokens."""
    stop_ids: Sequence[int]
    """Tokens that end an answer."""
    loss_sum: Callable[[Any, Any], Any]
    """(logits, labels) -> sum of the supervised tokens' cross entropies in float32, as training computes it."""
    sum_over_ranks: Callable[[list[float]], list[float]]
    gather_to_first: Callable[[Any], list[Any] | None]
    """A value of each rank -> all of them on rank 0, None elsewhere."""
    device: Any
    rank: int
    step: int
    """Optimizer steps so far."""
    samples: Path
    """Folder for generated answers."""
    encode_prompt: Callable[[list[Any]], list[int]]
    """Messages -> ids up to where the answer begins, by the model's chat template."""
    answered: dict[Any, list[Any]]
    """Answers of this evaluation so far, so that two hooks do not generate the same."""


@dataclass(frozen=True)
class HookResult:
    """What a hook measured; metrics are the same on every rank."""

    metrics: dict[str, float]
    """Metric -> value; logged as ``eval/<hook>/<metric>``."""
    lines: list[str]
    """For the terminal."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Rows for a table in the tracker; on rank 0 alone."""


class Hook(Protocol):
    """The settings of a hook, registered with ``@register("eval", NAME)``, and its measurement."""

    every: Count | None
    """Optimizer steps between two evaluations. Null: before and after training only."""

    def run(self, context: EvalContext) -> HookResult:
        """Measure on the held-out rows. Called on every rank at the same time."""
