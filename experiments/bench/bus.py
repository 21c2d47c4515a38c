"""Copies between page-locked host memory and the GPU: GB/s one way, the other way, and both at a time.

    python experiments/bench/bus.py --gib 2 --out experiments/bench/results/bus_h200.jsonl
    python experiments/bench/bus.py --gib 0.1

What an offloaded optimizer whose states pass through the GPU is bound by. The memory is that of the product
(``glmexp.engine.host_copy.Chunk``). One JSON line: the median of ``--times`` copies of each kind; of both at a time,
GB/s of each direction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from machine import keep, setting

from glmexp.engine.host_copy import Chunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the row is appended here")
    asked = parser.parse_args()
    size = int(asked.gib * 2**30)
    begun = time.perf_counter()
    host = [Chunk(size) for _ in range(2)]
    taken = time.perf_counter() - begun
    device = [torch.empty(size, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu") for _ in host]
    to_gpu, from_gpu = (device[0], host[0].bytes), (host[1].bytes, device[1])
    ways = {"to_gpu": [to_gpu], "from_gpu": [from_gpu], "both": [to_gpu, from_gpu]}
    row = {
        "kind": "bus",
        "bytes": size,
        "lock_gib_s": round(2 * asked.gib / taken, 2),
        **setting(Path(__file__).parent),
    }
    for name, copies in ways.items():
        seconds = [_copy(copies) for _ in range(asked.times + 1)][1:]
        row[f"{name}_gb_s"] = round(size / statistics.median(seconds) / 1e9, 1)
    print(json.dumps(row))
    keep(asked.out, [row])


def _copy(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Seconds of these copies beside each other."""
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        for target, source in copies:
            target.copy_(source)
        return time.perf_counter() - begun
    streams = [torch.cuda.Stream() for _ in copies]
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for stream, (target, source) in zip(streams, copies, strict=True):
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
