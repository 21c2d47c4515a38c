"""The host's memory while a run goes on: how much is taken, and whether the machine has begun to swap."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

MIB = 2**20


def used_bytes() -> int:
    """Memory of this machine that is taken, by everyone; pinned buffers are in it. 0 where there is no Linux."""
    rows = _rows("/proc/meminfo")
    return 1024 * (rows.get("MemTotal:", 0) - rows.get("MemAvailable:", 0))


def process_bytes() -> int:
    """Memory of this process that is no file's: what a leak would add to. 0 where there is no Linux."""
    path = Path("/proc/self/status")
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def swapped_out_bytes() -> int:
    """Bytes that this machine has written to swap since it was started. 0 where there is no Linux."""
    return os.sysconf("SC_PAGE_SIZE") * _rows("/proc/vmstat").get("pswpout", 0)


def _rows(file: str) -> dict[str, int]:
    path = Path(file)
    if not path.exists():
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text(encoding="ascii").splitlines())}


class SwapWatch:
    """Says that the host swaps when it begins, and again whenever the amount has doubled."""

    def __init__(self, read: Callable[[], int] = swapped_out_bytes) -> None:
        self._read = read
        self._start = read()
        self._said = 8 * MIB
        """Less than this is what an idle machine moves."""

    def line(self, step: int) -> str | None:
        """What to tell after this step; None: nothing new."""
        swapped = self._read() - self._start
        if swapped < self._said:
            return None
        self._said = 2 * swapped
        return (
            f"warning: the host swaps: {swapped / MIB:,.0f} MiB written to swap by step {step} of this run; steps get "
            "much slower. Ways out: offload.pin_memory=false, offload=nvme, fewer ranks on this host, method=lora"
        )
