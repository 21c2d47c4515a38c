"""What a checkpoint adds to training: the seconds that the loop waits, and their share of the time.

    python experiments/bench/saves.py method=lora
    python experiments/bench/saves.py --model chatglm3 method=lora train.micro_batch_size=8
    python experiments/bench/saves.py --model chatglm3 --steps 24 --every 8 method=full optim.lr=1e-5 offload=none

One run of ``python -m glmexp`` with random weights (``--model tiny``: the shipped ones), which saves every ``--every``
steps. Printed as JSON: median seconds of a step, seconds of copying to the host and of waiting for the save before (the
first save also allocates the host memory that the later ones use again, so it stands apart), bytes on the disk, and the
share that a save adds if one comes every ``--every`` steps and every 100. Writing goes on beside training and slows it
where cores or disk are short: ``step_while_writing_s`` is the median step after a save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 2
"""First steps: memory is allocated and kernels are chosen in them."""


def main() -> None:
    """Run once and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--work", help="folder of the run; its disk is what is written to")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.work) as folder:
        print(json.dumps(measure(asked, Path(folder, "run")), indent=1))


def measure(asked: argparse.Namespace, run: Path) -> dict[str, object]:
    """The numbers of one run."""
    words = [
        f"model={asked.model}", "eval=none", "tracker=none", f"train.max_steps={asked.steps}",
        f"train.save_steps={asked.every}", "train.keep_checkpoints=1", f"run.dir={run}", *asked.overrides,
    ]  # fmt: skip
    if asked.model != "tiny":
        words.append("model.init=random")
    # Stopped behind the last save: neither artifact nor proof is what is measured here.
    words.append(f"train.stop_after={asked.steps - asked.steps % asked.every - 1}")
    subprocess.run([sys.executable, "-m", "glmexp", *words], check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    saved = [line for line in lines if "perf/save_copy_s" in line]
    plain = [line["perf/step_s"] for line in lines[SKIPPED:] if line not in saved]
    copies = [line["perf/save_copy_s"] for line in saved]
    waits = [line["perf/save_wait_s"] for line in saved]
    step = statistics.median(plain)
    later = statistics.median([copy + wait for copy, wait in zip(copies, waits, strict=True)][1:] or copies)
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    return {
        "words": words,
        "step_s": step,
        "step_while_writing_s": statistics.median(line["perf/step_s"] for line in saved),
        "first_copy_s": copies[0],
        "copy_s": copies[1:],
        "wait_s": waits[1:],
        "bytes": sum(file.stat().st_size for file in newest.iterdir()),
        f"percent_every_{asked.every}": 100 * later / (asked.every * step),
        "percent_every_100": 100 * later / (100 * step),
    }


if __name__ == "__main__":
    main()
