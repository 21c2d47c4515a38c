"""The parity table: cells equal one process within design's tolerances, and a planted fault does not pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glmexp.config.schema import RunConfig
from glmexp.engine import build
from glmexp.entry import parity
from glmexp.entry.parity import Cell, Row
from tests.engine.cells import configure
from tests.ranks import run_on_ranks

ONE = [Cell(1, 1, 8, 0, "none", False, False), Cell(1, 4, 2, 3, "all", True, True)]
TWO = [
    Cell(2, 2, 2, 1, "optimizer", True, True),
    Cell(2, 4, 1, 2, "none", False, False),
    Cell(2, 1, 4, 3, "none", True, True),
]


def _config() -> RunConfig:
    return configure("method=lora", "optim.lr=1e-3")


def rows_of(cells: list[Cell], folder: str) -> list[Row]:
    """Each cell's row on these ranks; the last cell once more with gradients of twice their size."""
    rows = parity.measure(_config(), Path(folder), cells)
    initialize = build.initialize

    def doubling(*args: Any) -> Any:
        engine = initialize(*args)
        backward = engine.backward
        engine.backward = lambda loss, **settings: backward(2 * loss, **settings)
        return engine

    build.initialize = doubling
    return rows + parity.measure(_config(), Path(folder), cells[-1:])


def six_lengths(folder: str) -> list[Row]:
    """The same six examples of six lengths in micro batches of 6, 3, 2 and 1, all weights trained."""
    file = Path(folder) / "six.jsonl"
    answers = ["A lamp.", "Two lamps " * 3, "Three lamps " * 6, "b", "Five lamps " * 9, "Six lamps " * 2]
    file.write_text("\n".join(json.dumps({"prompt": f"{n}?" * (n + 1), "response": a}) for n, a in enumerate(answers)))
    config = configure("method=full", "optim.lr=1e-3", "optim.eps=1e-4", f"data.train_file={file}", "eval=none")
    config = replace(config, parity=replace(config.parity, rows=6))
    return parity.measure(config, Path(folder), [Cell(1, 6 // m, m, 2, "none", False, False) for m in (6, 3, 2, 1)])


def test_accumulation_does_not_change_loss_and_gradients_of_rows_of_different_lengths(tmp_path: Path) -> None:
    # The reference is the token weighted loss over the six examples; the second step's loss has the weights in it.
    rows = run_on_ranks(six_lengths, str(tmp_path), folder=tmp_path, ranks=1)[0]
    assert len(rows) == 4
    for row in rows:
        assert row.loss is not None, row
        assert not row.differs, row


def test_cells_equal_one_process_and_doubled_gradients_do_not(tmp_path: Path) -> None:
    for cells, ranks in ((ONE, 1), (TWO, 2)):
        *rows, doubled = run_on_ranks(rows_of, cells, str(tmp_path), folder=tmp_path, ranks=ranks)[0]
        for row in rows:
            assert row.loss is not None, row
            assert not row.differs, row
            assert row.gradient_allowed == (1e-6 if row.cell == ONE[0] else 1e-5), row
        assert doubled.differs, doubled
        # One of the cells above has checkpointing over a frozen embedding: all adapters are reached all the same.
        gradients = torch.load(tmp_path / "reference.pt", weights_only=True)["gradients"]
        assert all(one.norm() > 0 for name, one in gradients.items() if "lora_B" in name)
        assert doubled.gradient == pytest.approx(1.0, abs=1e-3), doubled


def test_the_grid_has_more_than_a_hundred_cells_of_one_global_batch() -> None:
    cells = parity.cells(_config(), [1, 2])
    assert len(cells) == len(set(cells)) == 224
    assert {cell.ranks * cell.grad_accum * cell.micro_batch for cell in cells} == {8}
    few = replace(_config(), parity=replace(_config().parity, cells=10))
    chosen = parity.cells(few, [1, 2])
    assert len(chosen) == 10
    assert {cell.packing for cell in chosen} == {cell.checkpointing for cell in chosen} == {False, True}


def test_what_cells_that_differ_share_is_named() -> None:
    def row(stage: int, packing: bool, gradient: float) -> Row:
        return Row(Cell(1, 1, 8, stage, "none", False, packing), 1e-7, gradient, 1e-5, 1e-5, "weight")

    table = parity.Table([row(0, False, 1e-7), row(2, False, 0.5), row(2, True, float("nan")), row(3, True, 1e-7)])
    assert not table.passed
    lines = "\n".join(table.lines())
    assert "2 of 4 cells equal one process" in lines
    assert "why: exactly the cells with stage=2 differ" in lines
    assert "packing" not in lines.split("why:")[1]


@pytest.mark.parity
def test_all_cells_equal_one_process(tmp_path: Path) -> None:
    """The whole grid in processes of its own."""
    table = parity.run(_config(), tmp_path)
    assert table.passed, "\n".join(table.lines())
    assert len(table.rows) == 224
