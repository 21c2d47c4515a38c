"""Full fine-tuning of a 6B network on one GPU with the optimizer on the host: time per step and memory.

    python experiments/bench/offload.py --cells none torch deepspeed

Each cell is ``python -m glmexp`` in a process of its own, ended once its steps are measured (``--whole`` lets it write
and prove its artifact as well). One JSON line a cell: median seconds of the steps after the second and of their phases,
peak of the GPU, peak of the host above what was taken before. ``--layers`` makes the network smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from glmexp.config.memory import EXACT_PINNING
from glmexp.engine.host import used_bytes

GIB = 2**30
SKIPPED = 2
"""First steps: memory is allocated and kernels are chosen in them."""
EXACT = f"launcher.env={{PYTORCH_ALLOC_CONF: '{EXACT_PINNING}'}}"
CELLS = {
    "none": ["offload=none"],
    "torch": ["offload=optimizer", "offload.pin_memory=false", "offload.adam=torch"],
    "deepspeed": ["offload=optimizer", "offload.pin_memory=false", "offload.adam=deepspeed"],
    "pinned": ["offload=optimizer", "offload.adam=deepspeed", EXACT],
    "native": ["offload=optimizer", "offload.adam=deepspeed", "launcher.env={DS_PIN_MEMORY_BACKEND: native}"],
    "gpu": ["offload=optimizer", "offload.adam=gpu"],
    "stage3_pinned": ["zero=stage3", "offload=optimizer", "offload.adam=deepspeed", EXACT],
    "stage3_all": ["zero=stage3", "offload=all", "offload.pin_memory=false", "offload.adam=deepspeed"],
}
"""Unpinned: torch rounds pinned buffers up to powers of two, which makes 105 GiB 127 for 6.24 B parameters. Pinned:
torch 2.11 on can be told not to, and DeepSpeed (native) does not. Copies to and from pinned memory are faster."""


def main() -> None:
    """Measure the asked-for cells one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--model", default="chatglm3")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=500, help="for one cell")
    parser.add_argument("--whole", action="store_true", help="with artifact and proof")
    parser.add_argument("overrides", nargs="*", help="more KEY=VALUE for every cell")
    asked = parser.parse_args()
    for cell in asked.cells:
        print(json.dumps(measure(cell, asked)), flush=True)


def measure(cell: str, asked: argparse.Namespace) -> dict[str, object]:
    """Run one cell and sum its metrics up."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = [
            f"model={asked.model}", "model.init=random", f"model.sizes.num_layers={asked.layers}", "method=full",
            "zero=stage2", "precision=bf16", "train.gradient_checkpointing=true", "train.micro_batch_size=4",
            f"train.max_steps={asked.steps}", "eval=none", "tracker=none", f"run.dir={run}", *CELLS[cell],
            *asked.overrides,
        ]  # fmt: skip
        if any(word.startswith("zero=stage3") for word in words):
            words.remove("zero=stage2")
        before, peak, started = used_bytes(), 0, time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "glmexp", *words], start_new_session=True)
        ended_here = False
        while process.poll() is None:
            peak = max(peak, used_bytes())
            late = time.monotonic() - started > asked.limit_s
            if late or (len(_lines(run)) >= asked.steps and not asked.whole):
                ended_here = True
                os.killpg(process.pid, signal.SIGINT)  # SIGTERM would save first
                process.wait(timeout=60)
            time.sleep(0.2)
        lines = _lines(run)
        result: dict[str, object] = {
            "cell": cell, "layers": asked.layers, "steps": len(lines), "wall_s": round(time.monotonic() - started, 1),
            "host_peak_gib": round((peak - before) / GIB, 1), "command": words,
            "exit_code": None if ended_here else process.returncode,
        }  # fmt: skip
        for name in ("step", "forward", "backward", "optimizer"):
            values = [line[f"perf/{name}_s"] for line in lines[SKIPPED:]]
            result[f"{name}_s"] = round(statistics.median(values), 3) if values else None
        if lines:
            result["gpu_peak_gib"] = round(max(line["mem/peak_bytes"] for line in lines) / GIB, 1)
            result["tokens_per_s"] = round(statistics.median(line["perf/tokens_per_s"] for line in lines))
            result["losses"] = [line["train/loss"] for line in lines]
        return result


def _lines(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    whole = [line for line in file.read_text().split("\n")[:-1] if line]
    return [line for line in map(json.loads, whole) if "train/loss" in line]


if __name__ == "__main__":
    main()
