"""Whole training runs one after another on ranks that are started once: what ``entry=train`` does between its session
and its proof."""

from __future__ import annotations

from pathlib import Path

from transformers import set_seed

from glmexp.config.compose import run_config
from glmexp.data.prepare import prepare
from glmexp.engine import distributed
from glmexp.entry import train
from glmexp.entry.console import Screen
from glmexp.entry.session import Session
from glmexp.entry.training import Finished
from glmexp.model.build import load_tokenizer
from glmexp.model.renderer import renderer
from glmexp.tracker.base import Guard, NoTracker
from glmexp.tracker.metrics_file import MetricsFile

STEPS = 2
SHORT = (
    "tracker=none",
    "precision=fp32",
    f"train.max_steps={STEPS}",
    "train.micro_batch_size=2",
    "train.grad_accum=1",
)


def whole_runs(cells: dict[str, list[str]], folder: str, common: tuple[str, ...] = SHORT) -> dict[str, list[str]]:
    """Train each cell's overrides into ``folder``/<cell>; what the product found wrong with each."""
    faults = {}
    for name, overrides in cells.items():
        run = Path(folder, name)
        first = distributed.rank() == 0
        if first:
            run.mkdir(parents=True)
        distributed.barrier()
        config = run_config([*common, *overrides], ranks=distributed.world_size(), gpus=0)
        set_seed(config.train.seed)  # as a session begins
        here = Session(
            config=config,
            folder=run,
            screen=Screen(active=first),
            metrics=MetricsFile(run / "metrics.jsonl") if first else None,
            tracker=Guard("none", NoTracker(), warn=print),
        )
        template = renderer(config.model.family, load_tokenizer(config.model))
        end = train.train(here, template, prepare(config.data, config.train.seed, template))
        assert isinstance(end, Finished), name
        faults[name] = end.faults
    return faults
