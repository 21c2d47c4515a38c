"""A misspelt key is answered with the right one."""

from __future__ import annotations

import random

import pytest

from glmexp.config.nearest import ELSEWHERE, keys, unknown_key, unknown_option
from tests.config.helpers import refusal

KEYS = sorted(key for key, options in keys().items() if not options or "method=lora" in options)


def misspelt(key: str, number: int) -> str:
    """One letter dropped, doubled, swapped with its neighbour or replaced, anywhere but at the dots."""
    dice = random.Random(number)
    places = [place for place in range(len(key) - 1) if key[place] != "." and key[place + 1] != "."]
    place = dice.choice(places)
    return [
        key[:place] + key[place + 1 :],
        key[:place] + key[place] + key[place:],
        key[:place] + key[place + 1] + key[place] + key[place + 2 :],
        key[:place] + "x" + key[place + 1 :],
    ][number % 4]


@pytest.mark.parametrize("number", range(len(KEYS)))
def test_a_typo_names_the_right_key(number: int) -> None:
    key = KEYS[number]
    wrong = misspelt(key, number)
    if wrong in KEYS:
        pytest.skip(f"{wrong} is a key as well")
    assert key in unknown_key(wrong, "value").fix, wrong


def test_there_are_enough_keys_for_this_to_mean_something() -> None:
    assert len(KEYS) > 60


def test_a_typo_on_the_command_line_is_answered_with_and_without_plus() -> None:
    for word in ("train.max_stepz=3", "+train.max_stepz=3", "++train.max_stepz=3"):
        assert "did you mean train.max_steps?" in refusal(word)


def test_a_right_leaf_in_a_wrong_group_is_found() -> None:
    assert unknown_key("rank", 8).fix == "did you mean method.rank?"
    assert unknown_key("model.rank", 8).fix == "did you mean method.rank?"
    assert unknown_key("stage", 3).fix == "did you mean zero=stage3?"
    assert unknown_key("train.max_length", 3).fix == "did you mean data.max_length or generate.max_length?"
    assert unknown_key("bench.batch_size", 4).fix == "did you mean bench.batch_sizes?", "not eval.batch_size"


def test_names_of_other_trainers_point_to_keys_that_exist() -> None:
    known = keys()
    for name, key in ELSEWHERE.items():
        assert key in known, name
        assert key in unknown_key(name, 1).fix


def test_nothing_is_guessed_where_nothing_is_near() -> None:
    assert "did you mean" not in unknown_key("qqqq.zzzz", 1).fix


def test_an_unknown_option_names_the_nearest_and_all() -> None:
    problem = unknown_option("zero", "stge2", ["stage0", "stage1", "stage2", "stage3"])
    assert problem.fix == "did you mean zero=stage2? options: stage0, stage1, stage2, stage3"
