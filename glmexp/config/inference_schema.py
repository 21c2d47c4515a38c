"""Where and how the entries that ask a model compute: part of ``schema``. Nothing here is read in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from glmexp.config.bounds import Bound, Count


@dataclass
class PlacementSection:
    """Where a network lies under entry=evaluate, generate and bench."""

    name: Literal["single", "layers", "tensor_parallel"]
    """single: whole on each rank's device; layers: block by block over the GPUs, CPU memory and a disk, one rank;
    tensor_parallel: each rank has a share of every layer."""
    gpu_bytes: Annotated[int, Bound(low=1, unit="bytes")] | None
    """layers: most bytes of weights on each GPU. Null: spread evenly, within what is free."""
    cpu_bytes: Annotated[int, Bound(low=1, unit="bytes")] | None
    """layers: most bytes of weights in CPU memory. Null: what is free."""
    disk_folder: str | None
    """layers: folder for blocks that fit nowhere else. Null: that they do not fit is an error."""
    peer_sums: bool
    """tensor_parallel: sum a token's hidden states by a kernel that writes into the other GPUs' memory, where a trial
    at the start shows that it is right there; else, and with false, by NCCL. The terminal says which, and why."""


@dataclass
class DecodingSection:
    """How tokens are written under entry=evaluate, generate and bench."""

    way: Literal["plain", "static", "graph", "compiled"] | None
    """plain: generate of transformers; static: over a cache of fixed size; graph: that, recorded as one CUDA graph a
    token; compiled: blocks compiled before. Null: on a GPU compiled from 1e9 parameters on and graph below, else
    plain."""


@dataclass
class BenchSection:
    """What entry=bench measures: every prompt length with every batch size."""

    prompt_lengths: list[Count]
    """Tokens of a prompt."""
    batch_sizes: list[Count]
    """Prompts that are answered at a time, all of one length."""
    new_tokens: Annotated[int, Bound(low=2)]
    """Tokens of an answer at most: an end token ends it earlier, and what was written is counted."""
    runs: Count
    """Measured generations of each; median, least and most are shown."""
    warm_up: Count
    """Generations before, which also compile and record."""
    plain: bool
    """Also time generate of transformers on the same network, in turns with ours."""
