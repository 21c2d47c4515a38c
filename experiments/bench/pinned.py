"""How page-locked host memory is best taken beside training: seconds, and what the steps beside it lose.

    python experiments/bench/pinned.py --gib 16
    python experiments/bench/pinned.py --small

Ways: ``alloc`` (torch's pinned allocator, cudaHostAlloc), ``register`` (pages touched first, then cudaHostRegister),
``huge`` (the same with huge pages asked for), each by one thread in chunks of 256 MiB; ``huge4`` by four. The main
thread runs steps of many small and a few large kernels with a copy to the device in each, as training does. One JSON
line a way: seconds, GiB/s, milliseconds of a step alone and beside it (median, longest), GiB/s of a copy from the
device into what was taken.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import threading
import time
from typing import Any

import torch

CHUNK = 1 << 28
PAGE = 4096
GIB = 1 << 30


def alloc(size: int) -> torch.Tensor:
    """Through torch's allocator."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def register(size: int, huge: bool = False) -> torch.Tensor:
    """Pages first, the lock afterwards."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        area.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(area, dtype=torch.uint8)
    chunk.view(-1, PAGE)[:, 0].zero_()
    if torch.cuda.is_available():
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), size, 0)))
    return chunk


class Work:
    """Something like a training step."""

    def __init__(self, size: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.randn(size, size, device=self.device, dtype=torch.bfloat16) / size**0.5
        self.rows = torch.randn(size, size, device=self.device, dtype=torch.bfloat16)

    def step(self) -> float:
        """Milliseconds."""
        begun = time.perf_counter()
        tokens = torch.arange(65536).to(self.device, non_blocking=True)
        rows = self.rows
        for _ in range(40):
            rows = torch.nn.functional.silu(rows @ self.weight) + 1
            for _ in range(8):
                rows = rows * 0.99
        float(rows.sum() + tokens.sum())
        return 1000 * (time.perf_counter() - begun)


def measure(way: str, chunks: int, work: Work) -> dict[str, Any]:
    """One way of taking ``chunks`` chunks."""
    alone = [work.step() for _ in range(20)]
    taken: list[torch.Tensor] = []
    count = 4 if way.endswith("4") else 1

    def take(number: int) -> None:
        taken.extend(
            alloc(CHUNK) if way == "alloc" else register(CHUNK, way.startswith("huge"))
            for _ in range(number, chunks, count)
        )

    threads = [threading.Thread(target=take, args=(number,)) for number in range(count)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    beside = [work.step()]
    while any(thread.is_alive() for thread in threads):
        beside.append(work.step())
    seconds = time.perf_counter() - begun
    source = torch.zeros(CHUNK, dtype=torch.uint8, device=work.device)
    begun = time.perf_counter()
    for chunk in taken:
        chunk.copy_(source, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    copied = time.perf_counter() - begun
    size = chunks * CHUNK / GIB
    if torch.cuda.is_available() and way != "alloc":
        for chunk in taken:
            torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr())
    return {
        "way": way,
        "seconds": seconds,
        "gib_per_s": size / seconds,
        "step_ms": statistics.median(alone),
        "beside_ms": statistics.median(beside),
        "beside_longest_ms": max(beside),
        "copy_gib_per_s": size / copied,
    }


def main() -> None:
    """All ways, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--small", action="store_true", help="1 GiB and tiny steps: does it run?")
    asked = parser.parse_args()
    work = Work(128 if asked.small else 4096)
    chunks = (1 if asked.small else asked.gib) * GIB // CHUNK
    for way in ("alloc", "register", "huge", "huge4"):
        try:
            print(json.dumps(measure(way, chunks, work)), flush=True)
        except RuntimeError as error:  # a sandbox may refuse to lock foreign memory: that is an answer too
            print(json.dumps({"way": way, "error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
