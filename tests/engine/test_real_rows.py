"""The main job on rows that people use: losses fall, on training and on held-out rows, at every stage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engine.cells import learns_at_all_stages
from tests.ranks import run_on_ranks

SHARED = os.environ.get("GLMEXP_SHARED", "")
ROWS = Path(SHARED) / "data" / "alpaca_zh_demo.json"
# Step sizes for 60 steps of text that a tiny model has never seen.
RATES = {"lora": "5e-3", "ptuning": "1.5e-1", "freeze": "6e-3", "full": "1e-3"}


@pytest.mark.matrix
@pytest.mark.skipif(not ROWS.is_file(), reason="GLMEXP_SHARED names no folder with data/alpaca_zh_demo.json")
@pytest.mark.parametrize("method", RATES)
@pytest.mark.parametrize("model", ["tiny", "tiny_qwen2"])
def test_alpaca_rows_are_learned(model: str, method: str, tmp_path: Path) -> None:
    words = [
        f"model={model}",
        f"method={method}",
        f"optim.lr={RATES[method]}",
        "data=alpaca",
        f"data.train_file={ROWS}",
    ]
    words += ["data.holdout=32", "data.max_length=192", "train.micro_batch_size=4", "train.grad_accum=1"]
    by_rank = run_on_ranks(learns_at_all_stages, words, folder=tmp_path, timeout_s=580)
    for stage, (losses, before, after) in by_rank[0].items():
        first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
        assert last <= 0.9 * first, f"stage {stage}: {first} -> {last}"
        assert after < before, f"stage {stage}: held out {before} -> {after}"
