"""Doctor: what an option means here. Runs in the parent, without a run folder and without anything heavy."""

from __future__ import annotations

from collections.abc import Mapping

from glmexp.config.explain import explain
from glmexp.config.schema import RunConfig


def tell(config: RunConfig, origins: Mapping[str, str]) -> int:
    """Print what was asked for; the exit code. ``origins``: dotted key to the file or override behind its value."""
    assert config.doctor.explain is not None, "the rules ask for doctor.explain"
    print(explain(config.doctor.explain, config, origins))
    return 0
