"""What the rules of every section look at beside the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Of the machine, and of what the user wrote."""

    ranks: int
    gpus: int
    explicit: frozenset[str]
    """Keys that the user set; the others stand at this project's defaults."""
    cores: int | None = None
    """Cores of the machine that the slots of a sweep share; None: not asked."""
