"""What the GPU does in a step: kernels of a run's ``profile/trace.json.gz`` by name, longest first.

    python -m glmexp train.profile=true train.max_steps=12 run.dir=RUN ...
    python experiments/bench/trace_kernels.py RUN [--lines 40]

Milliseconds and calls a step (steps 3 to 5 are traced), the share of all kernels, and the name. With profile=true the
traced steps wait for the device at the end of each phase: gaps between kernels are wider than they are otherwise.
Behind them the calls in which the host waited for the device, of which these are at most 8 a step.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--width", type=int, default=130, help="of names")
    asked = parser.parse_args()
    with gzip.open(asked.run / "profile" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    waits: dict[str, int] = defaultdict(int)
    for event in events:
        if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]:
            waits[event["name"]] += 1
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            times[event["name"]] += event["dur"] / 1000
            calls[event["name"]] += 1
    whole = sum(times.values())
    print(f"{whole / STEPS:.2f} ms of kernels a step")
    for name in sorted(times, key=lambda one: -times[one])[: asked.lines]:
        share = times[name] / whole
        print(f"{times[name] / STEPS:9.2f} ms {calls[name] / STEPS:6.1f} x {share:6.1%}  {name[: asked.width]}")
    print("waits of the host a step: " + ", ".join(f"{count / STEPS:.1f} x {name}" for name, count in waits.items()))


if __name__ == "__main__":
    main()
