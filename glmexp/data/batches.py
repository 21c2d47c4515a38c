"""Which rows a rank passes at which step: known beforehand, so that a resumed run need not walk through the data."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from glmexp.data.store import Example

GROUPED_STEPS = 50
"""Steps whose rows are sorted by length together: enough for similar rows, few enough that the order stays random."""
Places = list[int | None]
"""Row indices of a micro batch; None is a blank place, which counts nothing."""


@dataclass
class StepPlan:
    """Rows of each optimizer step.

    Step ``s`` of an epoch (from 0) sees the rows ``order[s * B : (s + 1) * B]`` whatever the micro batch size, the
    gradient accumulation and the number of ranks are, B being their product. The last step of an epoch has what is
    left; its other places are blank. So no row is repeated and none is left out.
    """

    rows: int
    micro_batch_size: int
    grad_accum: int
    ranks: int
    rank: int
    seed: int
    shuffle: bool
    lengths: np.ndarray | None = None
    """Tokens of each row: rows of similar length are put into the same step. None: lengths do not matter."""
    _order: tuple[int, list[int]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.rows > 0, "a plan needs rows"
        assert min(self.micro_batch_size, self.grad_accum) > 0, "batch sizes are at least 1"
        assert 0 <= self.rank < self.ranks, f"rank {self.rank} of {self.ranks}"

    @property
    def batch_size(self) -> int:
        """Rows of an optimizer step over all ranks."""
        return self.micro_batch_size * self.grad_accum * self.ranks

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every row is passed once."""
        return math.ceil(self.rows / self.batch_size)

    def total_steps(self, epochs: float | None, max_steps: int | None) -> int:
        """Optimizer steps of a run: ``max_steps`` where it is set, else ``epochs``, rounded up to whole steps."""
        if max_steps is not None:
            return max_steps
        assert epochs is not None, "neither train.max_steps nor train.epochs is set"
        # Rounded first: 0.1 epochs of 30 steps are 3 steps, and 3.0000000000000004 would be 4.
        return max(1, math.ceil(round(epochs * self.steps_per_epoch, 6)))

    def epoch(self, step: int) -> float:
        """Passes over the data after ``step`` optimizer steps."""
        whole, part = divmod(step, self.steps_per_epoch)
        return whole + min(1.0, part * self.batch_size / self.rows)

    def window(self, step: int) -> list[int]:
        """Rows of the optimizer step ``step`` (from 0, counted on over epochs) over all ranks."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self.order(epoch)[position * self.batch_size : (position + 1) * self.batch_size]

    def micro_batches(self, step: int) -> list[Places]:
        """This rank's ``grad_accum`` micro batches of ``micro_batch_size`` places."""
        places: Places = list(self.window(step)[self.rank :: self.ranks])
        places += [None] * (self.micro_batch_size * self.grad_accum - len(places))
        size = self.micro_batch_size
        return [places[start : start + size] for start in range(0, len(places), size)]

    def order(self, epoch: int) -> list[int]:
        """Rows in the order of this epoch; the file's order without shuffling."""
        if not self.shuffle and self.lengths is None:
            return list(range(self.rows))
        # Read once: threads that make batches ahead may be in two epochs at a time.
        known = self._order
        if known is None or known[0] != epoch:
            rows = list(range(self.rows))
            chance = random.Random(f"order {self.seed} {epoch}")
            if self.shuffle:
                chance.shuffle(rows)
            if self.lengths is not None:
                rows = self._grouped(rows, self.lengths, chance)
            known = self._order = (epoch, rows)
        return known[1]

    def _grouped(self, rows: list[int], lengths: np.ndarray, chance: random.Random) -> list[int]:
        """Sort within windows of many steps, then mix the steps; the last, short step stays the last."""
        window = GROUPED_STEPS * self.batch_size
        order: list[int] = []
        for start in range(0, len(rows), window):
            order += sorted(rows[start : start + window], key=lambda row: -int(lengths[row]))
        steps = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        last = [steps.pop()] if len(steps[-1]) < self.batch_size else []
        if self.shuffle:
            chance.shuffle(steps)
        return [row for step in [*steps, *last] for row in step]

    def report(self) -> str:
        """``5 rows, 2 steps an epoch; the last step of an epoch has 1 of 4 rows; no row is repeated or left out``."""
        steps = self.steps_per_epoch
        text = (
            f"{self.rows} {'row' if self.rows == 1 else 'rows'}, {steps} {'step' if steps == 1 else 'steps'} an epoch"
        )
        last = self.rows - (steps - 1) * self.batch_size
        if last < self.batch_size:
            text += f"; the last step of an epoch has {last} of {self.batch_size} rows"
        return f"{text}; no row is repeated or left out"


def eval_batches(rows: int, rank: int, ranks: int, batch_size: int) -> list[Places]:
    """This rank's batches of the rows 0..rows-1, each of them on one rank alone.

    Every rank gets as many batches of the same sizes (what ZeRO stage 3 needs: each forward is a collective), with
    blank places where the rows do not suffice.
    """
    assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
    places: Places = list(range(rank, rows, ranks))
    places += [None] * (math.ceil(rows / ranks) - len(places))
    return [places[start : start + batch_size] for start in range(0, len(places), batch_size)]


def pick(examples: Sequence[Example], places: Places) -> list[Example]:
    """The examples at the places. Blank ones are copies of the shortest there, or of the first row, without labels."""
    present = [examples[place] for place in places if place is not None]
    filler = min(present, key=lambda example: len(example.input_ids), default=examples[0]).blank()
    return [filler if place is None else examples[place] for place in places]
