"""What lengths that were never seen cost: a run's first pass over its rows beside its second, over the same batches.

    python experiments/bench/unseen_lengths.py --model chatglm3 --work FOLDER [--packed]

One ``python -m glmexp`` run of LoRA, in file order (data.shuffle=false), two passes of ``--steps`` steps each; it is
ended behind them. Micro batches of 4 rows padded to their longest, or with ``--packed`` one packed row. Step by step
the second pass has what the first had; wanted: medians within 5 %, and a data wait below 1 % of a step. ``slow_steps``
are those of the first pass that took more than twice its median: none where nothing is compiled or allocated anew. The
first ``--skip`` steps of both passes are left out: in them kernels are compiled and memory is allocated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instruction_data import write as write_rows
from machine import keep, setting
from running import ROOT, Running, SideFailed
from sides import Job, product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["chatglm3", "qwen2"], default="chatglm3")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--small", action="store_true", help="two narrow layers: a rehearsal on a CPU")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--pack", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--steps", type=int, default=200, help="of a pass")
    parser.add_argument("--skip", type=int, default=5)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=500)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    layers = 2 if asked.small else asked.layers
    job = Job(asked.model, layers, asked.small, False, asked.pack, 1, False, asked.work.resolve() / "unseen")
    # So many rows that a pass has about the asked-for steps; the true number is read from the run.
    examples = 4 * asked.steps if not asked.packed else asked.steps * asked.pack // 290
    print(write_rows(asked.model, job.data, examples), flush=True)
    shape = [] if asked.packed else ["data.packing=false", "data.max_length=2048", "train.micro_batch_size=4"]
    side = product("run", job, ["data.shuffle=false", "train.epochs=2", "train.max_steps=null", *shape, *asked.set], 1)
    lines = run(side, job.work, asked.limit_s)
    row = {"kind": "unseen_lengths", "model": asked.model, "layers": layers, "packed": asked.packed}
    row |= compared(lines, asked.skip) | setting(ROOT)
    print(json.dumps(row))
    keep(asked.out, [row])


def run(side: Any, work: Path, limit_s: float) -> list[dict[str, float]]:
    """All steps of both passes; the artifact behind them is not waited for."""
    running = Running(side, work / "run.log")
    try:
        seen = running.steps(1, limit_s, "its start")
        total = 2 * steps_of_a_pass(running.family.log.read_text(encoding="utf-8"))
        if len(seen) < total:
            seen += running.steps(total - len(seen), limit_s, "its two passes")
    except SideFailed as fault:
        raise SystemExit(str(fault)) from fault
    finally:
        running.family.end()
    return [line for _, line in seen[:total]]


def steps_of_a_pass(log: str) -> int:
    """As the run says it in its line about steps."""
    return int(log.split(" steps an epoch")[0].split()[-1])


def compared(lines: Sequence[dict[str, float]], skip: int) -> dict[str, Any]:
    """Medians of both passes over the same batches."""
    half = len(lines) // 2
    first, second = lines[skip:half], lines[half + skip :]
    assert len(first) == len(second) > 0
    medians = [statistics.median(line["perf/step_s"] for line in part) for part in (first, second)]
    waits = sum(line["perf/data_s"] for line in lines[skip:]) / sum(line["perf/step_s"] for line in lines[skip:])
    return {
        "steps_of_a_pass": half,
        "first_pass_step_s": round(medians[0], 4),
        "second_pass_step_s": round(medians[1], 4),
        "ratio": round(medians[0] / medians[1], 4),
        "ratio_of_sums": round(sum(x["perf/step_s"] for x in first) / sum(x["perf/step_s"] for x in second), 4),
        "data_wait_share": round(waits, 5),
        "slowest_s": round(max(line["perf/step_s"] for line in first), 3),
        "slow_steps": [skip + 1 + place for place, line in enumerate(first) if line["perf/step_s"] > 2 * medians[0]],
    }


if __name__ == "__main__":
    main()
