"""No tracker: metrics stand in the run folder's metrics.jsonl alone."""

from __future__ import annotations

from dataclasses import dataclass

from glmexp.config.registry import register
from glmexp.config.schema import Named
from glmexp.tracker.base import NoTracker


@register("tracker", "none")
@dataclass
class NoneTracker(Named):
    """Nothing to set."""

    def build(self) -> NoTracker:
        """A tracker that shows nothing."""
        return NoTracker()
