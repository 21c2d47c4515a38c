"""Rules of entry=trainer and entry=smoke: what they cannot do, and keys that only they read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from glmexp.config.entries import GOES_ON, SMOKE_STEPS
from glmexp.config.errors import Problem
from glmexp.config.facts import Facts
from glmexp.config.inherit import AUTO, entry_of
from glmexp.config.schema import RunConfig


def check(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """All of them."""
    name = config.entry.name
    if name == "smoke":
        yield from _smoke(config)
    if name in GOES_ON:
        yield from _resume(config)
    if name != "trainer":
        return
    for one in config.trainer.callbacks:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", one):
            yield Problem(
                "trainer.callbacks", f"{one!r} is not module:Class", "trainer.callbacks=[my_module:MyCallback]"
            )
    if config.train.keep_best is not None:
        yield Problem(
            "train.keep_best",
            "entry=trainer keeps its newest checkpoints alone: the hooks of eval are not the Trainer's own metrics",
            "train.keep_best=null, or entry=train",
        )


def _smoke(config: RunConfig) -> Iterator[Problem]:
    """Gates need steps to look at, all of them from the beginning."""
    steps = config.train.max_steps
    if steps is not None and steps < SMOKE_STEPS:
        yield Problem("train.max_steps", f"{steps} steps are too few for entry=smoke", f"at least {SMOKE_STEPS}")


def _resume(config: RunConfig) -> Iterator[Problem]:
    """Checkpoints of the loop and of the Trainer are different files."""
    resume, name = config.train.resume, config.entry.name
    before = entry_of(Path(resume)) if resume not in (None, AUTO) and resume is not None else None
    if before is not None and before in GOES_ON and before != name:
        yield Problem(
            "train.resume",
            f"{resume} was trained by entry={before}, and entry={name} cannot read its checkpoints",
            f"entry={before} to go on with it, or a new run",
        )
