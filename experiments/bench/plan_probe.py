"""One configuration through ``python -m glmexp``'s own code, with a look at the allocator at the edges of each phase.

The process is forked (or started) by plan.py. It does the warm-up steps, waits for its turn, does the measured ones,
writes its result and ends before the artifact is written.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plan_cases import Case

STATS = ("requested_bytes.all.peak", "num_alloc_retries", "num_ooms", "inactive_split_bytes.all.peak")
HOST_SAMPLE_S = 0.05


class Probe:
    """Everything that one rank of one case sees."""

    def __init__(self, case: Case, result: Path, turn: Callable[[], None]) -> None:
        import torch

        self.torch, self.case, self.result, self.turn = torch, case, result, turn
        self.cuda = torch.cuda.is_available()
        self.found: dict[str, Any] = {
            "case": case.name,
            "packed": case.packed,
            "rank": int(os.environ.get("RANK", "0")),
        }
        self.phases: dict[str, dict[str, int]] = {}
        self.steps: list[dict[str, Any]] = []
        self.shapes: list[dict[str, int]] = []
        self.ladder: list[dict[str, Any]] = []
        self.host_before = _host_used()
        self.host_peak = 0
        self.began = time.monotonic()
        threading.Thread(target=self._watch_host, daemon=True).start()

    def _watch_host(self) -> None:
        while True:
            self.host_peak = max(self.host_peak, _host_used())
            time.sleep(HOST_SAMPLE_S)

    # -- the allocator

    def now(self) -> int:
        return self.torch.cuda.memory_allocated() if self.cuda else 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Start, peak and end of what is allocated inside; several of one name in a step keep their extremes."""
        if self.cuda:
            self.torch.cuda.reset_peak_memory_stats()
        start = self.now()
        try:
            yield
        finally:
            peak = self.torch.cuda.max_memory_allocated() if self.cuda else 0
            seen = self.phases.setdefault(name, {"start": start, "peak": peak, "end": 0})
            seen["peak"], seen["end"] = max(seen["peak"], peak), self.now()

    def take_phases(self) -> dict[str, dict[str, int]]:
        taken, self.phases = self.phases, {}
        return taken

    # -- patches

    def install(self) -> None:
        """Around the product's own functions; nothing of what they do changes."""
        from glmexp.config.load import dump
        from glmexp.engine import build, perf
        from glmexp.engine.loop import Loop
        from glmexp.entry import gate, training
        from glmexp.entry.evaluation import Evaluation

        def around(place: Any, name: str, phase: str, seen: Callable[..., None] = lambda *args: None) -> None:
            inner = getattr(place, name)

            def outer(*args: Any, **kwargs: Any) -> Any:
                seen(*args)
                with self.phase(phase):
                    return inner(*args, **kwargs)

            setattr(place, name, outer)

        around(training, "network", "network", lambda config, _: self.found.update(config=dump(config)))
        around(build, "initialize", "initialize", self._count)
        around(gate, "check", "gate")
        around(Evaluation, "run", "eval")
        plain, probe = perf.Stopwatch.phase, self

        @contextmanager
        def measured(watch: Any, name: str) -> Iterator[None]:
            with probe.phase(name), plain(watch, name):
                yield

        perf.Stopwatch.phase = measured  # type: ignore[method-assign]
        run, forward_backward = Loop.run, Loop._forward_backward

        def seen_batches(loop: Any, micro_batches: Any, size: Any) -> Any:
            probe.shapes = [_shape(batch) for batch in micro_batches]
            return forward_backward(loop, micro_batches, size)

        Loop._forward_backward = seen_batches  # type: ignore[method-assign]
        Loop.run = lambda loop: run(probe.hooked(loop))  # type: ignore[method-assign]

    def _count(self, model: Any, *_: Any) -> None:
        tensors = [(getattr(one, "ds_numel", one.numel()), one.requires_grad) for one in model.parameters()]
        self.found["parameters"] = sum(size for size, _ in tensors)
        self.found["trained"] = sum(size for size, trained in tensors if trained)

    def hooked(self, loop: Any) -> Any:
        """The loop with this probe behind each step, and the rungs behind the last."""
        from torch import nn

        self.found["load"] = self.take_phases()
        self.found["optimizer"] = type(loop.engine.basic_optimizer).__name__
        self.found["compiled"] = loop.fused_loss
        assert isinstance(loop.engine.module, nn.Module)
        on_metrics, after_step = loop.on_metrics, loop.after_step
        loop.steps = self._with_rungs(loop.steps)

        def metrics_too(step: int, metrics: dict[str, float]) -> None:
            times = {name: value for name, value in metrics.items() if name.startswith("perf/")}
            self.steps.append({"step": step, "batches": self.shapes, **times})
            if step <= self.case.steps:
                on_metrics(step, metrics)

        def after(step: int, reason: str | None) -> str | None:
            phases = self.take_phases()
            self.steps[-1]["phases"] = phases
            if step > self.case.steps:
                self.ladder.append(self._rung(step, ran=True))
                return None
            if step == self.case.warm_up:
                if self.cuda:
                    self.torch.cuda.synchronize()
                self.found["warm_s"] = time.monotonic() - self.began
                self.turn()
            reason = after_step(step, reason) if step < self.case.steps else self._last(after_step, step, reason)
            self.steps[-1]["phases"].update(self.take_phases())
            return reason

        loop.on_metrics, loop.after_step = metrics_too, after
        return loop

    def _last(self, after_step: Any, step: int, reason: str | None) -> str | None:
        if any("save_steps" in word for word in self.case.overrides):
            after_step(step, reason)
            self.steps[-1]["phases"].update(self.take_phases())
        self.found.update(self._memory())
        if not self.case.rungs:
            self.end("ran")
        return None

    # -- growing micro batches

    def _with_rungs(self, steps: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        row = None
        for step, batches in steps:
            row = batches[0] if row is None else row
            yield step, batches
        for number, rows in enumerate(self.case.rungs, start=1):
            for again in range(2):
                if self.cuda and not again:
                    self.torch.cuda.empty_cache()
                self.asked = rows
                yield self.case.steps + 2 * number + again - 1, [_wider(row, rows)]
        self.end("ran")

    def _rung(self, step: int, ran: bool) -> dict[str, Any]:
        last = self.steps[-1]
        peak = max(phase["peak"] for phase in last["phases"].values()) if ran else None
        return {"rows": self.asked, "ran": ran, "peak": peak, "step_s": last["perf/step_s"] if ran else None,
                "reserved": self._reserved(), "step": step}  # fmt: skip

    def _reserved(self) -> int:
        return self.torch.cuda.memory_reserved() if self.cuda else 0

    # -- the end

    def _memory(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "host_before": self.host_before, "host_peak": self.host_peak,
            "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip
        if self.cuda:
            stats = self.torch.cuda.memory_stats()
            free, total = self.torch.cuda.mem_get_info()
            reserved = self.torch.cuda.max_memory_reserved()
            found |= {"reserved_peak": reserved, "free": free, "total": total, "reserved": self._reserved(),
                      "stats": {name: stats.get(name) for name in STATS}}  # fmt: skip
        return found

    def end(self, outcome: str, **more: Any) -> None:
        """Write the result and leave, without the artifact and without anybody's cleaning up."""
        counted = self.steps[: self.case.steps]
        measured = counted[self.case.warm_up :]
        phases = [self.found.get("load", {}), *(step.get("phases", {}) for step in counted)]
        peak = max((phase["peak"] for one in phases for phase in one.values()), default=0)
        self.found |= {"outcome": outcome, **more, "peak": peak, "wall_s": time.monotonic() - self.began}
        if measured:
            self.found["step_s"] = statistics.median(step["perf/step_s"] for step in measured)
        self.found["steps"] = [*counted[:2], *measured[-1:]]
        self.found["ladder"] = self.ladder
        _write(self.result, self.found)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run(case: Case, words: list[str], result: Path, turn: Callable[[], None]) -> None:
    """Never returns. What goes wrong is part of the result."""
    probe = None
    try:
        from glmexp.launcher.environment import set_defaults

        set_defaults()
        probe = Probe(case, result, turn)
        probe.install()
        from glmexp.__main__ import main

        sys.argv[1:] = words
        code = main(words)
        out_of_memory = probe.cuda and (probe.torch.cuda.memory_stats().get("num_ooms") or 0) > 0
        if out_of_memory and probe.case.rungs and len(probe.steps) >= case.steps:
            probe.ladder.append(probe._rung(0, ran=False))
            probe.end("ran")
        probe.end("out of memory" if out_of_memory else "failed", exit_code=code)
    except BaseException:  # noqa: BLE001 - shown by the parent
        if probe is None:
            _write(result, {"case": case.name, "outcome": "failed", "error": traceback.format_exc()})
        else:
            probe.end("failed", error=traceback.format_exc())
    os._exit(1)


def _write(file: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: the parent looks for it all the time."""
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.replace(file)


def _shape(batch: Any) -> dict[str, int]:
    rows, length = batch["input_ids"].shape
    shape = {"rows": rows, "length": length, "labels": len(batch["predicting"]), "tokens": int(batch["lengths"].sum())}
    if "cu_seq_lens" in batch:
        shape |= {"segments": len(batch["cu_seq_lens"]) - 1, "longest": int(batch["max_length"])}
    return shape


def _wider(batch: Any, rows: int) -> dict[str, Any]:
    """A padded batch with that many rows: those of ``batch`` again and again."""
    import torch

    from glmexp.data.collate import predictions

    there = batch["input_ids"].shape[0]
    places = torch.arange(rows) % there
    wider = {name: batch[name][places] for name in ("input_ids", "attention_mask", "labels", "lengths")}
    return wider | predictions(wider["labels"])


def _host_used() -> int:
    rows = {words[0]: int(words[1]) for words in map(str.split, Path("/proc/meminfo").read_text().splitlines())}
    return 1024 * (rows["MemTotal:"] - rows["MemAvailable:"])
