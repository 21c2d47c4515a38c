"""One side of a measurement in turns: a training command, all of whose processes are stopped and continued."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from machine import gpus_rest
from processes import Family

from glmexp.engine.host import used_bytes

ROOT = Path(__file__).parents[2]
POLL_S = 0.003
SETTLE_S = 0.2
"""Between the stop of one side and the start of the next: what was given to the GPU is finished first."""
REST_TRIES = 8
ENVIRONMENT = {"TORCH_NCCL_ENABLE_MONITORING": "0", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
"""A stopped process is no hanging one: NCCL's monitor would end it."""


class SideFailed(RuntimeError):
    """A side ended, or did not get on in time."""


@dataclass(frozen=True)
class Side:
    """One measured command."""

    name: str
    command: list[str]
    metrics: Path
    steps: int = 8
    """Of a window."""
    alone: bool = False
    env: dict[str, str] = field(default_factory=dict)
    ranks: int = 1


class Running:
    """A started side."""

    def __init__(self, side: Side, log: Path) -> None:
        self.side = side
        self.started = time.monotonic()
        side.metrics.parent.mkdir(parents=True, exist_ok=True)
        side.metrics.unlink(missing_ok=True)  # of an earlier start
        self._read = 0
        self._rest = b""
        self.unrested = 0
        self.host_bytes, self._host_before = 0, used_bytes()
        """Most memory of the host that was taken beyond what was before."""
        self.family = Family(side.command, ROOT, log, {**ENVIRONMENT, **side.env})

    def steps(self, count: int, limit_s: float, what: str) -> list[tuple[float, dict[str, float]]]:
        """The next ``count`` steps with the time at which each was seen. Raises SideFailed."""
        seen: list[tuple[float, dict[str, float]]] = []
        for _ in self.coming(seen, count, limit_s, what):
            time.sleep(POLL_S)
        return seen

    def coming(
        self, seen: list[tuple[float, dict[str, float]]], count: int, limit_s: float, what: str
    ) -> Iterator[None]:
        """Put the next ``count`` steps into ``seen`` as they come; yields while there are fewer. Raises SideFailed."""
        deadline = time.monotonic() + limit_s
        while True:
            # Asked before the file is read: what it wrote before its end counts.
            code = self.family.exit_code
            seen += [(time.monotonic(), line) for line in self._new_lines()]
            self.host_bytes = max(self.host_bytes, used_bytes() - self._host_before)
            if len(seen) >= count:
                return
            if code is not None:
                raise SideFailed(f"{self.side.name} ended with exit code {code} in {what}:\n{self.family.last_lines()}")
            if time.monotonic() > deadline:
                raise SideFailed(
                    f"{self.side.name}: {len(seen)} of {count} steps in {limit_s:.0f} s of {what}:\n"
                    f"{self.family.last_lines()}"
                )
            yield

    def _new_lines(self) -> list[dict[str, float]]:
        if not self.side.metrics.exists():
            return []
        with self.side.metrics.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        return [line for line in map(json.loads, filter(None, whole)) if "perf/step_s" in line]

    def stop(self) -> None:
        """Stop it. With several ranks until no collective is left that waits for a stopped one: that would run on."""
        self.family.stop()
        time.sleep(SETTLE_S)
        if self.side.ranks > 1:
            for _ in range(REST_TRIES):
                if gpus_rest():
                    break
                self.family.go_on()
                time.sleep(0.05)
                self.family.stop()
            else:
                self.unrested += 1
        # A step that ended before the stop arrived is none of the next window.
        self._new_lines()
