"""The main job on rows that people use: losses fall, on training and on held-out rows, at every stage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from glmexp.entry import proof
from tests.cli import forked
from tests.engine.cells import learns_at
from tests.engine.whole_runs import STEPS, whole_runs
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
    """At two stages each, so that every method and every model is at all four (that stages train alike to 5e-5 is
    test_matrix's)."""
    first = (["tiny", "tiny_qwen2"].index(model) + list(RATES).index(method)) % 2
    words = [
        f"model={model}",
        f"method={method}",
        f"optim.lr={RATES[method]}",
        "data=alpaca",
        f"data.train_file={ROWS}",
    ]
    words += ["data.holdout=32", "data.max_length=192", "train.micro_batch_size=4", "train.grad_accum=1"]
    by_rank = run_on_ranks(learns_at, words, (first, first + 2), folder=tmp_path, timeout_s=580)
    for stage, (losses, before, after) in by_rank[0].items():
        early, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
        assert last <= 0.9 * early, f"stage {stage}: {early} -> {last}"
        assert after < before, f"stage {stage}: held out {before} -> {after}"


FILES = {
    # name: (model, data option, file, further words)
    "zh": ("tiny", "alpaca", "alpaca_zh_demo.json", ["data.max_length=256", "eval=[loss]"]),
    "en": ("tiny_chatglm", "alpaca", "alpaca_en_demo.json", ["data.max_length=256", "eval=[loss]"]),
    "cmrc": (
        "tiny_chatglm2",
        "cmrc2018",
        "cmrc2018_trial.json",
        ["data.max_length=256", "eval=[loss,cmrc]", "eval.cmrc.max_new_tokens=4"],
    ),
}


def words_for(name: str, folder: Path) -> list[str]:
    model, data, file, more = FILES[name]
    places = [f"data.train_file={Path(SHARED) / 'data' / file}", f"data.cache_dir={folder / 'prepared'}"]
    return [f"model={model}", f"data={data}", *places, "data.holdout=12", *more]


@pytest.mark.matrix
@pytest.mark.skipif(not ROWS.is_file(), reason="GLMEXP_SHARED names no folder with data/alpaca_zh_demo.json")
@pytest.mark.timeout(900)
def test_real_files_are_inspected_trained_packed_and_padded_and_evaluated(tmp_path: Path) -> None:
    """Three files x four methods x packing on and off under ZeRO stage 3 on two ranks, in one pair of processes."""
    cells = {}
    for name in FILES:
        done = forked("entry=inspect", *words_for(name, tmp_path), folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "learned end tokens" in done.stdout
        for method in RATES:
            for packing in ("true", "false"):
                words = [*words_for(name, tmp_path), f"method={method}", f"data.packing={packing}", "zero=stage3"]
                cells[f"{name}-{method}-packing_{packing}"] = words
    faults, _ = run_on_ranks(whole_runs, cells, str(tmp_path / "runs"), folder=tmp_path, timeout_s=800)
    assert faults == {cell: [] for cell in cells}
    for cell in cells:
        run = tmp_path / "runs" / cell
        verdict = proof.judge(run)
        assert verdict["faults"] == [], cell
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        assert len(losses) == STEPS, cell
        assert all(0 < loss < 20 for loss in losses), cell
        scored = [line for line in lines if "eval/loss/loss" in line]
        assert len(scored) == 2, f"{cell}: before and after training"
        assert ("eval/cmrc/f1" in scored[-1]) == cell.startswith("cmrc"), cell
    for name in FILES:
        artifact = f"artifact.path={tmp_path / 'runs' / f'{name}-lora-packing_true'}"
        words = [word for word in words_for(name, tmp_path) if not word.startswith("model=")]
        done = forked("entry=evaluate", artifact, *words, "tracker=none", "launcher=inprocess", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"eval at step {STEPS}: loss " in done.stdout
