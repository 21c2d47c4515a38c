"""Hooks against a model that is a table of logits: every number can be worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glmexp.config.registry import names, option
from glmexp.engine.loss import loss_sum
from glmexp.eval.generate import Generate
from glmexp.eval.hook import EvalContext
from glmexp.eval.loss import Loss

PAD, STOP, VOCABULARY = 0, 1, 8


@dataclass(frozen=True)
class Row:
    input_ids: list[int]
    labels: list[int]
    prompt_ids: list[int]
    prompt: str
    answer: str


def row(prompt: list[int], answer: list[int]) -> Row:
    ids = [*prompt, *answer, STOP]
    labels = [-100] * len(prompt) + [*answer, STOP]
    return Row(ids, labels, prompt, text(prompt), text(answer))


def text(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


ROWS = [row([2, 3], [4]), row([2], [5, 6, 7]), row([3, 3, 3], [2, 2]), row([7], [7]), row([4, 5], [6])]


class TableModel:
    """Logits depend on the last token alone, in bf16 as on a GPU."""

    def __init__(self) -> None:
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.shapes: list[torch.Size] = []

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not torch.is_grad_enabled()
        assert input_ids.shape == attention_mask.shape
        self.shapes.append(input_ids.shape)
        return SimpleNamespace(logits=self.table[input_ids])

    def expected_loss(self, rows: Sequence[Row]) -> tuple[float, int]:
        log_p = self.table.double().log_softmax(-1)
        pairs = [
            (before, label)
            for one in rows
            for before, label in zip(one.input_ids[:-1], one.labels[1:], strict=True)
            if label != -100
        ]
        return -sum(float(log_p[before, label]) for before, label in pairs) / len(pairs), len(pairs)


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    length = max(len(one.input_ids) for one in rows)

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([value + [fill] * (length - len(value)) for value in values])

    ids = padded([one.input_ids for one in rows], PAD)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": padded([one.labels for one in rows], -100),
    }


def collate_prompts(rows: list[Row]) -> dict[str, torch.Tensor]:
    length = max(len(one.prompt_ids) for one in rows)
    ids = torch.tensor([[PAD] * (length - len(one.prompt_ids)) + one.prompt_ids for one in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "position_ids": torch.zeros_like(ids)}


def pick(rows: Sequence[Row], places: Sequence[int | None]) -> list[Row]:
    blank = dataclasses.replace(rows[0], labels=[-100] * len(rows[0].labels))
    return [blank if place is None else rows[place] for place in places]


def run_on_ranks(
    hook: Any, model: Any, generate: Any, samples: Path, ranks: int, size: int = 2, rows: Sequence[Row] = ROWS
) -> list[Any]:
    """Run the hook for each rank in turn; a first pass collects what the second one adds up over the ranks."""
    sums: list[list[float]] = []
    parts: list[Any] = []

    def context(rank: int, sum_over: Callable[[list[float]], list[float]], gather: Any) -> EvalContext:
        def batches(count: int) -> list[list[int | None]]:
            mine: list[int | None] = list(range(rank, count, ranks))
            mine += [None] * (math.ceil(count / ranks) - len(mine))
            return [mine[start : start + size] for start in range(0, len(mine), size)]

        return EvalContext(
            model=model,
            generate=generate,
            examples=rows,
            batches=batches,
            pick=pick,
            collate=collate,
            collate_prompts=collate_prompts,
            decode=text,
            stop_ids=[STOP],
            loss_sum=loss_sum,
            sum_over_ranks=sum_over,
            gather_to_first=gather,
            device=torch.device("cpu"),
            rank=rank,
            step=7,
            samples=samples,
        )

    for rank in range(ranks):
        hook.run(context(rank, lambda values: sums.append(values) or [1.0] * len(values), parts.append))
    total = [sum(values) for values in zip(*sums, strict=True)]
    return [
        hook.run(context(rank, lambda _: total, lambda _, rank=rank: parts if rank == 0 else None))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (1, 5), (2, 2), (3, 1), (8, 2)])
def test_loss_is_the_mean_over_supervised_tokens_however_rows_are_spread(ranks: int, size: int, tmp_path: Path) -> None:
    model = TableModel()
    expected, tokens = model.expected_loss(ROWS)
    for result in run_on_ranks(Loss(every=None), model, None, tmp_path, ranks, size):
        assert result.metrics["loss"] == pytest.approx(expected, abs=1e-6)  # float32 sums of 12 numbers
        assert result.metrics["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)
        assert f"(5 rows, {tokens} tokens)" in result.lines[0]


def test_only_supervised_positions_are_copied_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    plain = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: seen.append(self.shape) or plain(self))
    batch = collate(ROWS)
    loss_sum(torch.zeros(*batch["labels"].shape, VOCABULARY), batch["labels"])
    assert seen == [(13, VOCABULARY)]


def test_blank_batches_and_overflow_give_numbers(tmp_path: Path) -> None:
    labels = torch.full((2, 3), -100)
    assert float(loss_sum(torch.zeros(2, 3, VOCABULARY), labels)) == 0.0
    model = TableModel()
    model.table = torch.full((VOCABULARY, VOCABULARY), 0.0)
    model.table[:, PAD] = 1e5
    (result,) = run_on_ranks(Loss(every=None), model, None, tmp_path, 1)
    assert result.metrics["perplexity"] == math.inf


class Answers:
    """Generates what is written down for a prompt, then stops and fills up."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self.answers = answers
        self.calls = 0

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, max_new_tokens: int
    ) -> torch.Tensor:
        self.calls += 1
        prompts = [[token for token in ids if token != PAD] for ids in input_ids.tolist()]
        new = [self.answers[text(prompt)][:max_new_tokens] for prompt in prompts]
        longest = max(map(len, new))
        return torch.tensor([ids + [PAD] * (longest - len(ids)) for ids in new])


def given(**changed: list[int]) -> dict[str, list[int]]:
    right = {one.prompt: [*one.labels[len(one.prompt_ids) :]] for one in ROWS}
    return right | changed


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_answers_are_counted_once_and_written_before_they_are_scored(ranks: int, tmp_path: Path) -> None:
    wrong_and_endless = given(**{ROWS[0].prompt: [4, 4, STOP], ROWS[1].prompt: [5, 6, 7, 7, 7, 7, 7]})
    generate = Answers(wrong_and_endless)
    hook = Generate(every=None, max_new_tokens=5, max_prompts=100)
    first, *others = run_on_ranks(hook, None, generate, tmp_path / "samples", ranks)
    assert first.metrics == {"exact_match": 0.6, "finished": 0.8}
    assert first.lines == [
        "exact match 0.600 (3 of 5 answers); 1 cut off by eval.generate.max_new_tokens=5; samples/step-7.jsonl"
    ]
    assert all(other.metrics == first.metrics and other.samples == [] for other in others)
    written = [json.loads(line) for line in (tmp_path / "samples" / "step-7.jsonl").read_text().splitlines()]
    assert written == first.samples
    assert [one["prompt"] for one in written] == [one.prompt for one in ROWS]
    assert written[0] == {
        "index": 0,
        "prompt": "cd",
        "expected": "e",
        "generated": "ee",
        "exact": False,
        "finished": True,
    }
    assert generate.calls == 2 * ranks * math.ceil(math.ceil(5 / ranks) / 2), "as many calls on every rank"


def test_the_first_prompts_are_answered_and_white_space_does_not_count(tmp_path: Path) -> None:
    rows = [dataclasses.replace(ROWS[0], answer=" e\n"), *ROWS[1:]]
    hook = Generate(every=None, max_new_tokens=5, max_prompts=2)
    (result,) = run_on_ranks(hook, None, Answers(given()), tmp_path, 1, rows=rows)
    assert result.metrics == {"exact_match": 1.0, "finished": 1.0}
    assert [one["index"] for one in result.samples] == [0, 1]


def test_hooks_are_options_and_importing_them_loads_nothing_heavy() -> None:
    assert {"loss", "generate"} <= set(names("eval"))
    assert option("eval", "loss") is Loss
    code = (
        "import sys, glmexp.config.registry as r; r.names('eval'); r.names('tracker');"
        "print([m for m in ('torch', 'wandb', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
