"""CMRC 2018's exact match and F1 by the official rules (Cui et al. 2019, cmrc2018_evaluate.py).

Texts are lower-cased and stripped, listed punctuation is dropped. Units are Chinese characters and, of other text, the
words of NLTK's English word tokenizer. F1 is taken over the longest common contiguous run of units; the best of the
accepted answers counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from glmexp.config.registry import register
from glmexp.config.schema import Count
from glmexp.eval.answers import answer_all, example_key, gathered, write_lines
from glmexp.eval.hook import EvalContext, HookResult

PUNCTUATION = frozenset("-:_*^/\\~`+=，。：？！“”；’《》…·、「」（）－～『』")
_CHINESE = re.compile("[\u4e00-\u9fa5]")


@cache
def _words() -> Any:
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()


def units(text: str) -> list[str]:
    """Chinese characters and English words of a text, without punctuation."""
    found: list[str] = []
    run = ""
    for sign in text.lower().strip():
        if sign in PUNCTUATION:
            continue
        if _CHINESE.match(sign):
            if run:
                found += _words().tokenize(run)
                run = ""
            found.append(sign)
        else:
            run += sign
    return found + (_words().tokenize(run) if run else [])


def longest_common_run(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest contiguous run of units that both have."""
    best = 0
    before = [0] * (len(other) + 1)
    for unit in one:
        row = [0] * (len(other) + 1)
        for place, found in enumerate(other, start=1):
            if unit == found:
                row[place] = before[place - 1] + 1
                best = max(best, row[place])
        before = row
    return best


def f1(prediction: str, answers: Sequence[str]) -> float:
    """0 to 1; the best of the answers."""
    predicted = units(prediction)
    best = 0.0
    for answer in answers:
        wanted = units(answer)
        common = longest_common_run(wanted, predicted)
        if common:
            precision, recall = common / len(predicted), common / len(wanted)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def exact_match(prediction: str, answers: Sequence[str]) -> int:
    """1 where the texts are the same without punctuation."""

    def bare(text: str) -> str:
        return "".join(sign for sign in text.lower().strip() if sign not in PUNCTUATION)

    # The official script never scores an empty prediction: such a question counts as skipped, with 0.
    return int(bool(prediction.strip()) and any(bare(prediction) == bare(answer) for answer in answers))


@register("eval", "cmrc")
@dataclass
class Cmrc:
    """Reading comprehension: exact match and F1 of greedy answers, in percent as the official script prints them."""

    every: Count | None
    """Optimizer steps between two evaluations. Null: before and after training only."""
    max_new_tokens: Count
    """Tokens of an answer at most."""
    max_prompts: Count | None
    """The first so many held-out questions are answered. Null: all."""

    def run(self, context: EvalContext) -> HookResult:
        """``f1`` and ``em``, 0 to 100. ``samples/cmrc-step-<n>.json`` is what the official script takes."""
        count = len(context.examples) if self.max_prompts is None else min(self.max_prompts, len(context.examples))
        mine = answer_all(context, context.examples, count, self.max_new_tokens)
        samples = gathered(context, mine, count, f"cmrc-step-{context.step}.jsonl")
        sums = [0.0, 0.0, 0.0]
        if samples is not None:
            rows = [(context.examples[one.index], one.generated) for one in samples]
            predictions = {row.id or str(number): text for number, (row, text) in enumerate(rows)}
            official = context.samples / f"cmrc-step-{context.step}.json"
            official.write_text(json.dumps(predictions, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            scores = [(f1(text, row.answers), exact_match(text, row.answers)) for row, text in rows]
            named = [(one.index, example_key(one.prompt, one.expected)) for one in samples]
            lines = [
                {"index": index, "example": key, "f1": 100 * overlap, "em": 100 * equal}
                for (index, key), (overlap, equal) in zip(named, scores, strict=True)
            ]
            write_lines(context.samples / f"cmrc-scores-step-{context.step}.jsonl", lines)
            sums = [
                sum(overlap for overlap, _ in scores),
                float(sum(equal for _, equal in scores)),
                float(sum(not text.strip() for _, text in rows)),
            ]
        total_f1, total_em, empty = context.sum_over_ranks(sums)
        metrics = {"f1": 100 * total_f1 / count, "em": 100 * total_em / count}
        line = f"F1 {metrics['f1']:.3f}, exact match {metrics['em']:.3f} ({count} questions"
        return HookResult(metrics=metrics, lines=[f"{line}, {int(empty)} answers empty)" if empty else f"{line})"])
