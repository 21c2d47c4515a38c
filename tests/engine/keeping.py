"""Runs that are cut in two, on the product's own path: train, save, load elsewhere, go on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from glmexp.config import memory
from glmexp.engine import build, checkpoint, checkpoint_files, distributed, gather, rng, states
from glmexp.engine.stop import StopPoint
from tests.engine import cells

BEFORE, AFTER = 2, 2
ABOUT = {"config": {}, "environment": None, "data": {}, "base": ""}


@dataclass
class Life:
    """Losses of the steps after the cut, and the state at the cut and at the end as digests."""

    losses: list[float]
    at_cut: dict[str, str]
    at_end: dict[str, str]


def saver(engine: Any, folder: Path, keep: int = 2) -> checkpoint.Saver:
    """As a run makes it."""
    return checkpoint.Saver(engine, folder, keep, token="here")


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments, whole, put together from all ranks' pieces on rank 0 (empty elsewhere)."""
    mine: list[tuple[str, str, int, torch.Tensor]] = []

    def take(piece: states.Piece) -> None:
        for kind, tensor in piece.tensors.items():
            mine.append((kind, piece.name, piece.offset, tensor.cpu().clone()))

    states.read(engine, take)
    parts = distributed.gather_to_first(mine)
    found: dict[str, torch.Tensor] = {}
    sizes = {name: int(torch.Size(shape).numel()) for name, shape in states.shapes(engine).items()}
    for kind, name, offset, tensor in [one for part in parts or [] for one in part]:
        place = found.setdefault(f"{kind}:{name}", torch.full((sizes[name],), float("nan")))
        assert place[offset : offset + len(tensor)].isnan().all(), "no element is held twice"
        place[offset : offset + len(tensor)] = tensor
    assert not any(bool(tensor.isnan().any()) for tensor in found.values()), "no element is left out"
    return found


def digests(engine: Any) -> dict[str, str]:
    """One word a tensor of ``whole_state``, on rank 0."""
    return {name: hashlib.sha256(one.numpy().tobytes()).hexdigest() for name, one in whole_state(engine).items()}


@cache
def _rows(max_length: int) -> tuple[Any, int]:
    """The demo's rows for the tiny model, prepared once a process."""
    return cells.rows(cells.configure(f"data.max_length={max_length}", ranks=1))


def _steps(engine: Any, config: Any, first: int, count: int, **more: Any) -> list[float]:
    """Losses of ``count`` optimizer steps from step ``first`` on (from 0)."""
    losses: list[float] = []
    _loop(engine, config, first, count, StopPoint(), losses, **more)
    return losses


def _loop(
    engine: Any, config: Any, first: int, count: int, stop: StopPoint, losses: list[float], **more: Any
) -> str | None:
    """The training loop over ``count`` steps; losses are added to ``losses``. Returns why it stopped early."""
    from glmexp.engine.loop import Loop

    batches = cells.batches(config, *_rows(config.data.max_length), first, count)
    note = lambda _, metrics: losses.append(metrics["train/loss"])  # noqa: E731
    return Loop(engine, batches, 1, note, lambda _, reason: reason, stop=stop, **more).run()


def born(overrides: list[str], folder: str, after: int) -> Life:
    """Train, save, go on without a break for ``after`` steps."""
    config = cells.configure(*overrides, ranks=distributed.world_size())
    engine = cells._engine(config, BEFORE + after)
    _steps(engine, config, 0, BEFORE)
    keeper = saver(engine, Path(folder))
    keeper.save(BEFORE, ABOUT)
    at_cut = digests(engine)
    losses = _steps(engine, config, BEFORE, after)
    keeper.close()
    life = Life(losses, at_cut, digests(engine))
    engine.destroy()
    return life


def reborn(overrides: list[str], folder: str, after: int) -> Life:
    """Load what another life saved, and go on."""
    config = cells.configure(*overrides, ranks=distributed.world_size())
    engine = cells._engine(config, BEFORE + after)
    found = checkpoint.find(Path(folder), None)
    assert found is not None
    checkpoint.load(engine, found, config.train.seed, config.train.grad_accum)
    at_cut = digests(engine)
    for name, (shape, read) in checkpoint_files.masters(found.folder).items() if at_cut else ():
        whole = read()
        assert tuple(whole.shape) == shape
        assert hashlib.sha256(whole.numpy().tobytes()).hexdigest() == at_cut[f"master:{name}"], name
    _weights_are_masters(engine)
    life = Life(_steps(engine, config, BEFORE, after), at_cut, digests(engine))
    engine.destroy()
    return life


def _weights_are_masters(engine: Any) -> None:
    trained = build.trainable(engine.module)
    masters = dict(gather.masters(trained, engine.optimizer))
    for name, tensor in gather.whole(trained):
        if tensor is not None:
            assert torch.equal(tensor, masters[name].cpu().to(tensor.dtype)), name


def lives(writers: list[list[str]], folder: str, after: int = AFTER) -> list[Life]:
    """``born`` of each, one after another on these ranks."""
    return [born(words, f"{folder}/{number}", after) for number, words in enumerate(writers)]


def reborn_from(
    pairs: list[tuple[list[str], str]], group_elements: int | None = None, after: int = AFTER
) -> list[Life]:
    """``reborn`` of each (words, folder of a life), with smaller optimizer groups if asked for."""
    memory.GROUP_ELEMENTS = group_elements or memory.GROUP_ELEMENTS
    memory.PASSING_ELEMENTS = group_elements or memory.PASSING_ELEMENTS
    return [reborn(words, folder, after) for words, folder in pairs]


def random_numbers(folder: str) -> tuple[list[float], list[float]]:
    """Numbers drawn after a state was taken, and again after it was put back."""
    import random

    import numpy as np

    def draw() -> list[float]:
        return [random.random(), float(np.random.standard_normal()), float(torch.rand(()))]

    np.random.standard_normal()
    tensors, plain = rng.state()
    first = draw()
    rng.set_state({name: tensor.clone() for name, tensor in tensors.items()}, plain)
    return first, draw()


def files_of(folder: Path) -> list[str]:
    """Names in the newest checkpoint."""
    step = checkpoint_files.steps(folder)[-1]
    return sorted(path.name for path in (folder / "checkpoints" / f"step-{step}").iterdir())
