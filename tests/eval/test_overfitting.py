"""The first sign of overfitting is said, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from glmexp.entry.evaluation import Evaluation


def said(*points: tuple[float, list[float]]) -> list[int]:
    """Places of the evaluations after which a warning was printed."""
    unused: Any = None
    evaluation = Evaluation(
        settings=unused, model=unused, network=unused, synced=False, renderer=unused, examples=[], samples=unused,
        record=unused, tracker=unused, screen=unused,
    )  # fmt: skip
    found = []
    for place, (held_out, trained) in enumerate(points):
        evaluation.train_losses += trained
        if evaluation._overfitting(place, held_out):
            found.append(place)
    return found


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(3.0, []), (2.0, [2.5]), (2.2, [2.0])], [2]),
        ([(3.0, []), (2.0, [2.5]), (1.9, [2.0])], []),
        ([(3.0, []), (2.0, [2.0]), (2.2, [2.5])], []),
        ([(3.0, []), (3.5, [2.0])], []),
        ([(3.0, []), (2.0, [2.5, 2.3]), (2.1, [2.2, 2.0]), (2.0, [1.5]), (2.1, [1.0])], [2, 4]),
    ],
    ids=["held_out_rises", "both_fall", "both_rise", "nothing_to_compare_with", "twice"],
)
def test_warning(points: list[tuple[float, list[float]]], expected: list[int]) -> None:
    assert said(*points) == expected
