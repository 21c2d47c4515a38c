"""The plan's states equal, byte for byte, the tensors that a real DeepSpeed engine holds on each rank."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.plan.counting import METHODS, MODELS, PLACES, Cell, cell, compared
from tests.ranks import run_on_ranks

SOME = [
    cell("tiny", "method=full", "2", "bf16", 2),
    cell("tiny_qwen2", "method=full", "3 plain", "bf16", 1),
    cell("tiny_chatglm2", "method=lora", "3", "bf16", 1),
    cell("tiny_chatglm", "method=freeze", "2 optimizer", "bf16", 2),
    cell("tiny_qwen2", "method=lora", "3 all", "bf16", 1),
    cell("tiny", "method=full", "2 passing", "bf16", 2),
    (*cell("tiny", "method=lora", "2", "bf16", 1), "precision.base=fp8"),
    (*cell("tiny_qwen2", "method=freeze", "1", "bf16", 1), "precision.base=fp8", "precision.base_transposed=false"),
]


def _differences(cells: list[Cell], ranks: int, folder: Path) -> list[str]:
    found = run_on_ranks(compared, cells, folder=folder, ranks=ranks, timeout_s=1500)
    return [
        f"rank {rank} of {ranks}, {' '.join(one)}: {name} planned {planned}, counted {counted}"
        for rank, results in enumerate(found)
        for one, numbers in results
        for name, (planned, counted) in numbers.items()
        if planned != counted
    ]


def test_states_are_exact_on_two_ranks(tmp_path: Path) -> None:
    assert not _differences(SOME, 2, tmp_path)


def test_trained_weights_that_stay_whole_are_counted_on_one_rank(tmp_path: Path) -> None:
    """Only LoRA on Qwen2 has small trained tensors beside larger ones in one buffer on the host."""
    assert not _differences([cell("tiny_qwen2", "method=lora", "3 all", "bf16", 1)], 1, tmp_path)


@pytest.mark.states
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_states_are_exact_everywhere(model: str, ranks: int, tmp_path: Path) -> None:
    """A quarter of an hour on two cores; ``make`` and CI do not run it: ``pytest tests/plan -m states``."""
    cells = [
        cell(model, method, place, precision, accum)
        for method, place, precision, accum in itertools.product(METHODS, PLACES, ("bf16", "fp32"), (1, 2))
    ]
    assert not _differences(cells, ranks, tmp_path)
