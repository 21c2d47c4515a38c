"""Whether everything that is meant to be trained is reached by the backward pass."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from glmexp.engine import distributed
from glmexp.engine.build import trainable


class NoGradientError(RuntimeError):
    """Parameters that are meant to be trained get no gradient: training would leave them as they are, silently."""


class GradientWatch:
    """Context manager around the backward passes of one step.

    Sees which trained parameters a gradient is accumulated into. DeepSpeed's own hooks take the gradient away at stages
    1 to 3, so what ``parameter.grad`` holds afterwards says nothing.
    """

    def __init__(self, model: Any) -> None:
        self._trained = trainable(model)
        self._reached: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> GradientWatch:
        for _, parameter in self._trained:
            hook = parameter.register_post_accumulate_grad_hook(lambda one: self._reached.add(id(one)))
            self._handles.append(hook)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        """Raise NoGradientError where no rank's backward pass has reached a parameter. Collective."""
        found = distributed.sum_over_ranks([float(id(parameter) in self._reached) for _, parameter in self._trained])
        missed = [name for (name, _), count in zip(self._trained, found, strict=True) if not count]
        if missed:
            raise NoGradientError(
                f"{len(missed)} of {len(self._trained)} trained tensors got no gradient in the first step: "
                f"{', '.join(missed[:5])}{', ...' if len(missed) > 5 else ''}. They are not part of what the network "
                "computes, or something between them and the loss cuts the gradient off (a detached input, a frozen "
                "embedding under reentrant checkpointing). Train other layers (method.target_modules, method.patterns, "
                "method.num_layers), or train.gradient_checkpointing=false"
            )
