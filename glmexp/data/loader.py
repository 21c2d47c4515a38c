"""Batches of the training loop: padded or packed, made by threads ahead of the loop."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from glmexp.config.data_schema import DataSection
from glmexp.data.batches import Places, StepPlan, pick
from glmexp.data.collate import collate
from glmexp.data.packing import collate_packed, filled_length, packs
from glmexp.data.store import Example, Examples

T = TypeVar("T")


@dataclass(frozen=True)
class Batches:
    """The rows of a run: examples, or with packing rows of several examples; and their batches."""

    examples: Examples
    pad_id: int
    budget: int
    """Tokens of a packed row."""
    packed: list[list[int]] | None
    """Examples of each packed row. None: one example a row."""
    length: int | None = None
    """Tokens that every packed row is filled up to. None: a batch is as long as its longest row needs."""

    @staticmethod
    def of(examples: Examples, config: DataSection, seed: int, pad_id: int) -> Batches:
        """As the data section says."""
        rows = packs(examples.lengths, config.max_length, seed) if config.packing else None
        return Batches(examples, pad_id, config.max_length, rows)

    def of_one_length(self) -> Batches:
        """The same rows, each packed one filled up to the longest: the last rows of a pass, which may be nearly empty,
        have the shape of all others then. For compiled blocks, to which a new shape costs more than padding does."""
        if self.packed is None:
            return self
        longest = max(int(self.examples.lengths[row].sum()) for row in self.packed)
        return replace(self, length=filled_length(longest, self.budget))

    @property
    def rows(self) -> int:
        """What a step plan counts."""
        return len(self.examples) if self.packed is None else len(self.packed)

    def plan(
        self, config: DataSection, micro_batch_size: int, grad_accum: int, ranks: int, rank: int, seed: int
    ) -> StepPlan:
        """Which rows this rank passes at which step."""
        lengths = self.examples.lengths if config.group_by_length else None
        return StepPlan(self.rows, micro_batch_size, grad_accum, ranks, rank, seed, config.shuffle, lengths)

    def step(self, plan: StepPlan, step: int) -> list[dict[str, Any]]:
        """This rank's micro batches of optimizer step ``step`` (from 0)."""
        return [_pinned(self.batch(places)) for places in plan.micro_batches(step)]

    def batch(self, places: Places) -> dict[str, Any]:
        """One micro batch; see ``collate`` and ``collate_packed``."""
        if self.packed is None:
            return collate(pick(self.examples, places), self.pad_id)
        rows: list[list[Example]] = []
        for place in places:
            if place is None:
                rows.append([self.examples[self.packed[0][-1]].blank()])
            else:
                rows.append([self.examples[index] for index in self.packed[place]])
        return collate_packed(rows, self.pad_id, self.budget, self.length)

    def report(self) -> list[str]:
        """What packing did."""
        if self.packed is None:
            return []
        rows, length = len(self.packed), self.length or self.budget
        share = self.examples.lengths.sum() / (rows * length)
        filled = "" if self.length is None else "; all are filled up to one length, for which blocks are compiled"
        return [f"packed: {len(self.examples)} examples in {rows} rows of {length} tokens, {share:.1%} full{filled}"]


def _pinned(batch: dict[str, Any]) -> dict[str, Any]:
    """Page-locked where there is a GPU: only then is a copy to it not waited for."""
    import torch

    if not torch.cuda.is_available():
        return batch
    return {name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def threads(wanted: int | None, local_ranks: int) -> int:
    """Threads for ``data.num_workers``: by default one where each rank has a core to spare."""
    cores = len(os.sched_getaffinity(0))
    return (1 if cores >= 2 * local_ranks else 0) if wanted is None else wanted


def ahead(make: Callable[[int], T], steps: Iterable[int], workers: int, depth: int) -> Iterator[tuple[int, T]]:
    """(step, make(step)) in order; with workers, up to ``depth`` steps are being made while one is used."""
    if workers == 0:
        for step in steps:
            yield step, make(step)
        return
    waiting: deque[tuple[int, Future[T]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
    try:
        for step in steps:
            waiting.append((step, pool.submit(make, step)))
            if len(waiting) > depth:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
