"""Held-out loss: the mean cross entropy over all supervised tokens of all ranks, and perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass

from glmexp.config.registry import register
from glmexp.config.schema import Count
from glmexp.eval.hook import EvalContext, HookResult

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

        total = torch.zeros((), dtype=torch.float64, device=context.device)
        tokens = 0
        with torch.no_grad():
            for places in context.batches(len(context.examples)):
                batch = context.collate(context.pick(context.examples, places))
                tokens += int((batch["labels"][:, 1:] != IGNORED).sum())
                on_device = {name: tensor.to(context.device) for name, tensor in batch.items()}
                output = context.model(
                    input_ids=on_device["input_ids"], attention_mask=on_device["attention_mask"], use_cache=False
                )
                total += context.loss_sum(output.logits, on_device["labels"])
                del output
        loss_sum, token_count = context.sum_over_ranks([float(total), float(tokens)])
        assert token_count > 0, "held-out rows without a supervised token never reach a hook"
        loss = loss_sum / token_count
        try:
            perplexity = math.exp(loss)
        except OverflowError:
            perplexity = math.inf
        line = f"loss {loss:.4f}, perplexity {perplexity:.4g} ({len(context.examples)} rows, {int(token_count)} tokens)"
        return HookResult(metrics={"loss": loss, "perplexity": perplexity}, lines=[line])
