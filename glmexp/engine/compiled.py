"""torch.compile on each block of the network: one small graph for all of them, not one large one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WORTHWHILE_PARAMETERS = 1_000_000_000
"""Below this a step is too short to win back the half minute that compiling takes."""
VARYING = r".*'(cu_seq_lens|max_length)_[qk]'\]"
"""Of what a block is given, as dynamo names it: the numbers that differ from batch to batch of packed rows, whose
shape is always the same. Not told so, dynamo takes the first batch's for fixed and compiles again at the second."""


def wanted(setting: bool | None, packed: bool, cut: bool, parameters: int) -> bool:
    """Whether blocks are compiled: as set, else on a GPU for packed rows (few shapes) of a large network.

    Not by itself where hooks on every module ``cut`` the graph into pieces (``ds_config.cuts_blocks``).
    """
    if setting is not None:
        return setting
    return torch.cuda.is_available() and packed and not cut and parameters >= WORTHWHILE_PARAMETERS


def compile_blocks(network: Any, backend: str = "inductor") -> int:
    """Compile the training forward of each block of ``network`` (a transformers model). Returns how many.

    Evaluation and generation go the plain way: their lengths differ from call to call, and each would be compiled.
    Blocks share their code, and their weights are arguments of the graph: it is compiled once, and once more for the
    first block where its input needs no gradient. Batches of one shape are up to who makes them
    (``data.loader.Batches.of_one_length``).
    """
    known = torch.compiler.config.dynamic_sources
    if VARYING not in known:
        torch.compiler.config.dynamic_sources = f"{known},{VARYING}" if known else VARYING
    found = blocks(network)
    for block in found:
        block.forward = _in_training(block, block.forward, torch.compile(block.forward, backend=backend))
    return len(found)


def blocks(network: Any) -> list[nn.Module]:
    """The transformer blocks of a transformers model."""
    kinds = set(network._no_split_modules or ())
    found = [module for module in network.modules() if type(module).__name__ in kinds]
    assert found, f"{type(network).__name__} names no blocks (_no_split_modules)"
    return found


def _in_training(block: nn.Module, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if block.training else plain)(*args, **kwargs)

    return forward
