"""Nothing is called a difference too often, and a real one is found often enough: counted over simulated pairs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from glmexp.compare.statistics import FEWEST, paired, spread

PAIRS = 1000
Simulated = Callable[[np.random.Generator, int, int], np.ndarray]


def tokens(count: int) -> np.ndarray:
    """Supervised tokens of held-out examples: few long ones, many short ones."""
    return np.ceil(np.random.default_rng(9).gamma(2.0, 20.0, count))


def losses(rng: np.random.Generator, pairs: int, count: int) -> np.ndarray:
    """Two artifacts on the same examples: hard ones differ more, long ones less."""
    hardness = rng.lognormal(0, 0.5, (pairs, count))
    return hardness * rng.normal(0, 1, (pairs, count)) / np.sqrt(tokens(count))


def answers(rng: np.random.Generator, pairs: int, count: int) -> np.ndarray:
    """Right (1) and wrong (0) answers: of two artifacts that are right in 75 %, 30 % of the answers differ."""
    drawn = rng.random((pairs, count))
    return np.where(drawn < 0.15, 1.0, np.where(drawn < 0.30, -1.0, 0.0))


@pytest.mark.parametrize("count", [50, 200, 1000])
@pytest.mark.parametrize(("simulated", "weighted"), [(losses, True), (answers, False)])
def test_false_alarms_and_found_differences(simulated: Simulated, weighted: bool, count: int) -> None:
    """A/A: 3 % to 6.5 % of 1,000 pairs. Two standard errors apart: at least 45 % (52 % where the error is known)."""
    weights = tokens(count) if weighted else None
    drawn = simulated(np.random.default_rng(1), PAIRS, count)
    false = np.mean([one.evidence for one in paired(drawn, weights)])
    means = np.average(simulated(np.random.default_rng(2), 4 * PAIRS, count), axis=1, weights=weights)
    found = np.mean([one.evidence for one in paired(drawn + 2 * means.std(), weights)])
    assert (0.03 <= false <= 0.065, found >= 0.45) == (True, True), f"false alarms {false:.3f}, found {found:.3f}"


def test_heavy_tails_and_rare_changes_err_on_the_side_of_silence() -> None:
    rng = np.random.default_rng(1)
    tails = rng.lognormal(0, 1, (PAIRS, 50)) - rng.lognormal(0, 1, (PAIRS, 50))
    assert np.mean([one.evidence for one in paired(tails)]) <= 0.065
    rare = np.where(rng.random((PAIRS, 50)) < 0.05, rng.choice([-1.0, 1.0], (PAIRS, 50)), 0.0)
    assert np.mean([one.evidence for one in paired(rare)]) <= 0.065


def test_the_mean_is_that_over_tokens_and_the_interval_is_the_textbooks_where_there_is_one() -> None:
    values = np.random.default_rng(3).normal(0.1, 1, (1, 400))
    weights = tokens(400)
    (one,) = paired(values, weights)
    assert one.difference == pytest.approx(np.average(values[0], weights=weights))
    assert one.low < one.difference < one.high
    assert (one.high + one.low) / 2 == pytest.approx(one.difference)
    (plain,) = paired(values)
    student = 1.966 * values.std(ddof=1) / math.sqrt(400)  # the 97.5 % quantile of Student's t with 399 degrees
    assert plain.high - plain.difference == pytest.approx(student, rel=0.05)
    assert paired(values, weights) == paired(values, 8 * weights) == [one]  # a power of two: the same bits


def test_answers_that_are_all_equal_are_no_evidence_and_all_better_ones_are() -> None:
    same, better, nearly = np.zeros(50), np.ones(50), np.r_[np.ones(49), 0.0]
    flat, all_of_them, but_one = paired(np.stack([same, better, nearly]))
    assert (flat.difference, flat.low, flat.high, flat.evidence) == (0, 0, 0, False)
    assert (all_of_them.low, all_of_them.high, all_of_them.evidence) == (1, 1, True)
    assert but_one.evidence
    assert math.isfinite(but_one.low)


def test_of_a_handful_of_examples_nothing_is_said() -> None:
    (one,) = paired(np.ones((1, FEWEST - 1)))
    assert (one.difference, one.enough, one.evidence) == (1, False, False)
    assert math.isnan(one.low)
    (none,) = paired(np.ones((1, 0)))
    assert math.isnan(none.difference)


def test_many_examples_are_resampled_in_parts() -> None:
    values = np.random.default_rng(4).normal(0, 1, (1, 5000))
    (one,) = paired(values)
    assert one.high - one.difference == pytest.approx(1.96 * values.std(ddof=1) / math.sqrt(5000), rel=0.05)


def test_seeds_are_a_mean_with_its_spread() -> None:
    assert spread([1.0, 2.0, 4.0]).mean == pytest.approx(7 / 3)
    assert spread([1.0, 2.0, 4.0]).sd == pytest.approx(np.std([1, 2, 4], ddof=1))
    assert (spread([2.0]).sd, spread([2.0]).seeds) == (None, 1)
