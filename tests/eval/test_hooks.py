"""Hooks against a model that is a table of logits: every number can be worked out by hand."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glmexp.config.errors import DataError
from glmexp.config.registry import names, option
from glmexp.engine.loss import loss_sum
from glmexp.eval.answers import answer_all, example_key, write_lines
from glmexp.eval.cmrc import Cmrc
from glmexp.eval.generate import Generate
from glmexp.eval.hook import EvalContext
from glmexp.eval.loss import Loss
from glmexp.eval.prompts import Prompt, read_prompts
from glmexp.eval.rouge import Rouge

PAD, STOP, VOCABULARY = 0, 1, 8


@dataclass(frozen=True)
class Row:
    input_ids: list[int]
    labels: list[int]
    prompt_ids: list[int]
    prompt: str
    answer: str
    id: str | None = None

    @property
    def answers(self) -> list[str]:
        return [self.answer]


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
    ids = torch.tensor([[PAD] * (length - len(one.prompt_ids)) + list(one.prompt_ids) for one in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "position_ids": torch.zeros_like(ids)}


def pick(rows: Sequence[Any], places: Sequence[int | None]) -> list[Any]:
    blank = (
        rows[0] if isinstance(rows[0], Prompt) else dataclasses.replace(rows[0], labels=[-100] * len(rows[0].labels))
    )
    return [blank if place is None else rows[place] for place in places]


def run_on_ranks(
    hook: Any, model: Any, generate: Any, samples: Path, ranks: int, size: int = 2, rows: Sequence[Row] = ROWS
) -> list[Any]:
    """Run the hook for each rank in turn; first passes collect what the last one gathers and adds up over the ranks."""
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
            encode_prompt=lambda messages: [ord(sign) - ord("a") for sign in messages[-1]["content"]],
            answered={},
        )

    ones: Callable[[list[float]], list[float]] = lambda values: [1.0] * len(values)  # noqa: E731
    for rank in range(ranks):
        hook.run(context(rank, ones, parts.append))
    for rank in range(ranks):
        collect: Callable[[list[float]], list[float]] = lambda values: sums.append(values) or ones(values)  # type: ignore[func-returns-value]  # noqa: E731
        hook.run(context(rank, collect, lambda _, rank=rank: parts if rank == 0 else None))
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
    scores = [json.loads(line) for line in (tmp_path / "loss-scores-step-7.jsonl").read_text().splitlines()]
    assert [one["index"] for one in scores] == [0, 1, 2, 3, 4]
    assert [one["example"] for one in scores] == [example_key(one.prompt, one.answer) for one in ROWS]
    for one, row_of in zip(scores, ROWS, strict=True):
        loss, count = model.expected_loss([row_of])
        assert (one["loss"], one["tokens"]) == (pytest.approx(loss, abs=1e-6), count)


def test_logits_of_one_batch_at_a_time_are_alive(tmp_path: Path) -> None:
    """Memory does not grow with the number of rows: what is kept of a batch is its sum."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Watched(TableModel):
        def __call__(self, **inputs: Any) -> SimpleNamespace:
            nonlocal most
            most = max(most, sum(ref() is not None for ref in alive))
            output = super().__call__(**inputs)
            alive.append(weakref.ref(output.logits))
            return output

    run_on_ranks(Loss(every=None), Watched(), None, tmp_path, 1, size=1, rows=list(ROWS) * 20)
    assert len(alive) == 3 * 100
    assert most == 0


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
    hook = Generate(every=None, max_new_tokens=5, max_prompts=100, prompts_file=None)
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
    assert generate.calls == 3 * ranks * math.ceil(math.ceil(5 / ranks) / 2), "as many calls on every rank"


def test_the_first_prompts_are_answered_and_white_space_does_not_count(tmp_path: Path) -> None:
    rows = [dataclasses.replace(ROWS[0], answer=" e\n"), *ROWS[1:]]
    hook = Generate(every=None, max_new_tokens=5, max_prompts=2, prompts_file=None)
    (result,) = run_on_ranks(hook, None, Answers(given()), tmp_path, 1, rows=rows)
    assert result.metrics == {"exact_match": 1.0, "finished": 1.0}
    assert [one["index"] for one in result.samples] == [0, 1]


def test_a_table_shows_each_answer_over_the_steps(tmp_path: Path) -> None:
    hook = Generate(every=None, max_new_tokens=5, max_prompts=2, prompts_file=None)
    write_lines(tmp_path / "step-0.jsonl", [{"prompt": "cd", "expected": "e", "generated": "first"}])
    run_on_ranks(hook, None, Answers(given()), tmp_path, 1)
    table = list(csv.reader((tmp_path / "answers.csv").read_text(encoding="utf-8-sig").splitlines()))
    assert table == [["prompt", "expected", "step 0", "step 7"], ["cd", "e", "first", "e"], ["c", "fgh", "", "fgh"]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_prompts_of_a_file_are_answered_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "cd", "answer": "e"}\n\n{"messages": [{"role": "user", "content": "h"}]}\n{"prompt": "c"}\n'
    )
    hook = Generate(every=None, max_new_tokens=5, max_prompts=100, prompts_file=str(file))
    first, *_ = run_on_ranks(hook, None, Answers(given()), tmp_path / "samples", ranks, size=1)
    assert first.metrics == {"exact_match": 1.0, "finished": 1.0}
    assert [(one["prompt"], one["expected"], one["generated"]) for one in first.samples] == [
        ("cd", "e", "e"),
        ("h", "", "h"),
        ("c", "", "fgh"),
    ]


def test_a_broken_prompts_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "cd"}\n{"question": "x"}\n')
    with pytest.raises(
        DataError, match=r"prompts\.jsonl:2: no prompt: no text 'prompt' and no 'messages' among its columns que"
    ):
        read_prompts(str(file), lambda messages: [1])
    for line, said in (
        ("[1]", "must be a JSON object"),
        ('{"messages": [7]}', "'role' and 'content'"),
        ("{", "broken JSON"),
    ):
        file.write_text(line)
        with pytest.raises(DataError, match=rf"prompts\.jsonl:1: .*{said}"):
            read_prompts(str(file), lambda messages: [1])
    file.write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(DataError, match="not UTF-8"):
        read_prompts(str(file), lambda messages: [1])
    file.write_text("\n")
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(str(file), lambda messages: [1])


def test_the_shipped_prompts_can_be_read() -> None:
    prompts = read_prompts("builtin:prompts.jsonl", lambda messages: [len(messages)])
    assert len(prompts) == 24
    assert sum(bool(one.answer) for one in prompts) >= 5


@pytest.mark.parametrize("ranks", [1, 3])
def test_overlap_scores_are_means_over_all_answers_and_written(ranks: int, tmp_path: Path) -> None:
    empty = given(**{ROWS[1].prompt: [STOP]})
    hook = Rouge(every=None, max_new_tokens=5, max_prompts=100)
    first, *_ = run_on_ranks(hook, None, Answers(empty), tmp_path, ranks)
    assert first.metrics["rouge1_char"] == pytest.approx(0.8)
    assert first.metrics["bleu4_word"] == pytest.approx(0.8)
    assert "5 answers, 1 of them empty" in first.lines[0]
    rows = [json.loads(line) for line in (tmp_path / "rouge-scores-step-7.jsonl").read_text().splitlines()]
    assert [one["rouge1_char"] for one in rows] == [1, 0, 1, 1, 1]
    assert [one["example"] for one in rows] == [example_key(one.prompt, one.answer) for one in ROWS]


def test_two_hooks_generate_the_same_answers_once(tmp_path: Path) -> None:
    generate = Answers(given())
    shared: dict[Any, Any] = {}
    context = SimpleNamespace(
        batches=lambda count: [list(range(count))], pick=pick, collate_prompts=collate_prompts, generate=generate,
        device=torch.device("cpu"), stop_ids=[STOP], decode=text, answered=shared,
    )  # fmt: skip
    first = answer_all(context, ROWS, 5, 5)  # type: ignore[arg-type]
    assert answer_all(context, ROWS, 5, 5) == first  # type: ignore[arg-type]
    assert generate.calls == 1


def test_questions_are_scored_in_percent_and_predictions_kept_in_the_official_form(tmp_path: Path) -> None:
    rows = [dataclasses.replace(one, id=f"Q{number}") for number, one in enumerate(ROWS)]
    hook = Cmrc(every=None, max_new_tokens=5, max_prompts=None)
    (result,) = run_on_ranks(hook, None, Answers(given(**{ROWS[1].prompt: [STOP]})), tmp_path, 1, rows=rows)
    assert result.metrics == {"f1": pytest.approx(80), "em": pytest.approx(80)}
    scores = [json.loads(line) for line in (tmp_path / "cmrc-scores-step-7.jsonl").read_text().splitlines()]
    assert [(one["f1"], one["em"]) for one in scores] == [(100, 100), (0, 0), (100, 100), (100, 100), (100, 100)]
    assert [one["example"] for one in scores] == [example_key(one.prompt, one.answer) for one in rows]
    official = json.loads((tmp_path / "cmrc-step-7.json").read_text())
    assert official == {"Q0": "e", "Q1": "", "Q2": "cc", "Q3": "h", "Q4": "g"}


def test_hooks_are_options_and_importing_them_loads_nothing_heavy() -> None:
    assert {"loss", "generate", "rouge", "cmrc"} <= set(names("eval"))
    assert option("eval", "loss") is Loss
    code = (
        "import sys, glmexp.config.registry as r; r.names('eval'); r.names('tracker');"
        "print([m for m in ('torch', 'wandb', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
