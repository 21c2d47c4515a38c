"""Export of a 6B network from two ranks at stage 3: seconds, host and GPU memory, and whether the proof passed.

    python experiments/bench/export.py --out outputs/bench/export

Trains a network of random weights for a few steps, then exports what it left; each is ``python -m glmexp`` in processes
of its own. One JSON line an export: ``train_s`` and ``export_s`` from start to end, proofs included; ``write_s`` for
the weights alone; host memory above what was taken before (pages of files that the system takes back at need are not
in it) while weights were written and over the whole export, which ends with the proof and its whole models; peaks of
the GPU. ``--layers 2`` and smaller ``model.sizes`` make it a matter of seconds on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from glmexp.engine.host import used_bytes

CELLS = {
    "lora": ["method=lora", "gather=trainable"],
    "lora_sharded": ["method=lora", "gather=sharded"],
    "full_sharded": ["method=full", "gather=sharded", "train.gradient_checkpointing=true"],
}


def main() -> None:
    """Measure the asked-for cells one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=["lora"])
    parser.add_argument("--model", default="chatglm3")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--layout", default="released")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs; it must be new")
    parser.add_argument("overrides", nargs="*", help="more KEY=VALUE for the training")
    asked = parser.parse_args()
    for cell in asked.cells:
        print(json.dumps(measure(cell, asked)), flush=True)


def measure(cell: str, asked: argparse.Namespace) -> dict[str, object]:
    """Train, export, and read what the export has recorded."""
    run, out = asked.out / cell, asked.out / f"{cell}-export"
    training = [
        f"model={asked.model}", "model.init=random", f"model.sizes.num_layers={asked.layers}", "zero=stage3",
        "precision=bf16", f"launcher.nproc={asked.ranks}", "train.micro_batch_size=1", "train.max_steps=3", "eval=none",
        "tracker=none", f"run.dir={run}", *CELLS[cell], *asked.overrides,
    ]  # fmt: skip
    export = ["entry=export", f"artifact.path={run}", f"run.dir={out}", f"export.dtype={asked.dtype}"]
    export.append(f"export.layout={asked.layout}")
    train_s, _, _ = _glmexp(training, run)
    export_s, whole_peak, writing_peak = _glmexp(export, out)
    facts = json.loads((out / "source.json").read_text(encoding="utf-8"))
    proof = json.loads((out / "proof.json").read_text(encoding="utf-8"))
    return {
        "cell": cell, "layers": asked.layers, "ranks": asked.ranks, "train_s": train_s, "export_s": export_s,
        "write_s": facts["write_s"], "written_bytes": facts["written_bytes"],
        "largest_tensor_bytes": facts["largest_tensor_bytes"], "writing_host_peak_bytes": writing_peak,
        "writing_gpu_peak_bytes": facts["peak_gpu_bytes"], "export_host_peak_bytes": whole_peak,
        "proof_gpu_peak_bytes": proof["peak_gpu_bytes"], "proof": proof, "command": [training, export],
    }  # fmt: skip


def _glmexp(words: list[str], folder: Path) -> tuple[float, int, int]:
    """Seconds, and peaks of the host's memory above its start: over all, and until the weights are written."""
    before, whole, writing, started = used_bytes(), 0, 0, time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "glmexp", *words])
    while process.poll() is None:
        whole = max(whole, used_bytes() - before)
        if not (folder / "source.json").exists():
            writing = whole
        time.sleep(0.05)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with exit code {process.returncode}")
    return round(time.monotonic() - started, 1), whole, writing


if __name__ == "__main__":
    main()
