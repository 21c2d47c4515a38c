"""Conversion of single values: what is accepted, as which type, and what is refused with which words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmexp.config.errors import ConfigError
from glmexp.config.load import BadValueError, UnusableValueError, convert, describe, dump, examine, load
from glmexp.config.schema import Bound, Count
from tests.config.helpers import config

STAGE = Annotated[int, Bound(low=0, high=3)]
RATE = Annotated[float, Bound(above=0, below=1)]


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (5e8, int, 500_000_000),
        ("5e8", int, 500_000_000),
        ("8", int, 8),
        ("12345678901234567890", int, 12345678901234567890),
        (3, float, 3.0),
        ("1e-5", float, 1e-5),
        (" 1e-5 ", float, 1e-5),
        (None, Count | None, None),
        ("true", bool, True),
        ("q_proj", list[str], ["q_proj"]),
        (["0.9", 1], list[float], [0.9, 1.0]),
        (7, str, "7"),
        ("cpu", Literal["cpu"] | None, "cpu"),
        ({"A": 1}, dict[str, str], {"A": "1"}),
    ],
)
def test_accepted(value: Any, hint: Any, expected: Any) -> None:
    result = convert(value, hint)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1.5, int),
        (True, int),
        ("1.5", int),
        ("", int),
        ([1], int),
        (None, int),
        (True, float),
        ("abc", float),
        ("nan", float),
        (float("inf"), float),
        (1, bool),
        ("yes", bool),
        ("True", bool),
        (4, STAGE),
        (-1, STAGE),
        (0, RATE),
        (1, RATE),
        (0, Count | None),
        ("gpu", Literal["cpu"] | None),
        (None, Literal["cpu"]),
        (True, str),
        (1.0, str),
        ({"a": 1}, str),
        ("x", dict[str, str]),
    ],
)
def test_refused(value: Any, hint: Any) -> None:
    with pytest.raises(BadValueError):
        convert(value, hint)


@settings(max_examples=200, deadline=None)
@given(st.integers(min_value=-(2**52), max_value=2**52))
def test_an_integer_is_itself_in_every_spelling(number: int) -> None:
    assert convert(number, int) == convert(str(number), int) == convert(float(number), int) == number
    assert convert(repr(float(number)), int) == number


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_survives_its_own_spelling(number: float) -> None:
    assert convert(repr(number), float) == convert(number, float) == number


def test_descriptions_say_type_range_and_null() -> None:
    assert describe(STAGE) == "a whole number of at least 0 and of at most 3"
    assert describe(RATE | None) == "a number above 0 and below 1, or null"
    assert describe(Literal["cpu"] | None) == "one of cpu, or null"
    assert describe(list[str]) == "a list, each text"


def test_a_tree_with_several_faults_reports_each_and_its_good_values_can_still_be_read() -> None:
    tree = dump(config())
    tree["optim"]["lr"] = "abc"
    tree["zero"]["stage"] = 7
    tree["train"]["bogus"] = {"deep": 1}
    del tree["data"]["shuffle"]
    del tree["gather"]
    loaded, problems = examine(tree)
    assert {problem.where for problem in problems} == {
        "optim.lr", "zero.stage", "train.bogus.deep", "data.shuffle", "gather",
    }  # fmt: skip
    assert loaded.optim.eps == 1e-8
    for wrong in (lambda: loaded.optim.lr, lambda: loaded.zero.stage, lambda: loaded.gather.name):
        with pytest.raises(UnusableValueError):
            wrong()
    with pytest.raises(ConfigError):
        load(tree)
