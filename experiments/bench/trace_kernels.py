"""What the GPU does in a step: kernels of a run's ``profile/trace.json.gz`` by name, longest first.

    python -m glmexp train.profile=true train.max_steps=12 run.dir=RUN ...
    python experiments/bench/trace_kernels.py RUN [--lines 40]

How long the GPU computes, data travels between GPUs, and either; the widest gaps in which no kernel runs. Then
milliseconds and calls a step (steps 3 to 5 are traced), the share of all kernels, and the name. With profile=true the
traced steps wait for the device at the end of each phase: gaps between kernels are wider than they are otherwise.
Behind them the calls in which the host waited for the device, of which these are at most 8 a step.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from glmexp.engine.profile import Span, length, union

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--width", type=int, default=130, help="of names")
    asked = parser.parse_args()
    with gzip.open(asked.run / "profile" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    show_gaps(kernels)
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    waits: dict[str, int] = defaultdict(int)
    for event in events:
        if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]:
            waits[event["name"]] += 1
    for kernel in kernels:
        times[kernel["name"]] += kernel["dur"] / 1000
        calls[kernel["name"]] += 1
    whole = sum(times.values())
    print(f"{whole / STEPS:.2f} ms of kernels a step")
    for name in sorted(times, key=lambda one: -times[one])[: asked.lines]:
        share = times[name] / whole
        print(f"{times[name] / STEPS:9.2f} ms {calls[name] / STEPS:6.1f} x {share:6.1%}  {name[: asked.width]}")
    print("waits of the host a step: " + ", ".join(f"{count / STEPS:.1f} x {name}" for name, count in waits.items()))


def show_gaps(kernels: list[dict[str, Any]]) -> None:
    """Milliseconds a step with kernels of either kind, and the widest gaps."""
    travels = running([one for one in kernels if "nccl" in one["name"]])
    computes = running([one for one in kernels if "nccl" not in one["name"]])
    either = running(kernels)
    alone = f"computes {ms_a_step(computes):.2f} ms a step, travels {ms_a_step(travels):.2f}"
    print(f"{alone}, either {ms_a_step(either):.2f}")
    gaps = sorted(((after[0] - before[1]) / 1000 for before, after in pairwise(either)), reverse=True)
    print(f"gaps {sum(gaps) / STEPS:.2f} ms a step, widest " + ", ".join(f"{one:.2f}" for one in gaps[:20]))


def running(kernels: list[dict[str, Any]]) -> list[Span]:
    """Stretches of time in which at least one runs, in microseconds."""
    return union((one["ts"], one["ts"] + one["dur"]) for one in kernels)


def ms_a_step(spans: list[Span]) -> float:
    return length(spans) / 1000 / STEPS


if __name__ == "__main__":
    main()
