"""Held-out loss: the mean cross entropy over all supervised tokens of all ranks, and perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glmexp.config.registry import register
from glmexp.config.schema import Count
from glmexp.eval.answers import example_key, write_lines
from glmexp.eval.hook import EvalContext, HookResult

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""Label of tokens that do not count (the default ignore_index of torch's cross entropy)."""


@register("eval", "loss")
@dataclass
class Loss:
    """Token-weighted, so that it depends neither on the batch size nor on the number of ranks."""

    every: Count | None
    """Optimizer steps between two evaluations. Null: before and after training only."""

    def run(self, context: EvalContext) -> HookResult:
        """``loss`` in nats per supervised token and ``perplexity`` = exp(loss)."""
        import torch

        mine: list[tuple[int, float, int]] = []
        with torch.no_grad():
            for places in context.batches(len(context.examples)):
                batch = context.collate(context.pick(context.examples, places))
                tokens = (batch["labels"][:, 1:] != IGNORED).sum(dim=1).tolist()
                on_device = {name: tensor.to(context.device) for name, tensor in batch.items()}
                output = context.model(
                    input_ids=on_device["input_ids"], attention_mask=on_device["attention_mask"], use_cache=False
                )
                sums = _of_rows(context, output.logits, on_device["labels"])
                del output
                found = zip(places, sums, tokens, strict=True)
                mine += [(place, loss, count) for place, loss, count in found if place is not None]
        _write(context, mine)
        loss_sum, token_count = context.sum_over_ranks(
            [sum(loss for _, loss, _ in mine), float(sum(count for _, _, count in mine))]
        )
        assert token_count > 0, "held-out rows without a supervised token never reach a hook"
        loss = loss_sum / token_count
        try:
            perplexity = math.exp(loss)
        except OverflowError:
            perplexity = math.inf
        line = f"loss {loss:.4f}, perplexity {perplexity:.4g} ({len(context.examples)} rows, {int(token_count)} tokens)"
        return HookResult(metrics={"loss": loss, "perplexity": perplexity}, lines=[line])


def _of_rows(context: EvalContext, logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Loss sum of each row of a batch, a row at a time as views: two runs can be paired example by example.

    logits: (batch, length, vocabulary); labels: (batch, length).
    """
    import torch

    rows = zip(logits.split(1), labels.split(1), strict=True)
    return torch.stack([context.loss_sum(*row) for row in rows]).tolist()


def _write(context: EvalContext, mine: list[tuple[int, float, int]]) -> None:
    """``samples/loss-scores-step-<n>.jsonl`` on rank 0: mean loss (nats per supervised token) of each example."""
    parts = context.gather_to_first(mine)
    if parts is None:
        return
    rows = [
        {
            "index": index,
            "example": example_key(context.examples[index].prompt, context.examples[index].answer),
            "loss": loss / tokens if tokens else None,
            "tokens": tokens,
        }
        for index, loss, tokens in sorted(one for part in parts for one in part)
    ]
    write_lines(context.samples / f"loss-scores-step-{context.step}.jsonl", rows)
