"""Ranges of numbers, as annotations of the fields in ``schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Bound:
    """Range of a number: ``low`` and ``high`` inclusive unless ``above``/``below`` says exclusive; its unit."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""


Count = Annotated[int, Bound(low=1)]
Elements = Annotated[int, Bound(low=1, unit="elements")]
ElementsOrNone = Annotated[int, Bound(low=0, unit="elements")]
Rate = Annotated[float, Bound(low=0)]
Seconds = Annotated[float, Bound(above=0, unit="seconds")]
Seed = Annotated[int, Bound(low=0, high=2**32 - 1)]
"""What numpy's generator takes."""
Port = Annotated[int, Bound(low=1, high=65535)]
