"""fp16's configuration and loss scale at every stage.

DeepSpeed's CPU accelerator says that it has no fp16 (rules.py refuses it for users). CPUs can compute in it all the
same, slowly: with that answer changed, the path of a GPU run is taken, and its numbers must be those of fp32.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.cells import Trace, all_stages, configure, engine_loop
from tests.ranks import run_on_ranks


def _train(cells: list[list[str]], folder: str) -> list[Trace]:
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True
    return [
        engine_loop(configure("model=tiny", "optim.lr=1e-3", *words, gpus=1), f"{folder}/{number}")
        for number, words in enumerate(cells)
    ]


@pytest.mark.parametrize("stages", [(0,), pytest.param((2, 3), marks=pytest.mark.matrix)])
def test_fp16_trains_as_fp32_does(stages: tuple[int, ...], tmp_path: Path) -> None:
    """Loss 2e-3 and gradient norm 1 %: fp16 has 11 bits. A forgotten loss scale would be a factor of 1,024, and Adam's
    steps before the first (see build.py) cost 4e-3 by the second step."""
    half = ["precision=fp16", "precision.initial_scale_power=10"]
    cells = [["precision=fp32"], *([f"zero=stage{stage}", *half] for stage in stages)]
    exact, *traces = run_on_ranks(_train, cells, str(tmp_path), folder=tmp_path)[0]
    for stage, trace in zip(stages, traces, strict=True):
        assert trace.losses == pytest.approx(exact.losses, abs=2e-3), stage
        assert trace.grad_norms == pytest.approx(exact.grad_norms, rel=0.01), stage


def test_bf16_differs_from_fp32_alike_at_every_stage(tmp_path: Path) -> None:
    """bf16 has 8 bits: 2e-2 of a loss of 3.1 (9e-3 was measured after 5 steps).

    Stage 0 takes another optimizer of DeepSpeed's than stages 1 to 3.
    """
    words = ["model=tiny", "optim.lr=1e-3"]
    traces, _ = run_on_ranks(all_stages, [*words, "precision=bf16"], ["trainable"], str(tmp_path), folder=tmp_path)
    (exact,), _ = run_on_ranks(_train, [["precision=fp32"]], str(tmp_path / "fp32"), folder=tmp_path)
    for stage, trace in traces.items():
        assert trace.losses == pytest.approx(exact.losses, abs=2e-2), stage
