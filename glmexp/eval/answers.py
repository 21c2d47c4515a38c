"""Answers of the model to prompts, over all ranks: what the hooks that score texts share."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glmexp.eval.hook import EvalContext


@dataclass(frozen=True)
class Sample:
    """One generated answer, as it stands in ``samples/``."""

    index: int
    """Place among the prompts, from 0."""
    prompt: str
    expected: str
    generated: str
    exact: bool
    """Equal but for white space at both ends."""
    finished: bool
    """The model ended its answer itself, within max_new_tokens."""


def example_key(prompt: str, answer: str) -> str:
    """16 hexadecimal digits that name a held-out example in any run, whatever its place: for paired comparisons."""
    return hashlib.sha256(json.dumps([prompt, answer]).encode()).hexdigest()[:16]


def answer_all(context: EvalContext, examples: Sequence[Any], count: int, max_new_tokens: int) -> list[Sample]:
    """This rank's answers to the first ``count`` examples. Every rank calls the model equally often.

    Within one evaluation the same prompts are answered once, whichever hooks ask.
    """
    import torch

    key = (id(examples), count, max_new_tokens)
    if key in context.answered:
        return context.answered[key]
    answers: list[Sample] = []
    stops = set(context.stop_ids)
    with torch.no_grad():
        for places in context.batches(count):
            batch = context.collate_prompts(context.pick(examples, places))
            new_ids = context.generate(
                input_ids=batch["input_ids"].to(context.device),
                attention_mask=batch["attention_mask"].to(context.device),
                position_ids=batch["position_ids"].to(context.device),
                max_new_tokens=max_new_tokens,
            )
            # Blank places were generated for too, so that all ranks do the same; here they end.
            for place, ids in zip(places, new_ids.tolist(), strict=True):
                if place is not None:
                    answers.append(_sample(context, examples[place], place, ids, stops))
    context.answered[key] = answers
    return answers


def _sample(context: EvalContext, example: Any, index: int, ids: Sequence[int], stops: set[int]) -> Sample:
    # -100 fills arrays up in some libraries, and no tokenizer can decode it.
    ids = [token for token in ids if token >= 0]
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    text = context.decode(list(ids[:end]))
    exact = text.strip() == example.answer.strip()
    return Sample(index, example.prompt, example.answer, text, exact, end is not None)


def gathered(context: EvalContext, mine: list[Sample], count: int, file: str) -> list[Sample] | None:
    """All ranks' answers in order on rank 0, None elsewhere; written to ``samples/<file>`` before anything else."""
    parts = context.gather_to_first(mine)
    if parts is None:
        return None
    samples = sorted((one for part in parts for one in part), key=lambda one: one.index)
    assert [one.index for one in samples] == list(range(count)), "each prompt is answered once over all ranks"
    write_lines(context.samples / file, [asdict(one) for one in samples])
    return samples


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line; a file of the same name is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def write_table(folder: Path, prefix: str, table: str) -> None:
    """``<table>.csv``: a prompt a row and a step a column, from the ``<prefix>step-<n>.jsonl`` files of the folder."""
    steps = sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{prefix}step-*.jsonl"))
    columns = []
    for step in steps:
        # Not splitlines(): U+2028 and U+0085 stand in answers.
        lines = (folder / f"{prefix}step-{step}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        columns.append([json.loads(line) for line in lines])
    rows = max(columns, key=len)
    # utf-8-sig: spreadsheet programs take a file without the mark for the system's code page.
    with (folder / f"{table}.csv").open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["prompt", "expected", *(f"step {step}" for step in steps)])
        for index, row in enumerate(rows):
            texts = [column[index]["generated"] if index < len(column) else "" for column in columns]
            writer.writerow([row["prompt"], row["expected"], *texts])
