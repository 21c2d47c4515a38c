"""What a checkpoint adds to training: the seconds that the loop waits, and their share of the time.

    python experiments/bench/saves.py method=lora
    python experiments/bench/saves.py --model chatglm3 --every 100 method=lora train.micro_batch_size=8
    python experiments/bench/saves.py --model chatglm3 --saves 2 --every 60 method=full optim.lr=1e-5 launcher.nproc=2 \
        train.micro_batch_size=8 model.sizes.num_layers=14

One run of ``python -m glmexp`` with random weights (``--model tiny``: the shipped ones), which saves every ``--every``
steps and is ended when ``--saves`` of them are on the disk. Printed as JSON: median seconds of a step, seconds of
copying to the host and of waiting for the save before (the first save also waits for host memory that is not taken yet,
so it stands apart), bytes on the disk, and the share that a save adds if one comes every ``--every`` steps and every
100. Writing goes on beside training and slows it where cores or disk are short: ``after_saves_s`` are the steps after
the first save. Host memory is taken beside the first steps: ``first_steps_s`` are those. ``log`` says how long that
took, and how long each writing. The disk holds two checkpoints at a time.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SKIPPED = 2
"""First steps: memory is allocated and kernels are chosen in them."""
LISTED = 40
"""Steps whose seconds are listed."""
ENDLESS = 1_000_000


def main() -> None:
    """Run once and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--work", help="folder of the run; its disk is what is written to")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.work) as folder:
        print(json.dumps(measure(asked, Path(folder, "run")), indent=1))


def measure(asked: argparse.Namespace, run: Path) -> dict[str, object]:
    """The numbers of one run."""
    words = [
        f"model={asked.model}", "eval=none", "tracker=none", f"train.max_steps={ENDLESS}",
        f"train.save_steps={asked.every}", "train.keep_checkpoints=1", f"run.dir={run}", *asked.overrides,
    ]  # fmt: skip
    if asked.model != "tiny":
        words.append("model.init=random")
    train_until(words, run, asked.saves * asked.every)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    # The waiting for a save stands in the line of the step after it.
    saved = [line for line in lines if "perf/save_copy_s" in line][: asked.saves]
    plain = [line["perf/step_s"] for line in lines[SKIPPED:] if line not in saved]
    copies = [line["perf/save_copy_s"] for line in saved]
    waits = [line["perf/save_wait_s"] for line in saved]
    step = statistics.median(plain)
    later = statistics.median([copy + wait for copy, wait in zip(copies, waits, strict=True)][1:] or copies)
    newest = run / "checkpoints" / f"step-{asked.saves * asked.every}"
    log = (run / "logs" / "rank0.log").read_text(encoding="utf-8")
    return {
        "words": words,
        "step_s": step,
        "first_steps_s": [round(line["perf/step_s"], 4) for line in lines[:LISTED]],
        "after_saves_s": [round(line["perf/step_s"], 4) for line in lines[asked.every : asked.every + LISTED]],
        "first_copy_s": copies[0],
        "copy_s": copies[1:],
        "wait_s": waits[1:],
        "host_bytes": [line["mem/host_used_bytes"] for line in (lines[0], lines[-1])],
        "log": [line for line in log.splitlines() if "memory for checkpoints" in line or " INFO checkpoint " in line],
        "bytes": sum(file.stat().st_size for file in newest.iterdir()),
        f"percent_every_{asked.every}": 100 * later / (asked.every * step),
        "percent_every_100": 100 * later / (100 * step),
    }


def train_until(words: list[str], run: Path, step: int) -> None:
    """Train until the checkpoint of ``step`` is on the disk and a step after it in the records, then end it."""
    latest, metrics = run / "checkpoints" / "latest", run / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-m", "glmexp", *words], stdout=sys.stderr) as training:
        while training.poll() is None:
            there = latest.exists() and int(latest.read_text(encoding="utf-8").strip().removeprefix("step-")) >= step
            if there and f'"step": {step + 1},' in metrics.read_text(encoding="utf-8"):
                training.send_signal(signal.SIGINT)
                training.wait()
                return
            time.sleep(0.2)
    sys.exit(f"training ended with exit code {training.returncode} before step {step} was saved")


if __name__ == "__main__":
    main()
