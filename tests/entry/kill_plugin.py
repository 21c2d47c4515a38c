"""Ends a run with kill -9 at a chosen moment: named in GLMEXP_PLUGINS, so that the product knows nothing of tests.

KILL_AT: ``<moment>:<step>:<victim>``. Moments: ``start`` and ``accumulated`` (before and after a step's backward
passes), ``data`` (in the middle of a rank's file), ``state`` (before state.json), ``named`` (the folder has its name,
latest does not say so), ``eval`` (its numbers are known and not yet recorded). Victim: a rank's number, or ``parent``.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

FILE = "KILLED"


def _strike(victim: str) -> None:
    """kill -9, and leave a mark that it was done."""
    with open(os.path.join(os.environ["KILL_MARKS"], FILE), "a", encoding="utf-8") as marks:
        marks.write(f"{os.environ['KILL_AT']}\n")
    os.kill(os.getppid() if victim == "parent" else os.getpid(), signal.SIGKILL)
    if victim == "parent":
        time.sleep(60)  # nothing more happens in this rank: the kernel's SIGTERM ends it


def _before(function: Callable[..., Any], wanted: Callable[..., bool], victim: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **more: Any) -> Any:
        if wanted(*args, **more):
            _strike(victim)
        return function(*args, **more)

    return wrapped


def _after(function: Callable[..., Any], wanted: Callable[..., bool], victim: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **more: Any) -> Any:
        result = function(*args, **more)
        if wanted(*args, **more):
            _strike(victim)
        return result

    return wrapped


def _aim(moment: str, step: int, victim: str) -> None:
    from glmexp.engine import checkpoint, checkpoint_files
    from glmexp.engine.loop import Loop
    from glmexp.entry import evaluation

    def at_step(engine: Any) -> bool:
        return engine.global_steps + 1 == step

    if moment == "start":
        Loop._forward_backward = _before(Loop._forward_backward, lambda loop, *_: at_step(loop.engine), victim)
    elif moment == "accumulated":
        Loop._plain_grad_norm = _before(Loop._plain_grad_norm, lambda loop: at_step(loop.engine), victim)
    elif moment == "data":
        whole = checkpoint_files.write_tensors

        def half(path: Any, entries: Any, about: Any, data: Any) -> Any:
            if f"step-{step}." in str(path):
                part = next(iter(data))
                path.write_bytes(bytes(part[: len(part) // 2]))
                _strike(victim)
            return whole(path, entries, about, data)

        checkpoint_files.write_tensors = half
    elif moment == "state":
        wanted = lambda path, value: f"step-{step}." in str(path) and path.name == checkpoint_files.STATE  # noqa: E731
        checkpoint_files.write_json = _before(checkpoint_files.write_json, wanted, victim)
    elif moment == "named":
        named = lambda path, text: path.name == checkpoint_files.LATEST and text == f"step-{step}\n"  # noqa: E731
        checkpoint_files.write_text = _before(checkpoint_files.write_text, named, victim)
    elif moment == "eval":
        recorded = lambda one, where: where == step  # noqa: E731
        evaluation.Evaluation._context = _after(
            evaluation.Evaluation._context, lambda one, where, answered: recorded(one, where), victim
        )
    else:
        raise AssertionError(moment)
    del checkpoint


if "RANK" in os.environ and os.environ.get("KILL_AT"):
    _moment, _step, _victim = os.environ["KILL_AT"].split(":")
    if _victim in ("parent", os.environ["RANK"]) and (_victim != "parent" or os.environ["RANK"] == "0"):
        _aim(_moment, int(_step), _victim)
