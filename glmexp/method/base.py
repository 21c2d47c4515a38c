"""What every method offers, and the parts that most share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.families import FamilyFacts

if TYPE_CHECKING:
    import torch
    from torch import nn

    Merge = Callable[..., torch.Tensor]
    Whole = Iterator[tuple[str, list[tuple[str, nn.Parameter]], Merge]]


class Method(Protocol):
    """Settings of a method (a dataclass) that can put themselves on a model and their result into files."""

    name: str
    lr: float

    def apply(self, model: Any, family: FamilyFacts) -> nn.Module:
        """Mark what is trained (``requires_grad``), adding parameters where the method has its own."""

    def must_move(self, names: list[str], steps: int) -> list[str]:
        """Which of the trained parameters must have changed after ``steps`` optimizer steps."""

    def write(self, folder: Path, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Write what was trained. tensors: whole, on the CPU, by the names of ``model.named_parameters()``.

        Returns what a model that ``load`` made must hold, by its own parameter names: mostly ``tensors`` again.
        """

    def load(self, folder: Path, model: Any, family: FamilyFacts) -> nn.Module:
        """Put what ``write`` wrote onto a fresh base. Raises ArtifactError where file and model do not fit exactly."""

    def merged(self, model: Any) -> Whole:
        """The whole model under its released names: (name, the live parameters it is made of, how to make it)."""


def own_weights(model: Any) -> Whole:
    """``Method.merged`` where the model's own parameters are the whole model."""
    for name, parameter in model.named_parameters():
        yield name, [(name, parameter)], lambda weight: weight


def check_keys(file: Path, found: set[str], expected: set[str]) -> None:
    """Raise ArtifactError unless the file holds exactly what the model has a place for."""
    foreign, absent = sorted(found - expected), sorted(expected - found)
    if not foreign and not absent:
        return

    def some(names: list[str]) -> str:
        return f" ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})" if names else ""

    raise ArtifactError(
        Problem(
            str(file),
            f"{len(foreign)} of its {len(found)} keys fit nothing in the model{some(foreign)}; "
            f"{len(absent)} of the model's {len(expected)} would stay at their start values{some(absent)}",
            "use the artifact with the model and method that made it; do not rename keys",
        )
    )


def check_shapes(file: Path, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ArtifactError naming every tensor whose shape is not the model's. Call after ``check_keys``."""
    wrong = [
        Problem(
            f"{file}: {name}",
            f"has shape {shape}, the model's is {expected[name]}",
            "the base model is another one, or the file is not whole",
        )
        for name, shape in found.items()
        if tuple(shape) != tuple(expected[name])
    ]
    if wrong:
        raise ArtifactError(*wrong)
