"""Mistakes in what a sweep goes over, how it goes on, and how it shares the machine out."""

from __future__ import annotations

import pytest

from glmexp.config.arguments import parse
from glmexp.config.compose import Machine, request
from glmexp.config.errors import ConfigError
from tests.config.helpers import refusal


def test_an_endless_sweep_is_refused() -> None:
    assert "optim.lr: interval(0,1) has no end" in refusal("-m", "optim.lr=interval(0,1)", "method.rank=2,4")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["sweep=search", "train.seed=1"], ["search has nothing to choose from", "'method.rank=choice(4,8,16)'"]),
        (["sweep=search", "optim.lr=interval(2,1)"], ["the first number is not below the second"]),
        (["sweep=search", "optim.lr=tag(log,interval(0,1))"], ["a log interval starts above 0"]),
        (["sweep=search", "method.rank=tag(log,choice(1,2))"], ["only an interval can be log"]),
        (["sweep=search", "method.rank=tag(x,choice(1,2))"], ["the tag x means nothing here"]),
        (["sweep=search", "method.rank=2,4", "sweep.metric=null"], ["sweep.metric: is null, and a search needs it"]),
        (["sweep=search", "method.rank=2,4", "eval=none"], ["the hook loss is not chosen", "eval=[loss]"]),
        (["sweep=search", "method.rank=2,4", "sweep.trails=3"], ["there is no such key", "sweep.trials"]),
        (["sweep.trials=3", "method.rank=2,4"], ["sweep.trials: without effect in a grid"]),
        (["sweep.seed=1,2", "method.rank=2,4"], ["sweep.seed: cannot be swept over"]),
        (["launcher.slots=1,2"], ["launcher.slots: cannot be swept over"]),
        (["sweep.retry=crashed", "method.rank=2"], ["sweep.retry: 'crashed' is not", "failed, out_of_memory"]),
    ],
)
def test_mistakes_in_how_a_sweep_goes_on(words: list[str], parts: list[str]) -> None:
    text = refusal("-m", *words)
    for part in parts:
        assert part in text


def test_slots_that_do_not_divide_the_machine_are_refused_with_numbers() -> None:
    words = ("-m", "method.rank=2,4", "launcher.slots=3")
    assert "3 slots do not divide 4 GPUs" in refusal(*words, gpus=4)
    assert "launcher.slots= one of 1, 2, 4" in refusal(*words, gpus=4)
    both = refusal("-m", "method.rank=2", "launcher.slots=2", "launcher.nproc=3", gpus=4)
    assert "2 slots of 3 ranks need 6 GPUs, and there are 4" in both
    with pytest.raises(ConfigError, match="3 slots do not divide 8 cores"):
        request(parse(words), Machine(0, None, cores=8))
