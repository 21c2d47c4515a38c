"""Gradients of micro batches that are added in place are DeepSpeed's sums to the bit, and need no second buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from glmexp.engine import build
from tests.engine.cells import _engine, _train, configure, rows
from tests.ranks import run_on_ranks

STEPS, MICRO = 2, 3


def both_ways(*words: str) -> list[tuple[list[float], list[float], dict[str, torch.Tensor], int]]:
    """With DeepSpeed's methods and with ours: losses, norms, weights, gradients that were copied to a buffer."""
    found = []
    for own in (True, False):
        config = configure(*words)
        engine = _engine(config, STEPS)
        optimizer: Any = engine.optimizer
        sums = optimizer.copy_grads_in_partition.__self__
        plain, copied = sums.copy, []
        if own:
            del optimizer.copy_grads_in_partition, optimizer.independent_gradient_partition_epilogue
            plain = optimizer.copy_grads_in_partition

        def count(*args: Any, plain: Any = plain, copied: list[Any] = copied) -> None:
            copied.append(args)
            plain(*args)

        if own:
            optimizer.copy_grads_in_partition = count
        else:
            sums.copy = count
        losses, norms = _train(engine, config, *rows(config), STEPS)
        weights = {name: p.detach().clone() for name, p in build.trainable(engine.module)}
        found.append((losses, norms, weights, len(copied)))
        engine.destroy()
    return found


def test_sums_over_micro_batches_are_the_same_bits_without_a_second_buffer(tmp_path: Path) -> None:
    words = ["method=full", "zero=stage2", "precision=bf16", "train.micro_batch_size=1", f"train.grad_accum={MICRO}"]
    for theirs, ours in run_on_ranks(both_ways, *words, folder=tmp_path):
        assert ours[:2] == theirs[:2]
        for name, weight in theirs[2].items():
            assert torch.equal(ours[2][name], weight), name
        assert theirs[3] == MICRO * ours[3], "only the first micro batch of a step is copied"
