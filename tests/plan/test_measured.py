"""The plan stays as near to what was measured on an H200 as docs/plan.md says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "experiments" / "bench"
MEMORY, TIME, HOST = 0.03, 0.15, 0.06
OFFLOADED = 0.10
"""Copies of gradients on their way to the host overlap as the bus allows: not predicted more exactly than this."""
LATE = {"qwen2-4-512-freeze-s1-ckpt": 0.17}
"""Steps that are further off, with the cause in docs/plan.md."""


@pytest.fixture(scope="module")
def compare() -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("plan_compare")
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def lines(compare: Any) -> list[dict[str, Any]]:
    return compare.read(BENCH / "results" / "plan_h200.jsonl")


def test_peaks_and_steps_are_those_that_were_measured(compare: Any, lines: list[dict[str, Any]]) -> None:
    rows = [compare.row(line) for line in lines]
    assert len(rows) >= 24
    assert sum(not row.memory_fit for row in rows) >= 12
    assert sum(not row.time_fit for row in rows) >= 12
    for row in rows:
        limit = OFFLOADED if row.measured_host is not None else MEMORY
        assert abs(row.memory_error) <= limit, f"{row.case}: {row.memory_error:+.1%}"
        assert abs(row.time_error) <= LATE.get(row.case, TIME), f"{row.case}: {row.time_error:+.1%}"
    offloads = [row for row in rows if row.measured_host is not None]
    assert len(offloads) == 2
    assert all(abs(row.planned_host / row.measured_host - 1) <= HOST for row in offloads)


def test_hundreds_of_steps_of_other_benches_are_as_planned(compare: Any) -> None:
    """Nothing was fitted to them but the share of communication that shows: LoRA in bf16 and over a base in fp8, full
    fine-tuning, states that pass through the GPU, two GPUs at stages 1 to 3."""
    names = ("fp8_speed", "full_speed", "offload_speed", "two_gpus")
    rows = [compare.side(line) for name in names for line in compare.sides(BENCH / "results" / f"{name}_h200.jsonl")]
    assert len(rows) >= 6
    assert {row.ranks for row in rows} == {1, 2}
    for row in rows:
        assert abs(row.memory_error) <= MEMORY, f"{row.case}: {row.memory_error:+.1%}"
        assert abs(row.time_error) <= LATE.get(row.case, TIME), f"{row.case}: {row.time_error:+.1%}"


def test_what_is_said_to_fit_runs_and_what_is_said_not_to_does_not(compare: Any, lines: list[dict[str, Any]]) -> None:
    rungs = [rung for line in lines for rung in compare.rungs(line)]
    assert len(rungs) > 20
    assert {rung.ran for rung in rungs} == {True, False}
    for rung in rungs:
        assert rung.planned.fits(compare.H200) == rung.ran, f"{rung.case}, {rung.rows} rows"
