"""States that are kept on the host and pass through the GPU: the bits of a run without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from glmexp.config import memory
from glmexp.engine import build, passing, states
from glmexp.engine.passing import Lane
from tests.engine.cells import _engine, _train, configure, rows
from tests.ranks import run_on_ranks

STEPS = 3
CLIPPED = ["method=full", "zero=stage2", "optim.max_grad_norm=0.05", "optim.weight_decay=0.1"]
PASSING = ["offload=optimizer", "offload.adam=gpu"]


class LateLane(Lane):
    """Copies as late as they may be: each when somebody waits for it, or for one behind it."""

    def __init__(self) -> None:
        self.left: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self.done = 0

    def piece(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        self.left.append((target, source, after))
        return self, self.done + len(self.left)

    def wait(self, number: int | None = None) -> None:
        while self.left and (number is None or self.done < number):
            target, source, after = self.left.pop(0)
            self.done += 1
            self.hold(after)
            target.copy_(source)

    @staticmethod
    def hold(event: Any) -> None:
        if event is not None:
            lane, number = event
            lane.wait(number)


def both_ways(precisions: tuple[str, ...]) -> list[list[tuple[list[float], list[float], dict[str, torch.Tensor], int]]]:
    """By precision, without offload and with states that pass: losses, norms, weights and states, groups."""
    memory.GROUP_ELEMENTS = memory.PASSING_ELEMENTS = 40_000  # in this process alone: more groups than places
    results = [[_trained(f"precision={one}", *more) for more in ([], PASSING)] for one in precisions]
    passing.Lane, passing.PIECE = LateLane, 7_000
    results[0].append(_trained(f"precision={precisions[0]}", *PASSING, "offload.gpu_places=3"))
    return results


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
    """Two ranks, two micro batches a step, gradients clipped to a twentieth of what they are; also with each copy
    as late as the order between them allows."""
    for results in run_on_ranks(both_ways, ("bf16", "fp32"), folder=tmp_path):
        for plain, *others in results:
            assert plain[3] > memory.GPU_PLACES
            for other in others:
                assert other[:2] == plain[:2]
                assert other[2].keys() == plain[2].keys()
                for name, one in plain[2].items():
                    assert torch.equal(other[2][name], one), name
