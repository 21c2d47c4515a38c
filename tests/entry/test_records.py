"""One tracked run a training, whatever the number of ranks; no question on any terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import warm
from tests.cli import environment, glmexp, metrics, runs

WORDS = ("train.max_steps=2", "eval=[generate]", "eval.generate.max_prompts=2", "eval.generate.max_new_tokens=4")


def _inspect(offline_run: Path, *words: str) -> str:
    wandb = Path(sys.executable).parent / "wandb"
    done = subprocess.run(
        [wandb, "leet", "inspect", "--json", *words, offline_run],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_two_ranks_are_one_tracked_run_with_config_steps_and_answers(tmp_path: Path) -> None:
    torchrun = (warm.python(), "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m")
    words = (*WORDS, "method.rank=4", "zero.reduce_bucket_size=50000000", "tracker.group=study")
    words += ("tracker.artifact=true",)
    done = glmexp(*words, folder=tmp_path, before=torchrun, WANDB_MODE="offline", WANDB_DIR=str(tmp_path / "w"))
    assert done.returncode == 0, done.stderr
    (offline,) = (tmp_path / "w" / "wandb").glob("offline-run-*")
    shown = _inspect(offline)
    for word in ('"study"', "reduce_bucket_size", "50000000", "train/loss"):
        assert word in shown, word
    _dashboard(shown)
    (run,) = runs(tmp_path)
    line = next(line for line in metrics(run) if "train/loss" in line)
    for name in ("perf/tokens_per_s", "perf/supervised_tokens_per_s", "perf/samples_per_s", "mem/peak_bytes"):
        assert line[name] > 0, name
    phases = [line[f"perf/{phase}_s"] for phase in ("data", "forward", "backward", "optimizer")]
    assert 0 < sum(phases) <= line["perf/step_s"] * 1.001, "the phases are parts of the step"
    recorded = json.loads((run / "environment.json").read_text())
    assert recorded["versions"]["deepspeed"]
    assert recorded["seed"] == 42
    assert json.loads((run / "ds_config.json").read_text())["zero_optimization"]["reduce_bucket_size"] == 50_000_000


def _dashboard(shown: str) -> None:
    """What parallel coordinates, grouped curves and tables of a wandb project are made of."""
    records: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, shown.splitlines()):
        records.setdefault(record["type"], []).append(record[record["type"]])
    (run,) = records["run"]
    assert (run["run_group"], run["job_type"]) == ("study", "train")
    assert run["tags"] == ["tiny", "lora", "stage2", "bf16"]
    config = run["config"]["update"]
    assert (config["method"]["rank"], config["zero"]["reduce_bucket_size"]) == (4, 50_000_000), "nested: method.rank"
    assert {"*": "step"} in [{one.get("glob_name"): one.get("step_metric")} for one in records["metric"]]
    summary: dict[str, Any] = {}
    for one in records["summary"]:
        summary |= one["update"]
    assert summary["model/trainable_parameters"] == 6144
    assert (summary["state"], summary["train/steps"]) == ("finished", 2)
    assert summary["eval/generate/exact_match"] >= 0
    assert summary["perf/tokens_per_s"] > 0
    steps = [one["item"]["step"] for one in records["history"] if "samples/generate.nrows" in one["item"]]
    assert steps == [0, 2], "a table of answers before and after"
    (model,) = [one for one in records["artifact"] if one["type"] == "model"]
    assert "adapter_model.safetensors" in [one["path"] for one in model["manifest"]["contents"]]


def test_a_terminal_without_a_login_is_asked_nothing(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    words = [warm.python(), "-m", "glmexp", "train.max_steps=2", "eval=none"]
    variables = {**environment(HOME=str(tmp_path)), "TERM": "xterm", "COLUMNS": "120"}
    variables.pop("WANDB_SILENT")
    process = subprocess.Popen(words, cwd=tmp_path, env=variables, stdin=child, stdout=child, stderr=child)
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 4096):
            shown += chunk
    except OSError:  # Linux: the other side of the pseudo terminal is closed
        pass
    assert process.wait(timeout=120) == 0, shown.decode()
    os.close(parent)
    text = shown.decode()
    assert text.count("offline since nobody is logged in") == 1
    assert "wandb login" in text
    for question in ("Enter your choice", "API key:", "(1)", "Paste"):
        assert question not in text, question
    (run,) = runs(tmp_path)
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
