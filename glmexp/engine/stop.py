"""After which step a run stops: decided from what every rank knows, so that all stop after the same one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from glmexp.engine import distributed


@dataclass
class StopPoint:
    """The planned end (``train.stop_after``, ``train.stop_after_s``) and the unplanned one (a signal to all ranks)."""

    after_step: int | None = None
    after_s: float | None = None
    signalled: Callable[[], bool] = lambda: False
    """Whether this rank knows that all ranks were asked to stop."""
    began: float = field(default_factory=time.monotonic)
    by_signal: bool = field(default=False, init=False)
    """The reason that was found was a signal."""

    def flags(self) -> list[float]:
        """This rank's part of a sum over all ranks: (knows of a signal, its time is over). Time is rank 0's."""
        over = self.after_s is not None and time.monotonic() - self.began >= self.after_s
        return [float(self.signalled()), float(over and distributed.rank() == 0)]

    def reason(self, step: int, sums: list[float]) -> str | None:
        """Why to stop after ``step``, the same on all ranks; None: go on. A signal counts when all know of it."""
        if sums[0] == distributed.world_size():
            self.by_signal = True
            return "asked by a signal"
        if self.after_step is not None and step >= self.after_step:
            return f"train.stop_after={self.after_step}"
        if sums[1]:
            return f"train.stop_after_s={self.after_s:g}"
        return None
