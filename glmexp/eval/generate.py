"""Greedy answers to held-out prompts: exact match, and the answers themselves as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from glmexp.config.registry import register
from glmexp.config.schema import Count
from glmexp.eval.hook import EvalContext, HookResult


@dataclass(frozen=True)
class Sample:
    """One generated answer, as it stands in ``samples/step-<n>.jsonl``."""

    index: int
    """Place among the held-out rows, from 0."""
    prompt: str
    expected: str
    generated: str
    exact: bool
    """Equal but for white space at both ends."""
    finished: bool
    """The model ended its answer itself, within max_new_tokens."""


@register("eval", "generate")
@dataclass
class Generate:
    """The answer with the highest scores, token by token, up to a stop token."""

    every: Count | None
    """Optimizer steps between two evaluations. Null: before and after training only."""
    max_new_tokens: Count
    """Tokens of an answer at most."""
    max_prompts: Count
    """The first so many held-out prompts are answered."""

    def run(self, context: EvalContext) -> HookResult:
        """``exact_match`` and ``finished``: shares of the answers, from 0 to 1. Rank 0 writes the samples first."""
        count = min(self.max_prompts, len(context.examples))
        mine = self._answers(context, count)
        gathered = context.gather_to_first(mine)
        samples = sorted((one for part in gathered or [] for one in part), key=lambda one: one.index)
        path = context.samples / f"step-{context.step}.jsonl"
        if gathered is not None:
            assert [one.index for one in samples] == list(range(count)), "each prompt is answered once over all ranks"
            write_samples(path, samples)
        exact, finished = context.sum_over_ranks(
            [float(sum(one.exact for one in mine)), float(sum(one.finished for one in mine))]
        )
        line = f"exact match {exact / count:.3f} ({int(exact)} of {count} answers)"
        if finished < count:
            line += f"; {count - int(finished)} cut off by eval.generate.max_new_tokens={self.max_new_tokens}"
        return HookResult(
            metrics={"exact_match": exact / count, "finished": finished / count},
            lines=[f"{line}; {path.parent.name}/{path.name}"],
            samples=[asdict(one) for one in samples],
        )

    def _answers(self, context: EvalContext, count: int) -> list[Sample]:
        import torch

        answers: list[Sample] = []
        stops = set(context.stop_ids)
        with torch.no_grad():
            for places in context.batches(count):
                batch = context.collate_prompts(context.pick(context.examples, places))
                new_ids = context.generate(
                    input_ids=batch["input_ids"].to(context.device),
                    attention_mask=batch["attention_mask"].to(context.device),
                    position_ids=batch["position_ids"].to(context.device),
                    max_new_tokens=self.max_new_tokens,
                )
                # Blank places were generated for too, so that all ranks do the same; here they end.
                for place, ids in zip(places, new_ids.tolist(), strict=True):
                    if place is not None:
                        answers.append(_sample(context, place, ids, stops))
        return answers


def _sample(context: EvalContext, index: int, ids: Sequence[int], stops: set[int]) -> Sample:
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    example = context.examples[index]
    text = context.decode(list(ids[:end]))
    exact = text.strip() == example.answer.strip()
    return Sample(index, example.prompt, example.answer, text, exact, end is not None)


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """One JSON object a line; a file of the same step is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples]
    path.write_text("".join(lines), encoding="utf-8")
