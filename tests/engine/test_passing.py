"""States that are kept on the host and pass through the GPU: the bits of a run without offload."""

from __future__ import annotations

from pathlib import Path

import torch

from glmexp.config import memory
from glmexp.engine import build, states
from tests.engine.cells import _engine, _train, configure, rows
from tests.ranks import run_on_ranks

STEPS = 3
CLIPPED = ["method=full", "zero=stage2", "optim.max_grad_norm=0.05", "optim.weight_decay=0.1"]
PASSING = ["offload=optimizer", "offload.adam=gpu"]


def both_ways(precisions: tuple[str, ...]) -> list[list[tuple[list[float], list[float], dict[str, torch.Tensor], int]]]:
    """By precision, without offload and with states that pass: losses, norms, weights and states, groups."""
    memory.GROUP_ELEMENTS = memory.PASSING_ELEMENTS = 40_000  # in this process alone: more groups than places
    return [[_trained(f"precision={one}", *more) for more in ([], PASSING)] for one in precisions]


def _trained(*words: str) -> tuple[list[float], list[float], dict[str, torch.Tensor], int]:
    config = configure(*CLIPPED, *words)
    engine = _engine(config, STEPS)
    losses, norms = _train(engine, config, *rows(config), STEPS)
    kept = {f"weight {name}": p.detach().clone() for name, p in build.trainable(engine.module)}

    def keep(piece: states.Piece) -> None:
        kept.update({f"{kind} {piece.name} {piece.offset}": one.clone() for kind, one in piece.tensors.items()})

    states.read(engine, keep)
    groups = len(engine.optimizer.bit16_groups)
    engine.destroy()
    return losses, norms, kept, groups


def test_states_that_pass_through_the_gpu_are_those_of_a_run_without_offload(tmp_path: Path) -> None:
    """Two ranks, two micro batches a step, gradients clipped to a twentieth of what they are."""
    for results in run_on_ranks(both_ways, ("bf16", "fp32"), folder=tmp_path):
        for plain, passing in results:
            assert plain[3] > memory.GPU_PLACES
            assert passing[:2] == plain[:2]
            assert passing[2].keys() == plain[2].keys()
            for name, one in plain[2].items():
                assert torch.equal(passing[2][name], one), name
