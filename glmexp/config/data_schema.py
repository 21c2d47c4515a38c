"""The section that says which rows are learned, and how they become batches (see ``schema``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from glmexp.config.bounds import Bound, Count


@dataclass
class Columns:
    """Names of the columns in the data files. Null: found from the rows."""

    prompt: str | None
    """The instruction or question (alpaca, adgen)."""
    input: str | None
    """Further material, set below the prompt (alpaca, adgen)."""
    answer: str | None
    """What is to be learned (alpaca, adgen)."""
    system: str | None
    """System text of the row (all but cmrc2018 and squad)."""
    history: str | None
    """Earlier turns: a list of [question, answer] pairs, or of messages (alpaca, adgen)."""
    messages: str | None
    """The list of turns (sharegpt, messages)."""
    tools: str | None
    """Descriptions of the tools that the assistant may call: a list, or JSON text (sharegpt, messages)."""


Format = Literal["alpaca", "adgen", "sharegpt", "messages", "cmrc2018", "squad"]


@dataclass
class DataSection:
    """Training and held-out rows."""

    name: str
    """Which option this is (set by the option's YAML file)."""
    train_file: str | None
    """JSON, JSON lines, CSV or Parquet; hub:OWNER/NAME[:CONFIG]:SPLIT; builtin:<name> for the shipped demo."""
    eval_file: str | None
    """Held-out rows. Setting train_file alone drops the option's own eval_file."""
    holdout: Count | None
    """Without an eval_file: this many rows, drawn by train.seed, are held out of train_file."""
    format: Format | None
    """What a row looks like. Null: found for each row, and said."""
    columns: Columns
    """Column names, where they are not the usual ones."""
    encoding: str | None
    """Text encoding of JSON and CSV files, such as gb18030. Null: UTF-8, with or without a byte order mark."""
    on_error: Literal["error", "skip"]
    """A broken line or a value that is no text: stop and name it, or leave the row out and count it."""
    max_length: Annotated[int, Bound(low=8)]
    """Tokens of a row, prompt and answer with its end token."""
    supervise: Literal["last", "all"]
    """In conversations: learn the last answer, or every answer of the assistant."""
    packing: bool
    """Fill rows of max_length tokens with several examples, which do not see each other."""
    shuffle: bool
    """New order in each epoch. False: the file's order."""
    group_by_length: bool
    """Put rows of similar length into the same batch; batches come in random order."""
    num_workers: Annotated[int, Bound(low=0)] | None
    """Threads that make batches ahead of the training loop. Null: 1 on machines with 2 cores a rank, else 0."""
    prefetch: Count
    """Optimizer steps whose batches are made ahead, with num_workers above 0."""
    prepare_workers: Count | None
    """Processes that read and tokenize large files. Null: one a core, at most 8."""
    cache_dir: str | None
    """Folder of prepared data. Null: prepared in each run anew."""
