"""Is a difference more than chance? Paired intervals over held-out examples, and the spread over seeds.

The interval is a symmetric bootstrap-t (Efron and Tibshirani 1993, chapter 12; Hall 1988 on its symmetric form, whose
coverage comes closer to what it claims with fewer examples than that of a percentile interval). Weighted means (losses
by tokens) are ratios, whose standard error is the linearised one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

CONFIDENCE = 0.95
FEWEST = 10
"""Examples below which nothing is said: a resample of so few knows nothing of the tails."""
_RESAMPLES = 4000
_SEED = 0
_CHUNK = 1 << 23
"""Numbers of resampled counts at a time (64 MiB)."""
_STEADYING = 0.1
"""Share of the whole sample's variance in that of each resample. Without it, a resample that leaves out the only
examples that differ has no variance, and 49 better answers of 50 would be no evidence."""


@dataclass(frozen=True)
class Interval:
    """A mean difference over paired examples, and where it lies with 95 % confidence."""

    difference: float
    low: float
    high: float
    examples: int

    @property
    def enough(self) -> bool:
        """There were enough examples to say anything."""
        return self.examples >= FEWEST

    @property
    def evidence(self) -> bool:
        """Zero lies outside."""
        return self.enough and not self.low <= 0 <= self.high


def paired(differences: Array, weights: Array | None = None) -> list[Interval]:
    """An interval for each row of ``differences`` (pairs, examples).

    weights: (examples,), such as the supervised tokens of each example; None: all count the same. Deterministic.
    """
    import numpy as np

    pairs, examples = differences.shape
    if examples < FEWEST:
        means = np.average(differences, axis=1, weights=weights) if examples else np.full(pairs, math.nan)
        return [Interval(float(mean), math.nan, math.nan, examples) for mean in means]
    weight = np.ones(examples) if weights is None else weights / weights.mean()
    means = differences @ weight / examples
    deviations = differences - means[:, None]
    errors = _standard_errors(deviations, weight)
    reach = _quantiles(deviations, weight, errors) * errors
    return [
        Interval(float(mean), float(mean - half), float(mean + half), examples)
        for mean, half in zip(means, reach, strict=True)
    ]


def _standard_errors(deviations: Array, weight: Array) -> Array:
    """(pairs,): of a weighted mean, linearised; rounding of equal differences is no spread."""
    import numpy as np

    count = deviations.shape[1]
    errors = np.sqrt(((weight * deviations) ** 2).sum(axis=1) / (count * (count - 1)))
    return np.where(errors < 1e-12 * np.abs(deviations).max(axis=1, initial=1.0), 0.0, errors)


def _quantiles(deviations: Array, weight: Array, errors: Array) -> Array:
    """(pairs,): the 95 % quantile of \\|t\\| over resamples. Sums over a resample are products with its counts."""
    import numpy as np

    count = deviations.shape[1]
    weighted = weight * deviations
    once = weight[None, :]
    found = []
    for counts in _resampled(count):
        total = once @ counts
        mean = weighted @ counts / total
        square = weighted**2 @ counts - 2 * mean * ((weight * weighted) @ counts) + mean**2 * (once**2 @ counts)
        variance = np.maximum(square, 0.0) * count / (count - 1) / total**2
        steadied = (1 - _STEADYING) * variance + _STEADYING * errors[:, None] ** 2
        found.append(np.abs(mean) / np.sqrt(np.where(steadied > 0, steadied, math.inf)))
    return np.quantile(np.concatenate(found, axis=1), CONFIDENCE, axis=1, method="higher")


def _resampled(count: int) -> Iterable[Array]:
    """How often each example is drawn, in parts of (examples, resamples): the same for every pair."""
    return _kept(count) if count * _RESAMPLES <= _CHUNK else _parts(count)


@lru_cache(maxsize=4)
def _kept(count: int) -> tuple[Array, ...]:
    return tuple(_parts(count))


def _parts(count: int) -> Iterator[Array]:
    """Made as they are asked for, so that 100,000 examples fit too."""
    import numpy as np

    draw = np.random.default_rng(_SEED)
    size = max(1, _CHUNK // count)
    for start in range(0, _RESAMPLES, size):
        rows = min(size, _RESAMPLES - start)
        drawn = draw.integers(0, count, (rows, count)) + np.arange(rows)[:, None] * count
        yield np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count).T.astype(np.float64)


@dataclass(frozen=True)
class Spread:
    """Several seeds of one configuration."""

    mean: float
    sd: float | None
    """Sample standard deviation; None of one seed."""
    seeds: int


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation of at least one value."""
    assert values, "a mean needs a value"
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(mean, None, 1)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / (len(values) - 1)), len(values))
