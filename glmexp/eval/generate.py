"""Greedy answers to held-out prompts or to a prompts file: exact match, and the answers themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from glmexp.config.registry import register
from glmexp.config.schema import Count
from glmexp.eval.answers import answer_all, gathered, write_table
from glmexp.eval.hook import EvalContext, HookResult
from glmexp.eval.prompts import read_prompts


@register("eval", "generate")
@dataclass
class Generate:
    """The answer with the highest scores, token by token, up to a stop token."""

    every: Count | None
    """Optimizer steps between two evaluations. Null: before and after training only."""
    max_new_tokens: Count
    """Tokens of an answer at most."""
    max_prompts: Count
    """The first so many prompts are answered."""
    prompts_file: str | None
    """JSON lines of {prompt} or {messages}, with an optional answer; builtin:prompts.jsonl is shipped. Null: the
    held-out rows."""

    def run(self, context: EvalContext) -> HookResult:
        """``exact_match`` (over prompts with an expected answer) and ``finished``: shares from 0 to 1.

        Rank 0 writes the samples before anything is counted.
        """
        examples: Sequence[Any] = context.examples
        if self.prompts_file is not None:
            examples = read_prompts(self.prompts_file, context.encode_prompt)
        count = min(self.max_prompts, len(examples))
        mine = answer_all(context, examples, count, self.max_new_tokens)
        path = context.samples / f"step-{context.step}.jsonl"
        samples = gathered(context, mine, count, path.name)
        if samples is not None:
            write_table(context.samples, "", "answers")
        judged = [one for one in mine if one.expected]
        exact, expected, finished = context.sum_over_ranks(
            [float(sum(one.exact for one in judged)), float(len(judged)), float(sum(one.finished for one in mine))]
        )
        metrics = {"finished": finished / count}
        line = f"{count} prompts answered"
        if expected:
            metrics = {"exact_match": exact / expected, **metrics}
            line = f"exact match {exact / expected:.3f} ({int(exact)} of {int(expected)} answers)"
        if finished < count:
            line += f"; {count - int(finished)} cut off by eval.generate.max_new_tokens={self.max_new_tokens}"
        return HookResult(
            metrics=metrics,
            lines=[f"{line}; {path.parent.name}/{path.name}"],
            samples=[asdict(one) for one in samples or []],
        )
