"""ROUGE-1, ROUGE-2, ROUGE-L and BLEU-4 of greedy answers, by rouge-score and sacrebleu over units of our own.

Both libraries' own tokenizers drop Chinese (rouge-score keeps a-z and 0-9 alone) or cannot cut it into words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from glmexp.config.registry import register
from glmexp.config.schema import Count
from glmexp.eval.answers import answer_all, example_key, gathered, write_lines
from glmexp.eval.hook import EvalContext, HookResult
from glmexp.eval.texts import Split, by_character, by_word

SPLITS: dict[str, Split] = {"char": by_character, "word": by_word}
METRICS = tuple(f"{score}_{unit}" for score in ("rouge1", "rouge2", "rougeL", "bleu4") for unit in SPLITS)


class _Units:
    """rouge-score's interface for a tokenizer."""

    def __init__(self, split: Split) -> None:
        self.tokenize = split


@cache
def _scorers(unit: str) -> tuple[Any, Any]:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics.bleu import BLEU

    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=_Units(SPLITS[unit]))
    # effective_order: an answer of fewer than four units is scored by the n-grams that it can have.
    return rouge, BLEU(tokenize="none", effective_order=True)


def score(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """F1 of ROUGE-1/2/L and sentence BLEU-4, each from 0 to 1, by character and by word; the best reference counts.

    A prediction without any unit scores 0.
    """
    result = dict.fromkeys(METRICS, 0.0)
    for unit, split in SPLITS.items():
        units = split(prediction)
        if not units:
            continue
        rouge, bleu = _scorers(unit)
        for reference in references:
            for name, found in rouge.score(reference, prediction).items():
                result[f"{name}_{unit}"] = max(result[f"{name}_{unit}"], found.fmeasure)
            wanted = " ".join(split(reference))
            if wanted:
                found = bleu.sentence_score(" ".join(units), [wanted]).score / 100
                result[f"bleu4_{unit}"] = max(result[f"bleu4_{unit}"], found)
    return result


@register("eval", "rouge")
@dataclass
class Rouge:
    """Overlap of greedy answers with the expected ones."""

    every: Count | None
    """Optimizer steps between two evaluations. Null: before and after training only."""
    max_new_tokens: Count
    """Tokens of an answer at most."""
    max_prompts: Count
    """The first so many held-out prompts are answered."""

    def run(self, context: EvalContext) -> HookResult:
        """Means over all answered prompts, 0 to 1; empty answers count as 0. Answers are written before scoring."""
        count = min(self.max_prompts, len(context.examples))
        mine = answer_all(context, context.examples, count, self.max_new_tokens)
        samples = gathered(context, mine, count, f"rouge-step-{context.step}.jsonl")
        sums = [0.0] * (len(METRICS) + 1)
        if samples is not None:
            scores = [score(one.generated, context.examples[one.index].answers) for one in samples]
            named = [(one.index, example_key(one.prompt, one.expected)) for one in samples]
            rows = [{"index": n, "example": key, **found} for (n, key), found in zip(named, scores, strict=True)]
            write_lines(context.samples / f"rouge-scores-step-{context.step}.jsonl", rows)
            sums = [sum(found[name] for found in scores) for name in METRICS]
            sums.append(float(sum(not one.generated.strip() for one in samples)))
        *totals, empty = context.sum_over_ranks(sums)
        metrics = {name: total / count for name, total in zip(METRICS, totals, strict=True)}
        words = ", ".join(
            f"{name} {metrics[f'{name}_char']:.3f}/{metrics[f'{name}_word']:.3f}"
            for name in ("rouge1", "rouge2", "rougeL", "bleu4")
        )
        line = f"{words} (by character / by word, {count} answers"
        return HookResult(metrics=metrics, lines=[f"{line}, {int(empty)} of them empty)" if empty else f"{line})"])
