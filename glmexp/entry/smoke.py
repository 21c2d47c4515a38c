"""Smoke: a short run of the user's own configuration, judged by gates before hours are spent on it.

It trains, writes a checkpoint before its last step, loads that into a fresh engine and takes the last step again, and
lets a fresh process judge the artifact: what a long run does, in minutes. Exit code 0, or 1 where a gate fails.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from glmexp.config import registry
from glmexp.config.errors import ArtifactError, VerdictError
from glmexp.config.schema import RunConfig
from glmexp.data.loader import Batches
from glmexp.data.prepare import Prepared, prepare
from glmexp.engine import build, checkpoint, distributed, per_rank, states
from glmexp.engine.checkpoint import CheckpointError, Found, NonFiniteState
from glmexp.engine.checkpoint_files import Pieces, step_name
from glmexp.engine.loop import Loop, NonFiniteError
from glmexp.entry import parity, proof, smoke_gates, training
from glmexp.entry.console import relative
from glmexp.entry.session import Session, session
from glmexp.entry.smoke_gates import Continued, Gate
from glmexp.entry.train import train
from glmexp.entry.training import Stopped
from glmexp.launcher.folder import write_json, write_status
from glmexp.model.build import announce_code, load_tokenizer
from glmexp.model.renderer import Renderer, renderer
from glmexp.tracker.metrics_file import read_metrics

RESULT = "smoke.json"
SPOILT = (NonFiniteError, NonFiniteState, CheckpointError)
"""Ends of a short run that a gate tells better than a traceback; every rank comes to the same one."""


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank. Returns 0; raises VerdictError on rank 0 where a gate fails, and what else goes wrong."""
    if config.smoke.parity:
        return parity.judge(config, run_folder)
    begun = time.monotonic()
    capped = cap(config)
    announce_code(config.model)
    template = renderer(config.model.family, load_tokenizer(config.model))
    data = prepare(config.data, config.train.seed, template)
    data = replace(data, eval=data.eval[: config.smoke.eval_rows])
    failure, faults, continued = None, None, None
    with session(capped, run_folder) as here:
        try:
            end = train(here, template, data)
        except SPOILT as error:
            failure = str(error)
        else:
            assert not isinstance(end, Stopped), "a short run has no planned stop, and takes no signals"
            faults = end.faults
            _free()
            continued = _continue(here, template, data, end.last)
    _free()
    if here.screen.active:
        _judge(here, failure, faults, continued, time.monotonic() - begun)
    return 0


def cap(config: RunConfig) -> RunConfig:
    """The same configuration for a few steps: a checkpoint before the last one, evaluation before and after, and
    nothing in the tracker."""
    train, steps = config.train, config.smoke.steps
    steps = min(train.max_steps or steps, steps)
    warmup = config.optim.warmup_steps
    hooks = {
        name: replace(hook, every=None) if hasattr(hook, "every") else hook for name, hook in config.eval.hooks.items()
    }
    return replace(
        config,
        train=replace(
            train, max_steps=steps, save_steps=max(1, steps - 1), keep_checkpoints=2, keep_best=None, log_steps=1,
            stop_after=None, stop_after_s=None,
        ),
        optim=replace(config.optim, warmup_steps=None if warmup is None else min(warmup, steps // 10)),
        eval=replace(config.eval, hooks=hooks),
        tracker=registry.option("tracker", "none")(name="none"),
    )  # fmt: skip


def _continue(here: Session, template: Renderer, data: Prepared, total: int) -> Continued | str:
    """Load the checkpoint before step ``total`` into a fresh engine and take that step. Collective."""
    config = here.config
    batches = Batches.of(data.train, config.data, config.train.seed, template.pad_id)
    plan = training.plan(config, batches)
    ds_config = training.lowered(here)
    engine = build.initialize(training.network(config, ds_config), config, ds_config, total)
    batches = training.shaped(config, engine.module, batches)
    assert config.train.grad_accum is not None, "derived before the run starts"
    try:
        found = checkpoint.find(here.folder, step_name(total - 1))
        after = checkpoint.find(here.folder, step_name(total))
        assert found is not None, "a name was given"
        assert after is not None, "a name was given"
        checkpoint.load(engine, found, config.train.seed, config.train.grad_accum)
    except ArtifactError as error:  # every rank finds the same
        engine.destroy()
        return "; ".join(problem.message for problem in error.problems)
    losses: list[float] = []

    def last() -> Iterator[tuple[int, list[dict[str, Any]]]]:
        yield total, batches.step(plan, total - 1)

    Loop(
        engine=engine,
        steps=last(),
        log_steps=1,
        on_metrics=lambda _, metrics: losses.append(metrics["train/loss"]),
        after_step=lambda _, reason: reason,
        inputs=training.inputs(config, template),
        fused_loss=training.compiles(config, engine.module),
    ).run()
    continued = _compare(engine, after, total, losses[0])
    engine.destroy()
    return continued


def _compare(engine: Any, after: Found, step: int, loss: float) -> Continued:
    """The engine's state against the checkpoint that the run itself wrote after the same step. Collective."""
    pieces = Pieces(after.folder, sorted(after.state["files"]))
    sums: list[float] = [0.0] * (2 + 2 * len(states.KINDS))

    def look(piece: states.Piece) -> None:
        for number, kind in enumerate(states.KINDS):
            there = torch.empty(piece.length)
            pieces.fill(kind, piece.name, piece.offset, there)
            here = piece.tensors[kind].cpu() if kind in piece.tensors else torch.zeros(piece.length)
            sums[0] += piece.length
            sums[1] += int((here != there).sum())
            sums[2 + 2 * number] += float((here.double() - there.double()).square().sum())
            sums[3 + 2 * number] += float(there.double().square().sum())

    states.read(engine, look)
    elements, differing, *squares = distributed.sum_over_ranks(sums)
    ratios = [
        (off / whole) ** 0.5 if whole else float(off > 0)
        for off, whole in zip(squares[::2], squares[1::2], strict=True)
    ]
    return Continued(step, loss, int(elements), int(differing), max(ratios))


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _judge(
    here: Session, failure: str | None, faults: list[str] | None, continued: Continued | str | None, seconds: float
) -> None:
    """Rank 0, alone: the proof, the table, smoke.json. Raises VerdictError where a gate fails."""
    if faults is not None:
        try:
            proof.run_fresh(here.folder, faults)
            faults = []
        except proof.ProofError:
            faults = proof.read_faults(here.folder)
    lines = read_metrics(here.folder / "metrics.jsonl") if (here.folder / "metrics.jsonl").exists() else {}
    steps = {step: line for step, line in lines.items() if "train/loss" in line}
    ranks: Any = read_metrics(here.folder / per_rank.FILE) if (here.folder / per_rank.FILE).exists() else {}
    exact = distributed.device().type == "cpu" or here.config.train.deterministic
    gates = [
        *smoke_gates.of_training(steps, failure, ranks),
        smoke_gates.continues(steps, continued, exact),
        smoke_gates.proves(faults),
    ]
    failed = [gate.name for gate in gates if gate.passed is False]
    write_json(
        here.folder / RESULT,
        {"passed": not failed, "steps": len(steps), "seconds": seconds, "gates": [asdict(gate) for gate in gates]},
    )
    here.screen.table(f"smoke: {len(steps)} steps in {seconds:.0f} s", ("", *_COLUMNS), [_row(one) for one in gates])
    where = relative(here.folder / RESULT)
    if failed:
        raise VerdictError(f"smoke: {len(failed)} of {len(gates)} gates failed: {', '.join(failed)} ({where})")
    write_status(here.folder, "finished", steps=len(steps))
    here.screen.lines([f"smoke: all {len(gates)} gates passed ({where})"])


_COLUMNS = ("gate", "measured", "allowed", "what to do")


def _row(gate: Gate) -> tuple[str, ...]:
    mark = {True: "ok", False: "FAILED", None: "-"}[gate.passed]
    return (mark, gate.name, gate.measured, gate.allowed, gate.helps if gate.passed is False else "")
