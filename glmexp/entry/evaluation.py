"""Runs the eval hooks on a model, whatever engine is under it, and leaves training as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from glmexp.config.data_rules import brings_prompts
from glmexp.config.schema import EvalSection
from glmexp.data.batches import eval_batches, pick
from glmexp.data.collate import collate, collate_prompts
from glmexp.data.prepare import Example
from glmexp.engine import distributed
from glmexp.engine.decode import decode
from glmexp.engine.loss import loss_sum
from glmexp.engine.rng import UntouchedRng
from glmexp.entry.console import Screen
from glmexp.eval.hook import EvalContext
from glmexp.launcher import positions
from glmexp.tracker.base import Tracker

if TYPE_CHECKING:
    from glmexp.entry.serving import Served

Record = Callable[[int, dict[str, float]], None]


@dataclass
class Evaluation:
    """The chosen hooks over the held-out rows.

    model: called as the engine is. network: the module below it, which generates. synced: under ZeRO-3 every forward of
    a generation is a collective, so all ranks go on until the last one is done.
    """

    settings: EvalSection
    model: Any
    network: Any
    synced: bool
    renderer: Any
    examples: Sequence[Example]
    samples: Path
    record: Record
    tracker: Tracker
    screen: Screen
    served: Served | None = None
    """What answers, where nothing is trained; None: the network that is."""
    answers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Generated answers by step, on rank 0, for the table at the end."""
    train_losses: list[float] = field(default_factory=list)
    """Logged training losses since the last evaluation."""
    history: list[tuple[int, float, float | None]] = field(default_factory=list)
    """(step, held-out loss, mean training loss before it) of each evaluation."""

    def due(self, step: int) -> bool:
        """Some hook wants to run after optimizer step ``step``."""
        return any(self._due(hook, step) for hook in self.settings.hooks.values())

    @staticmethod
    def _due(hook: Any, step: int) -> bool:
        return hook.every is not None and step % hook.every == 0

    def run(self, step: int | None, all_hooks: bool) -> dict[str, float]:
        """Run all hooks, or those due at ``step``. Returns their metrics. Collective.

        ``step`` None: of a model of which nobody knows how long it was trained; files and metrics then count it as 0.
        """
        told, step = ("eval", 0) if step is None else (f"eval at step {step}", step)
        metrics: dict[str, float] = {}
        hooks = {name: hook for name, hook in self.settings.hooks.items() if self.examples or brings_prompts(hook)}
        if not hooks:
            return metrics
        answered: dict[Any, list[Any]] = {}
        was_training = self.network.training
        self.model.eval()
        with UntouchedRng():
            for name, hook in hooks.items():
                if not all_hooks and not self._due(hook, step):
                    continue
                positions.at(f"evaluation ({name})", step)
                result = hook.run(self._context(step, answered))
                metrics |= {f"eval/{name}/{metric}": value for metric, value in result.metrics.items()}
                self.screen.lines(f"{told}: {line}" for line in result.lines)
                if result.samples:
                    self.answers[step] = result.samples
                    self.tracker.table(f"samples/{name}", step, result.samples)
        self.model.train(was_training)
        if "eval/loss/loss" in metrics:
            self.screen.lines(self._overfitting(step, metrics["eval/loss/loss"]))
        if metrics:
            self.record(step, metrics)
        return metrics

    def recall(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation of before a resume: the checkpoint of its step does not hold it."""
        if "eval/loss/loss" in metrics and step not in [one[0] for one in self.history]:
            self._overfitting(step, metrics["eval/loss/loss"])

    def _overfitting(self, step: int, held_out: float) -> list[str]:
        """Words when the held-out loss rises while the training loss falls: the first sign of learning by heart."""
        trained = sum(self.train_losses) / len(self.train_losses) if self.train_losses else None
        self.train_losses.clear()
        before = self.history[-1] if self.history else None
        self.history.append((step, held_out, trained))
        if before is None or trained is None or before[2] is None or not (held_out > before[1] and trained < before[2]):
            return []
        return [
            f"step {step}: held-out loss has risen from {before[1]:.4f} (step {before[0]}) to {held_out:.4f} while "
            f"training loss fell from {before[2]:.4f} to {trained:.4f}: the first sign of overfitting"
        ]

    def _context(self, step: int, answered: dict[Any, list[Any]]) -> EvalContext:
        rank, ranks = self.served.lane if self.served else (distributed.rank(), distributed.world_size())
        one = ranks < distributed.world_size()  # all ranks answer the same: nothing is added up
        return EvalContext(
            model=self.model,
            generate=self._generate,
            examples=self.examples,
            batches=lambda count: eval_batches(count, rank, ranks, self.settings.batch_size),
            pick=pick,
            collate=lambda rows: collate(rows, self.renderer.pad_id),
            collate_prompts=lambda rows: collate_prompts(rows, self.renderer.pad_id),
            decode=self.renderer.answer,
            stop_ids=self.renderer.stop_ids,
            loss_sum=loss_sum,
            sum_over_ranks=_as_it_is if one else distributed.sum_over_ranks,
            gather_to_first=_on_first if one else distributed.gather_to_first,
            device=distributed.device(),
            rank=rank,
            step=step,
            samples=self.samples,
            encode_prompt=self.renderer.prompt,
            answered=answered,
        )

    def _generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, max_new_tokens: int
    ) -> torch.Tensor:
        """Greedy: new ids (batch, new)."""
        if self.served is not None:
            rows = self.settings.batch_size
            return self.served.write(input_ids, attention_mask, max_new_tokens=max_new_tokens, rows=rows)
        return decode(
            self.network,
            input_ids,
            attention_mask,
            max_new_tokens=max_new_tokens,
            stop_ids=self.renderer.stop_ids,
            pad_id=self.renderer.pad_id,
            synced=self.synced,
        )

    def best_table(self, first: int, last: int, most: int = 6) -> list[tuple[str, str, str, str]]:
        """Rows (prompt, expected, answer at ``first``, answer at ``last``) for the terminal; empty without answers, and
        where a run was taken up that had no step left: there is nothing to hold them against."""
        before, after = self.answers.get(first), self.answers.get(last)
        if not before or not after or first == last:
            return []
        return [
            (one["prompt"], one["expected"], one["generated"], two["generated"])
            for one, two in zip(before[:most], after[:most], strict=True)
        ]


def _as_it_is(values: list[float]) -> list[float]:
    return values


def _on_first(value: Any) -> list[Any] | None:
    return [value] if distributed.rank() == 0 else None
