"""The next trial of a search, chosen from what the earlier ones gave: Optuna's TPE; ``sweep.json`` is its memory."""

from __future__ import annotations

import importlib.util
import logging
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.schema import SweepSection
from glmexp.config.sweep import Choice, Interval, Space, text
from glmexp.launcher.trials import FINISHED, OUTCOMES, Trial


def needs_optuna() -> None:
    """Raise ConfigError where the library of searches is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            Problem("sweep", "search needs Optuna, which is not installed", "pip install 'glmexp[search]'")
        )


def suggest(
    space: Mapping[str, Space], settings: SweepSection, earlier: Sequence[Trial], number: int
) -> dict[str, str]:
    """Values for trial ``number``, as texts.

    They follow from the arguments alone: the sampler is seeded by ``settings.seed`` and ``number`` and told all that is
    known, so that a search that was interrupted goes on as if it had not been. (A sampler that is only seeded again
    would repeat its first choices.) Trials without a finite metric are told as failed, those on their way as running.
    """
    import optuna

    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    logging.getLogger("optuna").setLevel(logging.ERROR)
    seed = random.Random(f"{settings.seed} {number}").getrandbits(32)
    # constant_liar: without it, trials that run at the same time would be chosen close to one another.
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(direction=settings.direction, sampler=sampler)
    distributions = {key: _distribution(one) for key, one in space.items()}
    for trial in earlier:
        study.add_trial(_told(trial, settings, space, distributions))
    asked = study.ask(fixed_distributions=distributions).params
    return {
        key: value if isinstance(value, str) else text(value, _interval(space[key])) for key, value in asked.items()
    }


def _interval(space: Space) -> Interval:
    assert isinstance(space, Interval)
    return space


def _distribution(space: Space) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(space, Choice):
        return CategoricalDistribution(space.values)
    if space.whole:
        return IntDistribution(int(space.low), int(space.high), log=space.log, step=int(space.step or 1))
    return FloatDistribution(space.low, space.high, log=space.log, step=space.step)


def _told(trial: Trial, settings: SweepSection, space: Mapping[str, Space], distributions: Mapping[str, Any]) -> Any:
    from optuna.trial import TrialState, create_trial

    assert settings.metric is not None, "composing asks for it"
    value = trial.value(settings.metric)
    if trial.state == FINISHED and math.isfinite(value):
        state = TrialState.COMPLETE
    else:
        state = TrialState.FAIL if trial.state in OUTCOMES else TrialState.RUNNING
    return create_trial(
        state=state,
        value=value if state is TrialState.COMPLETE else None,
        params={key: _number(trial.values[key], one) for key, one in space.items()},
        distributions=dict(distributions),
    )


def _number(value: str, space: Space) -> str | int | float:
    if isinstance(space, Choice):
        return value
    return int(value) if space.whole else float(value)
