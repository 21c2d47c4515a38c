"""Where a sweep lies and what it has to run: a folder of its own, or one that is taken up where it was left, if the
command line is the same."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glmexp.config import redact
from glmexp.config.compose import Request
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.quoting import typed
from glmexp.config.schema import RunConfig
from glmexp.config.sweep import Swept, folder_name
from glmexp.launcher import folder, trials
from glmexp.launcher.trials import FINISHED, OUTCOMES, RUNNING, SweepState, Trial

Job = tuple[Trial, RunConfig]


def claimed(asked: Request, swept: Swept, line: list[str]) -> tuple[Request, Path]:
    """The sweep's folder; a new one that another sweep of the same second has made is left to it. Raises ConfigError
    where none can be made."""
    wanted = Path(swept.folder).absolute()
    if not swept.folder_chosen:
        _tell_unfinished(wanted.parent, line)
    try:
        if swept.folder_chosen:
            wanted.mkdir(parents=True, exist_ok=True)
            return asked, wanted
        root = folder.fresh(wanted)
    except OSError as error:
        text = f"{swept.folder} cannot be made: {error.strerror}"
        raise ConfigError(Problem("hydra.sweep.dir", text, "a folder where this user may write")) from error
    moved = [_moved(trial, wanted, root) for trial in asked.trials]
    name = str(Path(swept.folder).with_name(root.name))
    return dataclasses.replace(asked, trials=moved, sweep=dataclasses.replace(swept, folder=name)), root


def _moved(trial: RunConfig, wanted: Path, root: Path) -> RunConfig:
    assert trial.run.dir is not None
    run = dataclasses.replace(trial.run, dir=str(root / Path(trial.run.dir).name))
    trial = dataclasses.replace(trial, run=run)
    if getattr(trial.tracker, "group", None) == wanted.name:
        trial = dataclasses.replace(trial, tracker=dataclasses.replace(trial.tracker, group=root.name))
    return trial


def _tell_unfinished(parent: Path, line: list[str]) -> None:
    """A new sweep never takes over an older one by itself, but whoever meant that shall hear how."""
    for file in sorted(parent.glob(f"sweep-*/{trials.STATE}"), reverse=True):
        older = None
        with suppress(ConfigError):  # whoever names a broken one is told; here it is only passed by
            older = trials.read(file.parent)
        open_trials = [one for one in older.trials if one.state not in OUTCOMES] if older is not None else []
        if older is not None and open_trials and older.line == line:
            place = os.path.relpath(file.parent)
            print(
                f"note: {place} is an unfinished sweep of this line ({len(open_trials)} of "
                f"{len(older.trials)} trials left); {typed('hydra.sweep.dir', place)} goes on with it",
                file=sys.stderr,
            )
            return


def repeatable(words: Sequence[str]) -> list[str]:
    """The command line without secrets and without what only says how to go on."""
    going_on = ("hydra.sweep.dir=", "sweep.retry=", "launcher.slots=")
    return [_shown_word(word) for word in words if not word.startswith(going_on)]


def _shown_word(word: str) -> str:
    key, equals, _ = word.partition("=")
    return f"{key}={redact.HIDDEN}" if equals and redact.is_secret(key) else redact.text(word)


def taken_up(root: Path, line: list[str], asked: Request) -> SweepState:
    """The sweep that lies in ``root``, with what a killed parent left open settled; or a new one."""
    assert asked.sweep is not None
    plan = _plan(asked, asked.sweep)
    state = trials.read(root)
    if state is None:
        return SweepState(root, plan, line)
    problems = [
        Problem(
            "hydra.sweep.dir", f"{root} holds a sweep with {name}={_shown(state.plan.get(name))}, not {_shown(now)}"
        )
        for name, now in plan.items()
        if state.plan.get(name) != now
    ]
    if problems:
        old = Problem("its command line", " ".join(state.line), "use it again, or choose another folder")
        raise ConfigError(*problems, old)
    for trial in state.trials:
        if trial.state == RUNNING:
            trial.state, trial.reason = trials.settle_left_behind(state.folder_of(trial))
            trial.metrics = trials.last_metrics(state.folder_of(trial)) if trial.state == FINISHED else {}
    return state


def _plan(asked: Request, swept: Swept) -> dict[str, Any]:
    """What must be the same for a sweep to be the same one: nothing of a grid, whose trials speak for themselves."""
    settings = swept.settings
    if settings.name == "grid":
        return {"name": "grid"}
    space = {key: dataclasses.asdict(one) for key, one in swept.space.items()}
    return {
        "name": settings.name,
        "metric": settings.metric,
        "direction": settings.direction,
        "seed": settings.seed,
        "space": json.loads(json.dumps(space)),
        "other options": trials.trial_identity(asked.trials[0], {}),
    }


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def grid(state: SweepState, asked: Request) -> list[Job]:
    """The trials of this command line; those that the sweep knows keep their folder. Raises ConfigError."""
    assert asked.sweep is not None
    named = [
        (trials.trial_identity(config, values), config, values)
        for config, values in zip(asked.trials, asked.sweep.values, strict=True)
    ]
    known = {trial.identity: trial for trial in state.trials}
    if known and not any(identity in known for identity, _, _ in named):
        raise ConfigError(
            Problem("hydra.sweep.dir", f"{state.root} holds another sweep: none of its trials is one of these"),
            Problem(
                "its command line",
                " ".join(state.line),
                "use it again with the version of glmexp that began it, or choose another folder",
            ),
        )
    jobs: dict[str, Job] = {}
    for identity, config, values in named:
        if identity in jobs:
            print(f"warning: {values} is the same run as {jobs[identity][0].name}: run once", file=sys.stderr)
            continue
        if identity not in known:
            number = len(state.trials)
            values = redact.redacted(values)
            known[identity] = Trial(number, identity, values, folder_name(number, values))
            state.trials.append(known[identity])
        trial = known[identity]
        run = dataclasses.replace(config.run, dir=str(state.folder_of(trial)))
        jobs[identity] = (trial, dataclasses.replace(config, run=run))
    return list(jobs.values())
