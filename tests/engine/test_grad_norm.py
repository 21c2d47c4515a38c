"""The norm over all tensors at once is DeepSpeed's own, on two ranks too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glmexp.engine import distributed, grad_norm
from tests.engine.cells import STEPS, _engine, _train, configure, rows
from tests.ranks import run_on_ranks


def norms(*words: str) -> tuple[list[float], list[float], float]:
    """Norms of STEPS steps with DeepSpeed's function and with ours, and what ours says of an infinite gradient."""
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
    return found[0], found[1], float(grad_norm._grad_norm(engine.optimizer, spoiled, None))


def test_all_tensors_at_once_give_deepspeeds_norm(tmp_path: Path) -> None:
    for theirs, ours, spoiled in run_on_ranks(norms, "zero=stage2", "precision=bf16", folder=tmp_path):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert spoiled == -1.0
