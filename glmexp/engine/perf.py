"""Where a step's time goes, and how fast it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from glmexp.launcher import positions


class Stopwatch:
    """Seconds of named phases. On a GPU between events on the stream, read once a step: no wait inside a step."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._open: list[tuple[str, object, object]] = []
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to ``name``."""
        positions.within(name)
        begin = self._mark()
        yield
        self._open.append((name, begin, self._mark()))

    def _mark(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last call, and ``step`` for the whole; starts anew. Call after a device sync."""
        if self._cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for name, begin, end in self._open:
            if isinstance(begin, float) and isinstance(end, float):
                spent = end - begin
            else:
                assert isinstance(begin, torch.cuda.Event)
                assert isinstance(end, torch.cuda.Event)
                spent = begin.elapsed_time(end) / 1000
            seconds[name] = seconds.get(name, 0.0) + spent
        now = time.perf_counter()
        seconds["step"] = now - self._started
        self._open.clear()
        self._started = now
        return seconds

    def so_far(self) -> float:
        """Seconds since the last step was read, by the clock of the host."""
        return time.perf_counter() - self._started

    def restart(self) -> None:
        """Forget what has been measured: what came since the last step is not part of the next."""
        self._open.clear()
        self._started = time.perf_counter()


def peak_memory_bytes() -> int:
    """Peak of this rank: allocated on its GPU, else resident in memory (Linux reports KiB)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
