"""From the data section to examples: read, hold out, render with the model's chat template, cut to length."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from glmexp.config.errors import ConfigError, DataError, Problem
from glmexp.config.schema import DataSection
from glmexp.data.readers import ReadResult, Row, line_list, read_rows
from glmexp.data.template import Message, Renderer

IGNORED = -100
"""Label of a token that is not learned (the default ignore_index of torch's cross entropy)."""
CUT = " ... "
"""Stands where the middle of an over-long prompt was cut out."""
SHORTEST_PROMPT = 16
"""Characters that must be left of a prompt that is cut: an answer to less than that teaches nothing."""


@dataclass(frozen=True)
class Example:
    """One row, ready for a batch."""

    input_ids: list[int]
    """Prompt, answer and end token."""
    labels: list[int]
    """The ids where they are to be learned, else -100. Not shifted: the loss shifts."""
    prompt_ids: list[int]
    """What a generation starts from."""
    prompt: str
    answer: str
    line: int
    """Line of the source file."""

    @property
    def supervised_tokens(self) -> int:
        """Tokens that count in the loss. The first token of a row has nothing before it to be predicted from."""
        return sum(label != IGNORED for label in self.labels[1:])

    def blank(self) -> Example:
        """The same row without anything to learn: it fills a place in a batch and has no weight."""
        return replace(self, labels=[IGNORED] * len(self.labels))


@dataclass(frozen=True)
class Prepared:
    """All rows of a run."""

    train: list[Example]
    eval: list[Example]
    report: list[str]
    """Lines for the log: what was read, used, dropped, cut and held out."""
    sha256: dict[str, str]
    """Fingerprint of each file that was read."""


def prepare(config: DataSection, seed: int, renderer: Renderer, *, train: bool = True) -> Prepared:
    """Read, hold out and render. ``train=False`` (entry=evaluate) makes the held-out rows alone.

    Raises DataError for files that cannot be used and for files whose rows are all too long, ConfigError where no
    file is named.
    """
    if train and config.train_file is None:
        raise ConfigError(Problem("data.train_file", "is not set", "name a JSON array or JSON lines file"))
    assert config.eval_file is None or config.holdout is None, "data.eval_file and data.holdout are both set"
    report: list[str] = []
    files: list[ReadResult] = []
    train_rows: list[Row] = []
    eval_rows: list[Row] = []
    held_from = config.eval_file
    if config.train_file is not None and (train or config.holdout is not None):
        result = _read(config.train_file, config, report, files)
        train_rows = result.rows
        if config.holdout is not None:
            train_rows, eval_rows = _hold_out(result, config.holdout, seed)
            held_from = result.path
            report.append(f"{result.path}: {len(eval_rows)} rows held out, {len(train_rows)} left to train on")
    if config.eval_file is not None:
        eval_rows = _read(config.eval_file, config, report, files).rows
    if not train and not eval_rows:
        raise ConfigError(Problem("data.eval_file", "is not set: there are no held-out rows", "name a file with rows"))
    train_name = config.train_file or ""
    return Prepared(
        train=_render(train_name, train_rows, config.max_length, renderer, report) if train else [],
        eval=_render(held_from or "", eval_rows, config.max_length, renderer, report) if eval_rows else [],
        report=report,
        sha256={file.path: file.sha256 for file in files},
    )


def _read(path: str, config: DataSection, report: list[str], files: list[ReadResult]) -> ReadResult:
    result = read_rows(path, config.columns)
    files.append(result)
    report.append(result.report())
    return result


def _hold_out(result: ReadResult, count: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Draw ``count`` rows by the seed; both parts keep the order of the file."""
    rows = result.rows
    if count >= len(rows):
        raise DataError(
            Problem(
                "data.holdout",
                f"{count} rows cannot be held out of the {len(rows)} of {result.path}: none would be left to train on",
                f"set it to at most {len(rows) - 1}" if len(rows) > 1 else "name a data.eval_file",
            )
        )
    drawn = set(random.Random(f"holdout {seed}").sample(range(len(rows)), count))
    kept = [row for index, row in enumerate(rows) if index not in drawn]
    return kept, [rows[index] for index in sorted(drawn)]


def _render(path: str, rows: list[Row], max_length: int, renderer: Renderer, report: list[str]) -> list[Example]:
    examples: list[Example] = []
    cut: list[int] = []
    too_long: list[int] = []
    for row in rows:
        example = _example(row, row.prompt, renderer)
        if len(example.input_ids) > max_length:
            shorter = _cut(row, max_length, renderer)
            if shorter is None:
                too_long.append(row.line)
                continue
            cut.append(row.line)
            example = shorter
        examples.append(example)
    assert len(examples) + len(too_long) == len(rows), f"{path}: rows were lost while they were rendered"
    over = f"longer than data.max_length={max_length} tokens"
    if cut:
        report.append(f"{path}: {len(cut)} of {len(rows)} rows {over}: the prompt is cut ({line_list(cut)})")
    if too_long:
        report.append(
            f"{path}: {len(too_long)} of {len(rows)} rows {over} by their answer: dropped ({line_list(too_long)})"
        )
    if not examples:
        raise DataError(
            Problem(path, f"all {len(rows)} rows are {over} by their answer", "raise data.max_length, or shorten them")
        )
    return examples


def _example(row: Row, prompt: str, renderer: Renderer) -> Example:
    question: list[Message] = [{"role": "user", "content": prompt}]
    ids, supervised = renderer.train([*question, {"role": "assistant", "content": row.answer}])
    assert len(ids) == len(supervised), "the chat template gives one flag for each id"
    labels = [token if learned else IGNORED for token, learned in zip(ids, supervised, strict=True)]
    example = Example(ids, labels, renderer.prompt(question), prompt, row.answer, row.line)
    assert example.supervised_tokens > 0, f"line {row.line}: the chat template leaves nothing of the answer to learn"
    return example


def _cut(row: Row, max_length: int, renderer: Renderer) -> Example | None:
    """Cut characters out of the middle of the prompt until the row fits: the task stands at its start or its end.

    The answer and its end token stay whole. None where too little of the prompt would be left.
    """
    best: Example | None = None
    low, high = SHORTEST_PROMPT, len(row.prompt) - len(CUT) - 1
    # Binary search over the characters kept. The number of tokens is not strictly monotone in it (a cut can split a
    # merge), so each candidate that is taken was itself measured.
    while low <= high:
        keep = (low + high) // 2
        head = (keep + 1) // 2
        candidate = _example(row, row.prompt[:head] + CUT + row.prompt[len(row.prompt) - (keep - head) :], renderer)
        if len(candidate.input_ids) <= max_length:
            best, low = candidate, keep + 1
        else:
            high = keep - 1
    return best
