"""Which rows of a run the leak gate looks at (see ``glmexp.engine.leak``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glmexp.config.schema import RunConfig
from glmexp.data.batches import StepPlan
from glmexp.data.loader import Batches
from glmexp.engine import leak
from glmexp.engine.loop import Batch
from glmexp.model.renderer import Renderer

CANDIDATES = 16
"""Rows of the first step of which the shortest and the longest are looked at."""


def check(
    engine: Any,
    config: RunConfig,
    plan: StepPlan,
    batches: Batches,
    template: Renderer,
    inputs: Callable[[Batch], dict[str, Any]],
) -> str:
    """Look at two rows of the first step, the same on all ranks. Returns a line for the log. Raises DataError."""
    places = plan.window(0)[:CANDIDATES]
    if batches.packed is None:
        lengths = batches.examples.lengths
        places = [
            min(places, key=lambda place: int(lengths[place])),
            max(places, key=lambda place: int(lengths[place])),
        ]
    rows = []
    for place in dict.fromkeys(places[:2]):
        first = batches.examples[place if batches.packed is None else batches.packed[place][0]]
        # With several answers in a row the prompt reaches up to the last one.
        prompt = first.prompt_length - template.given_labels if config.data.supervise == "last" else None
        rows.append(leak.Row(batches.batch([place]), prompt, f"training row of {first.label}"))
    return leak.check(engine, rows, inputs, template.stop_ids)
