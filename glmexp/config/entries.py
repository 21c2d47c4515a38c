"""What single entries can be told: part of ``schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from glmexp.config.bounds import Bound, Count, Seconds

GOES_ON = ("train", "trainer")
"""Entries whose runs train.resume takes up again."""
SMOKE_STEPS = 8
"""The least that the gates of entry=smoke can be asked of."""
TRAINS = (*GOES_ON, "smoke")
"""Entries that train what the configuration says, step by step, and leave an artifact."""

SERVES = ("evaluate", "generate", "bench")
"""Entries that ask a base or what was trained, in ``precision.dtype``: an artifact brings its own, and another may be
chosen."""


@dataclass
class InspectSection:
    """What entry=inspect shows."""

    rows: Annotated[int, Bound(low=0)]
    """Examples that are shown token by token."""
    html: str | None
    """Write the same as a page to this file. Null: the terminal only."""


@dataclass
class ExportSection:
    """What entry=export writes."""

    form: Literal["whole", "trained"]
    """whole: the base with what was trained merged into it; trained: only what was trained, as gather=trainable."""
    dtype: Literal["bf16", "fp16", "fp32"] | None
    """Number format of the weights. Null: that of the run (of another's checkpoint: precision.dtype)."""
    layout: Literal["released", "transformers"]
    """Names of parameters: the release's own, or those of transformers' GlmForCausalLM (ChatGLM2 and 3)."""
    max_shard_bytes: Annotated[int, Bound(low=1, unit="bytes")]
    """Largest file of weights; a tensor that is larger has a file of its own."""
    verify: bool
    """Let a fresh process hold logits and greedy answers of the export against those of the artifact."""


@dataclass
class DoctorSection:
    """What entry=doctor tells: what one option means, or whether this machine can run this configuration."""

    explain: str | None
    """Dotted key of an option, such as zero.reduce_bucket_size: its meaning, unit, values, and who set it."""
    json: bool
    """Print the findings, and what they were judged by, as JSON."""
    timeout_s: Seconds | None
    """Seconds that the measured all-reduce of this configuration's ranks may take. Null: it is not measured."""


@dataclass
class TrainerSection:
    """What entry=trainer hands to transformers' Trainer."""

    callbacks: list[str]
    """TrainerCallbacks of your own, module:Class each, on PYTHONPATH or in this folder; made without arguments."""


@dataclass
class SmokeSection:
    """How far entry=smoke goes."""

    steps: Annotated[int, Bound(low=SMOKE_STEPS)]
    """Optimizer steps at most: the first half warms up, gates look at the rest."""
    eval_rows: Count
    """Held-out rows at most that the eval hooks see."""
    parity: bool
    """In place of the short run: losses and gradients of this configuration however it is spread out (parity.*)."""


@dataclass
class ParitySection:
    """Which cells smoke.parity holds against one process."""

    rows: Count
    """Examples of the global batch that every cell learns from; its divisors are the micro batches."""
    ranks: list[Count] | None
    """World sizes. Null: 1, and 2 where the machine has no GPU or at least two."""
    cells: Count | None
    """At most so many cells, spread over all. Null: all of them."""
