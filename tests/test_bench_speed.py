"""The speed tables: the alternating tool counts right and leaves nobody behind; data and commands are what they say.

No speed is measured here but that of two sleeping scripts.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from glmexp.config.compose import run_config
from glmexp.config.ds_config import gathers_blocks

BENCH = Path(__file__).parents[1] / "experiments" / "bench"

SLEEPER = """
import json, signal, subprocess, sys, time
file, seconds = sys.argv[1], float(sys.argv[2])
# A rank in a session of its own does the work, as under glmexp's launcher.
if len(sys.argv) == 3:
    child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "rank"], start_new_session=True)
    sys.exit(child.wait())
continued = 0.0
def note(number, frame):
    global continued
    continued = time.perf_counter()
signal.signal(signal.SIGCONT, note)
for step in range(1, 10_000):
    started = time.perf_counter()
    time.sleep(seconds)
    stopped = continued > started
    speed = (1 if stopped else 100) / seconds
    line = {"step": step, "perf/step_s": seconds, "perf/tokens_per_s": speed}
    line |= {"mem/peak_bytes": 2**30, "stopped": stopped}
    with open(file, "a") as out:
        out.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules of the folder by name."""
    monkeypatch.syspath_prepend(str(BENCH))

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield module
    for name in ("alternate", "running", "processes", "machine", "sides", "instruction_data", "zero3_speed"):
        sys.modules.pop(name, None)


def test_sides_take_turns_and_their_ratio_is_that_of_their_steps(bench: Any, tmp_path: Path) -> None:
    alternate, psutil = bench("alternate"), pytest.importorskip("psutil")
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)

    def side(name: str, *words: str) -> Any:
        file = tmp_path / f"{name}.jsonl"
        return alternate.Side(name, [sys.executable, str(script), str(file), *words], file, steps=4)

    broken = alternate.Side("broken", [sys.executable, "-c", "print('no GPU'); raise SystemExit(3)"], tmp_path / "none")
    plan = alternate.Plan(windows=3, warm_up=2, start_limit_s=20, window_limit_s=20)
    rows = alternate.measure("case", [side("slow", "0.08"), broken, side("fast", "0.04")], plan, tmp_path / "logs")

    slow, failed, fast = rows
    assert (fast["ratio"], fast["tokens_per_s"]) == (2.0, 2500)
    assert fast["ratio_low"] <= fast["ratio"] <= fast["ratio_high"]
    assert (slow["windows"], fast["windows"], failed["windows"]) == (3, 3, 0)
    assert (slow["tokens_per_s"], slow["peak_gib"], slow["tokens_a_step"]) == (1250, 1.0, 100)
    assert failed["fault"] == "broken ended with exit code 3 in its start and warm-up: no GPU"
    assert str(tmp_path) not in json.dumps(rows), "a result names no folder of this machine"
    # Three times each was continued within a step (or, rarely, between two), and the exact speeds show that none of
    # these steps was counted.
    for name in ("slow", "fast"):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert 2 <= sum(line["stopped"] for line in lines) <= 3
    left = [one for one in psutil.process_iter(["cmdline"]) if str(script) in (one.info["cmdline"] or [])]
    assert left == []


def test_a_fault_names_the_error_in_a_log(bench: Any) -> None:
    log = [
        "dynamic ended with exit code 1 in a window:",
        "[rank0]:     return Variable._execution_engine.run_backward(",
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB.",
        "[rank0]:[W1130 10:03:53] Warning: destroy_process_group() was not called",
    ]
    assert bench("alternate").reason("\n".join(log)) == f"{log[0]} {log[2]}"


def test_lone_sides_are_started_anew(bench: Any, tmp_path: Path) -> None:
    alternate = bench("alternate")
    script, file = tmp_path / "sleeper.py", tmp_path / "one.jsonl"
    script.write_text(SLEEPER)
    side = alternate.Side("one", [sys.executable, str(script), str(file), "0.01"], file, steps=2, alone=True)
    plan = alternate.Plan(windows=3, warm_up=1, windows_a_start=2, start_limit_s=20, window_limit_s=20)
    (row,) = alternate.measure("case", [side], plan, tmp_path / "logs")
    assert row["windows"] == 3
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == ["one-0.log", "one-2.log"]
    # The second start had one window: its warm-up step, a dropped one and two counted ones, and what came meanwhile.
    assert json.loads(file.read_text().splitlines()[0])["step"] == 1


def test_a_bench_that_is_ended_leaves_nobody_behind(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    script, file = tmp_path / "sleeper.py", tmp_path / "one.jsonl"
    script.write_text(SLEEPER)
    side = {"name": "one", "command": [sys.executable, str(script), str(file), "0.02"], "metrics": str(file)}
    (tmp_path / "sides.json").write_text(json.dumps([{**side, "steps": 10_000}]))
    words = [str(BENCH / "alternate.py"), str(tmp_path / "sides.json"), "--case", "ended"]
    tool = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline, "the side did not start"
        time.sleep(0.02)
    # Twice, as under `timeout`, which passes on what it gets itself.
    tool.send_signal(signal.SIGTERM)
    tool.send_signal(signal.SIGTERM)
    assert tool.wait(timeout=30) == 128 + signal.SIGTERM
    assert [one for one in psutil.process_iter(["cmdline"]) if str(script) in (one.info["cmdline"] or [])] == []


def test_data_has_the_lengths_of_instruction_data(bench: Any, tmp_path: Path) -> None:
    data = bench("instruction_data")
    lengths, prompts = data.draw(4096)
    assert abs(np.median(lengths) - 180) < 5
    assert abs(np.percentile(lengths, 95) - 900) < 40
    assert (lengths.min(), lengths.max()) == (16, 2048)
    assert 0.38 < (prompts / lengths).mean() < 0.42
    about = data.write("chatglm3", tmp_path, 64)
    assert about["longer_than_drawn"] == 0
    with np.load(tmp_path / "ids.npz") as held:
        assert held["lengths"].tolist() == data.draw(64)[0].tolist()
        assert len(held["ids"]) == len(held["learned"]) == held["lengths"].sum()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(row["instruction"].isdigit() and row["output"].isdigit() for row in rows)


@pytest.mark.parametrize("model", ["chatglm3", "qwen2"])
def test_product_sides_are_commands_that_the_product_takes(bench: Any, tmp_path: Path, model: str) -> None:
    sides, zero3 = bench("sides"), bench("zero3_speed")
    (tmp_path / f"{model}-data").mkdir()
    (tmp_path / f"{model}-data" / "rows.jsonl").write_text("")

    def config(side: Any, gpus: int) -> Any:
        assert side.command[1:3] == ["-m", "glmexp"]
        return run_config(side.command[3:], ranks=side.ranks, gpus=gpus)

    def job(full: bool) -> Any:
        return sides.Job(model, 28, False, full, 8192, 1, model == "qwen2" and not full, tmp_path)

    lora = config(sides.side("eager=product:train.compile=false", job(False), 8, ["zero=stage1"]), 1)
    assert (lora.train.compile, lora.zero.stage, lora.data.packing) == (False, 1, True)
    assert lora.method.dropout == 0
    full = config(sides.side("product", job(True), 8, []), 1)
    assert full.method.name == "full"
    leaf = zero3.two("leaf", job(False), 8, [])
    assert leaf.ranks == 2
    assert config(leaf, 2).zero.leaf_modules == [zero3.BLOCKS[model]]
    fetched = {kind: gathers_blocks(config(zero3.two(kind, job(False), 8, []), 2)) for kind in ("stage3", "tensors")}
    assert fetched == {"stage3": True, "tensors": False}
    assert config(zero3.two("blocks", job(False), 8, []), 2).zero.whole_blocks
    assert zero3.two("stage2_one", job(False), 8, []).ranks == 1
    plain = sides.side("plain:--compile;no", job(True), 8, [])
    assert plain.command[-5:] == ["--pack", "8192", "--accum", "1", "--full"]
    assert sides.side("tutorial", job(False), 8, []).steps < 8, "slow sides have short windows"
