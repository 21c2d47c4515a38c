"""What single entries can be told: part of ``schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from glmexp.config.bounds import Bound, Count, Seconds, Seed

GOES_ON = ("train", "trainer")
"""Entries whose runs train.resume takes up again."""
SMOKE_STEPS = 8
"""The least that the gates of entry=smoke can be asked of."""
TRAINS = (*GOES_ON, "smoke")
"""Entries that train what the configuration says, step by step, and leave an artifact."""

PLANS = (*TRAINS, "plan")
"""Entries that read what a training run reads."""

SERVES = ("evaluate", "generate", "bench")
"""Entries that ask a base or what was trained, in ``precision.dtype``: an artifact brings its own, and another may be
chosen."""

TRAINING = ("train", "optim", "zero", "offload", "gather", "deepspeed")
"""Sections of training: a model that answers has none of it."""

OWN: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("inspect", "export", "generate", "bench", "doctor", "plan", "trainer", "smoke")},
    **{"parity": ("smoke",), "placement": SERVES, "decoding": SERVES},
}
"""Section of single entries to those: elsewhere its keys are refused."""

_TELLS = (*PLANS, "doctor")
_ROWS = (*_TELLS, "inspect")
_READERS: dict[str, tuple[str, ...] | None] = {
    **OWN,
    **dict.fromkeys(TRAINING, _TELLS),
    **dict.fromkeys(("train.micro_batch_size", "train.grad_accum"), _ROWS),
    **dict.fromkeys(("data.packing", "data.shuffle", "data.group_by_length"), _ROWS),
    "train.seed": None,
    "plan.enforce": TRAINS,
    "artifact.path": ("plan", "doctor", "inspect", "export", *SERVES),
}
"""Key or section to the entries that read it; None: every one."""


def readers(key: str) -> tuple[str, ...] | None:
    """Entries that read the option at dotted ``key``; None where that is not a matter of the entry."""
    section, leaf = key.split(".")[0], key.rsplit(".", 1)[-1]
    if (section == "eval" and leaf == "every") or (key.startswith("precision.") and leaf != "dtype"):
        return _TELLS
    return _READERS[key if key in _READERS else section] if {key, section} & _READERS.keys() else None


def reads(entry: str, key: str) -> bool:
    """Whether ``entry`` reads the option at dotted ``key``."""
    named = readers(key)
    return named is None or entry in named


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
class GenerateSection:
    """What entry=generate answers, and how."""

    prompts_file: str | None
    """JSON, JSON lines, CSV or Parquet with prompt (or messages), and perhaps system, history, answer;
    builtin:prompts.jsonl is shipped. Null: a chat at the terminal, or with the lines of a pipe."""
    output: str | None
    """File for the answers, one JSON object a line. Null: answers.jsonl in the run folder."""
    system: str | None
    """System text of conversations that bring none."""
    batch_size: Count
    """Prompts of the file that a rank answers at once."""
    max_length: Count
    """Tokens of prompt and answer together: so many keys and values a row are made room for. Earlier turns that do not
    fit beside max_new_tokens are left out, the oldest first; a question that does not fit alone is refused."""
    max_new_tokens: Count
    """Tokens of an answer at most, its end token among them."""
    temperature: Annotated[float, Bound(above=0)] | None
    """Tokens are drawn, from scores divided by this. Null: the likeliest token is taken."""
    top_p: Annotated[float, Bound(above=0, high=1)] | None
    """Draw from the fewest tokens whose probabilities add up to this. Null: from all."""
    top_k: Count | None
    """Draw from the so many likeliest tokens. Null: from all."""
    repetition_penalty: Annotated[float, Bound(above=0)] | None
    """Above 1: what was said already, in prompt or answer, is less likely. Null: off, also where the checkpoint's
    generation_config.json has one."""
    seed: Seed
    """Seed of what is drawn."""


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
class PlanSection:
    """What entry=plan is told of a machine, and whether training heeds the plan."""

    gpu: str | None
    """A card: an amount of memory such as 24GB, or a name such as H100. Null: this machine's; without one no limit."""
    host_memory: str | None
    """Memory of a host, such as 256GB. Null: this machine's where plan.gpu is null, else no limit."""
    search: bool
    """Look for the fastest configuration that fits, with the same global batch and method."""
    json: bool
    """Print the plan as JSON."""
    enforce: bool
    """In training: refuse a run that cannot fit by plan before its weights are loaded. False: only say so."""


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
