"""The norm over all tensors at once is DeepSpeed's own, on two ranks too; reductions need no wait of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2

from glmexp.engine import distributed, grad_norm, run_ahead
from tests.engine.cells import STEPS, _engine, _train, configure, rows
from tests.engine.streams import Streams
from tests.ranks import run_on_ranks


def order_of_streams(engine: Any, config: Any) -> tuple[list[str], list[str]]:
    """What DeepSpeed's reductions of a step tell of streams: as they are, and ordered."""
    streams, optimizer = Streams(stage_1_and_2.get_accelerator()), engine.optimizer
    stage_1_and_2.get_accelerator = lambda: streams
    torch.Tensor.record_stream = lambda tensor, stream: None  # none on a CPU
    reduce, optimizer.reduction_stream = optimizer.allreduce_bucket, streams.named("reductions")

    def told(*args: Any, **kwargs: Any) -> Any:
        streams.told.append(f"reduced on {streams.on}")
        return reduce(*args, **kwargs)

    optimizer.allreduce_bucket = told
    found = []
    for ordered in (False, True):
        if ordered:
            run_ahead.order(optimizer, stage_1_and_2)
        streams.told.clear()
        _train(engine, config, *rows(config), 1)
        found.append(list(streams.told))
    return found[0], found[1]


def norms(*words: str) -> tuple[list[float], list[float], float, tuple[list[str], list[str]]]:
    """Norms of STEPS steps with DeepSpeed's function and with ours, what ours says of an infinite gradient, and the
    order of streams."""
    found = []
    for own in (True, False):
        config = configure(*words)
        engine = _engine(config, STEPS)
        assert "unscale_and_clip_grads" in vars(engine.optimizer), "run_ahead is there too"
        if own:
            optimizer = engine.optimizer
            optimizer.get_grad_norm_direct = type(optimizer).get_grad_norm_direct.__get__(optimizer)
        found.append(_train(engine, config, *rows(config), STEPS)[1])
    spoiled = [torch.ones(3), torch.full((2,), torch.inf if distributed.rank() == 0 else 1.0)]
    infinite = float(grad_norm._grad_norm(engine.optimizer, spoiled, None))
    return found[0], found[1], infinite, order_of_streams(engine, config)


def test_all_tensors_at_once_give_deepspeeds_norm(tmp_path: Path) -> None:
    # Small buckets: several reductions in a backward pass.
    words = ("zero=stage2", "precision=bf16", "zero.reduce_bucket_size=5000")
    for theirs, ours, spoiled, (waiting, ordered) in run_on_ranks(norms, *words, folder=tmp_path):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert spoiled == -1.0
        assert "the host waits" in waiting, "or DeepSpeed has mended it"
        assert "the host waits" not in ordered
        reduced = [place for place, line in enumerate(ordered) if line.startswith("reduced")]
        assert len(reduced) > 1
        assert {ordered[place] for place in reduced} == {"reduced on reductions"}
        for before, place in zip([-1, *reduced], reduced, strict=False):
            assert "reductions waits for compute" in ordered[before + 1 : place], "gradients are there"
        assert "compute waits for reductions" in ordered[reduced[-1] :], "what follows reads what was reduced"
