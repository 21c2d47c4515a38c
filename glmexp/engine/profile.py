"""The time line of a run (``train.profile``): where each step's time goes, and a Chrome trace of a few steps.

Every step is split into data wait, forward, backward, communication, optimizer, eval, save and records (metrics, the
terminal); ``other`` is what is between them. Communication is the time that this rank's work stands still for it:
collectives of the host (gloo) by the clock around them, NCCL's by its kernels in the trace while no other kernel runs.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from glmexp.engine.perf import Stopwatch

FOLDER = "profile"
TRACE = "trace.json.gz"
SKIPPED, TRACED = 2, 3
"""Steps before the trace, which warm up; steps in it."""
_MARK = "glmexp/"
COMMUNICATION, OTHER, STEP = "communication", "other", "step"
PHASES = ("data", "forward", "backward", COMMUNICATION, "optimizer", "eval", "save", "records", OTHER)
HELPS = {
    "data": "data.num_workers and data.prefetch make batches ahead; data.cache_dir keeps prepared rows",
    "forward": "data.packing=true leaves no padding; larger train.micro_batch_size; precision=bf16; "
    "eval and save are no part of it",
    "backward": "a step that computes is as it should be; train.gradient_checkpointing=false where memory allows "
    "(it computes forward twice), data.packing=true, larger train.micro_batch_size",
    COMMUNICATION: "a lower zero stage, more train.grad_accum, zero.overlap_comm=true, larger buckets; or a rank that "
    "the others wait for (ranks.jsonl)",
    "optimizer": "offload=none where memory allows; a lower zero stage; more train.grad_accum",
    "eval": "a larger eval.<hook>.every, fewer held-out rows, fewer eval.generate.max_new_tokens",
    "save": "a larger train.save_steps, a faster disk",
    "records": "a larger train.log_steps",
    OTHER: "a larger train.micro_batch_size: steps are so short that what is around them counts",
}
_COLLECTIVES = (
    "all_gather", "all_gather_base", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter",
)  # fmt: skip

Span = tuple[float, float]


class Collectives:
    """Times the collectives that this thread waits for, DeepSpeed's and our own, while ``open``.

    Those on GPU tensors are only given to NCCL by the host: they are found in the trace.
    """

    def __init__(self, add: Callable[[float], None]) -> None:
        self._add = add
        self._thread = threading.get_ident()
        self._inside = False
        self._before: list[tuple[Any, str, Any]] = []

    def open(self) -> None:
        """Put a clock around every collective of torch and of DeepSpeed's backend."""
        import deepspeed.comm.comm as ds_comm

        for owner in (dist, ds_comm.cdb):
            for name in _COLLECTIVES:
                function = getattr(owner, name, None)
                if owner is not None and function is not None:
                    self._before.append((owner, name, function))
                    setattr(owner, name, self._timed(function))

    def close(self) -> None:
        """As it was."""
        for owner, name, function in self._before:
            if isinstance(owner, type(dist)):
                setattr(owner, name, function)
            else:
                delattr(owner, name)  # the method of its class shows again
        self._before.clear()

    def waits(self, call: Callable[[], Any]) -> Any:
        """``call()``, timed unless it is part of one that is, or another thread's."""
        if self._inside or threading.get_ident() != self._thread:
            return call()
        self._inside, begin = True, time.perf_counter()
        try:
            return call()
        finally:
            self._inside = False
            self._add(time.perf_counter() - begin)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if _on_gpu((*args, *kwargs.values())):
                return function(*args, **kwargs)
            result = self.waits(lambda: function(*args, **kwargs))
            return _Pending(result, self) if hasattr(result, "wait") else result

        return timed


class _Pending:
    """A collective that goes on: waiting for it counts too."""

    def __init__(self, work: Any, collectives: Collectives) -> None:
        self._work, self._collectives = work, collectives

    def wait(self, *args: Any) -> Any:
        return self._collectives.waits(lambda: self._work.wait(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _on_gpu(values: Iterable[Any]) -> bool:
    for value in values:
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, torch.Tensor) and first.is_cuda:
            return True
    return False


@dataclass
class TimeLine(Stopwatch):
    """A stopwatch that keeps what it measured. ``restart`` ends a step, ``close`` the run; rank 0 has a folder."""

    folder: Path | None
    """Run folder; None: measure, so that all ranks do the same, and keep nothing."""
    record: Callable[[int, dict[str, float]], None] = lambda step, row: None
    """Gets the number of each step of this process (from 1) and its seconds: data_s, forward_s, ..., step_s."""
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, STEP), 0.0))
    _phase: str = ""
    _spent: dict[str, float] = field(default_factory=dict)
    _waited: dict[str, float] = field(default_factory=dict)
    _rows: list[dict[str, float]] = field(default_factory=list)
    """Steps that wait for the trace, which says how much of them was NCCL's."""
    _recorded: int = 0
    _exposed: dict[str, float] | None = None
    """Share of each phase in which only NCCL's kernels ran; None: not known yet."""
    _profiler: Any = None
    _began: float | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._collectives = Collectives(self._wait)
        self._collectives.open()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """As a stopwatch, with collectives inside counted by themselves; a named span of the trace."""
        self._phase = name
        span = torch.profiler.record_function(_MARK + name) if self._profiler is not None else nullcontext()
        with span, super().phase(name):
            yield
            if self._profiler is not None and self._cuda:
                torch.cuda.synchronize()  # so that the span holds its kernels
        self._phase = ""

    def read(self) -> dict[str, float]:
        """As a stopwatch; what it gives is kept."""
        seconds = super().read()
        for name, spent in seconds.items():
            if name != STEP:
                self._spent[name] = self._spent.get(name, 0.0) + spent
        return seconds

    def restart(self) -> None:
        """The step is over, with all that came after it."""
        if self._began is not None:
            self._end_step()
            self._trace(self._recorded + len(self._rows))
        self._spent.clear()
        self._waited.clear()
        super().restart()
        self._began = time.perf_counter()

    def close(self) -> list[str]:
        """The run is over: lines for people. What was measured lies in the folder."""
        self._collectives.close()
        if self._spent and self._began is not None:
            self._end_step()
        if self._profiler is not None:
            self._end_trace()
        self._exposed = self._exposed or {}
        self._flush()
        if self.folder is None or not self._recorded:
            return []
        result = {"steps": self._recorded, "seconds": self.sums, "largest": self.largest(), "traced": self._has_trace()}
        (self.folder / FOLDER).mkdir(exist_ok=True)
        (self.folder / FOLDER / "summary.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return self._lines()

    def abandon(self) -> None:
        """The run has failed: no clock is left around the collectives, and nothing more is measured."""
        self._collectives.close()

    def largest(self) -> str:
        """The phase with the largest share."""
        return max(PHASES, key=lambda name: self.sums[name])

    def _lines(self) -> list[str]:
        whole = self.sums[STEP]
        shares = sorted(((self.sums[name] / whole, name) for name in PHASES), reverse=True)
        told = ", ".join(f"{name} {share:.1%}" for share, name in shares if share >= 0.0005)
        where = f"{FOLDER}/steps.jsonl" + (f", {FOLDER}/{TRACE} for Perfetto" if self._has_trace() else "")
        largest = self.largest()
        return [
            f"time line of {self._recorded} steps, {whole:.2f} s: {told} ({where})",
            f"largest: {largest}. What usually helps: {HELPS[largest]}",
        ]

    def _has_trace(self) -> bool:
        return self.folder is not None and (self.folder / FOLDER / TRACE).exists()

    def _wait(self, seconds: float) -> None:
        self._waited[self._phase] = self._waited.get(self._phase, 0.0) + seconds

    def _end_step(self) -> None:
        assert self._began is not None
        self.read()
        row = {name: self._spent.get(name, 0.0) - self._waited.get(name, 0.0) for name in PHASES}
        row[COMMUNICATION] = sum(self._waited.values())
        row[STEP] = time.perf_counter() - self._began
        self._rows.append(row)
        if self._exposed is not None:
            self._flush()

    def _flush(self) -> None:
        """Hand out steps, NCCL's share taken out of their phases."""
        for row in self._rows:
            for name, share in (self._exposed or {}).items():
                row[COMMUNICATION] += row[name] * share
                row[name] -= row[name] * share
            row[OTHER] = row[STEP] - sum(row[name] for name in PHASES if name != OTHER)
            for name, seconds in row.items():
                self.sums[name] += seconds
            self._recorded += 1
            self.record(self._recorded, {f"{name}_s": seconds for name, seconds in row.items()})
        self._rows.clear()

    def _trace(self, done: int) -> None:
        """Begin or end the trace after ``done`` steps."""
        if done == SKIPPED:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if self._cuda else []
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        elif done == SKIPPED + TRACED:
            self._end_trace()
            self._flush()

    def _end_trace(self) -> None:
        self._profiler.stop()
        profiler, self._profiler, self._exposed = self._profiler, None, {}
        if self.folder is None:
            return
        (self.folder / FOLDER).mkdir(exist_ok=True)
        path = self.folder / FOLDER / TRACE
        profiler.export_chrome_trace(str(path))
        if self._cuda:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                self._exposed = exposed(json.load(file)["traceEvents"])


def exposed(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Share of each phase in which NCCL's kernels ran and no other did, from a Chrome trace's events."""
    spans: dict[str, list[Span]] = {"nccl": [], "compute": []}
    phases: dict[str, list[Span]] = {}
    for event in events:
        span = (float(event.get("ts", 0)), float(event.get("ts", 0)) + float(event.get("dur", 0)))
        if event.get("cat") == "kernel":
            spans["nccl" if event["name"].startswith("nccl") else "compute"].append(span)
        elif event.get("cat") == "user_annotation" and event["name"].startswith(_MARK):
            phases.setdefault(event["name"].removeprefix(_MARK), []).append(span)
    nccl, busy = union(spans["nccl"]), union(spans["compute"])
    return {
        name: (covered(nccl, windows) - _covered_by_both(nccl, busy, windows)) / max(1e-9, length(windows))
        for name, windows in ((name, union(spans)) for name, spans in phases.items())
    }


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Sum of the spans."""
    return sum(end - begin for begin, end in spans)


def intersection(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Time that is in both; each in order and without overlaps."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def covered(spans: Sequence[Span], windows: Sequence[Span]) -> float:
    """Time of ``spans`` within ``windows``."""
    return length(intersection(spans, windows))


def _covered_by_both(nccl: Sequence[Span], busy: Sequence[Span], windows: Sequence[Span]) -> float:
    return covered(intersection(nccl, busy), windows)
