"""Where a step's time goes, and how fast it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from glmexp.engine.flops import Work
from glmexp.launcher import positions
from glmexp.plan.cards import LISTED, known_name

_MEASURED_SIZE = 8192
_MEASURED_S = 0.3


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
        """Seconds by phase since the last call, and ``step`` for the whole; starts anew. Waits for the stream."""
        if self._cuda:
            # Not of the whole device: optimizer states go back to the host beside the next step (``passing``).
            torch.cuda.current_stream().synchronize()
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


@dataclass(frozen=True)
class Peak:
    """What a GPU could do at best."""

    flops: float
    """Operations a second."""
    source: str
    """Where the number comes from, for people."""


@dataclass(frozen=True)
class Speed:
    """What is needed to say how well a GPU is used."""

    work: Work
    peak: Peak

    def metrics(self, operations: int, step_s: float, ranks: int) -> dict[str, float]:
        """perf/tflops_per_gpu and perf/mfu of a step with so many useful operations over all ranks."""
        rate = operations / step_s / ranks
        return {"perf/tflops_per_gpu": rate / 1e12, "perf/mfu": rate / self.peak.flops}


def peak_of(dtype: torch.dtype) -> Peak | None:
    """This rank's GPU: its listed rate, else one that is measured here. None on a CPU."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return listed(name, dtype) or Peak(_measured(dtype), f"measured on this {name} with a matmul of {_MEASURED_SIZE}")


def listed(name: str, dtype: torch.dtype) -> Peak | None:
    """The data sheet's rate for a device; the longest known part of its name counts."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    known = known_name(name)
    if known is None or tf32:
        return None
    return Peak(LISTED[known][dtype == torch.float32], f"listed for {name}")


def _measured(dtype: torch.dtype) -> float:
    """The best rate of square matmuls within a moment."""
    left = torch.randn(_MEASURED_SIZE, _MEASURED_SIZE, device="cuda", dtype=dtype)
    best, until = float("inf"), time.perf_counter() + _MEASURED_S
    torch.matmul(left, left)
    while time.perf_counter() < until:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.matmul(left, left)
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return 2 * _MEASURED_SIZE**3 / best
