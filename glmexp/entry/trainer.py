"""Train through transformers' Trainer: its callbacks and its checkpoints around the model, data and engine of ours."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from glmexp.config import inherit
from glmexp.config.errors import ArtifactError, ConfigError, Problem
from glmexp.config.schema import RunConfig
from glmexp.data.batches import StepPlan
from glmexp.data.loader import Batches, ahead, threads
from glmexp.data.prepare import Prepared
from glmexp.engine import distributed, per_rank
from glmexp.engine.checkpoint import Found
from glmexp.engine.out_of_memory import explained
from glmexp.engine.perf import Stopwatch
from glmexp.engine.stop import StopPoint
from glmexp.engine.trainer import MicroBatches, Steps, StepTrainer, arguments
from glmexp.entry import gate, planned, proof, resume, speed, training
from glmexp.entry.evaluation import Evaluation
from glmexp.entry.session import Session
from glmexp.entry.training import Finished, Stopped
from glmexp.launcher import positions
from glmexp.launcher.folder import write_json
from glmexp.launcher.stopping import listener
from glmexp.model.renderer import Renderer
from glmexp.tracker.metrics_file import MetricsFile

STATE = "glmexp_state.json"
"""In each checkpoint-<n>, written last: what it is held against when a run goes on from it."""


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank of a training run. Returns the exit code; raises what went wrong."""
    callbacks = own_callbacks(config.trainer.callbacks)
    return training.run(config, run_folder, lambda here, template, data: _train(here, template, data, callbacks))


def own_callbacks(names: list[str]) -> list[TrainerCallback]:
    """The callbacks of ``trainer.callbacks``, made. Raises ConfigError for what cannot be imported or is none."""
    made = []
    for name in names:
        module, _, cls = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), cls, None)
        except ModuleNotFoundError as error:
            raise _refused(f"cannot import {module!r}: {error}", "check the name and PYTHONPATH") from error
        if found is None:
            raise _refused(f"{module} has no {cls}", "module:Class, as it stands in the file")
        if not (isinstance(found, type) and issubclass(found, TrainerCallback)):
            raise _refused(f"{name} is no transformers.TrainerCallback", "derive the class from it")
        try:
            made.append(found())
        except TypeError as error:
            raise _refused(f"{name}() failed: {error}", "a class that is made without arguments") from error
    return made


def _refused(found: str, way_out: str) -> ConfigError:
    return ConfigError(Problem("trainer.callbacks", found, way_out))


@dataclass
class _Life(TrainerCallback):
    """What happens around the Trainer's steps: before the first, after each, at each checkpoint."""

    here: Session
    template: Renderer
    data: Prepared
    batches: Batches
    plan: StepPlan
    total: int
    found: Found | None
    ds_config: dict[str, Any]
    stop: StopPoint
    watch: Stopwatch
    bar: Any = None
    trainer: StepTrainer = field(init=False)
    engine: Any = field(default=None, init=False)
    start: proof.Before = field(init=False)
    evaluation: Evaluation = field(init=False)
    fixed: dict[str, Any] = field(init=False)
    reason: str | None = field(default=None, init=False)

    @property
    def done(self) -> int:
        """Steps that a checkpoint brought."""
        return 0 if self.found is None else self.found.step

    def on_engine(self, engine: Any) -> None:
        """The engine is there, and its weights are those that the run began with."""
        self.engine = engine
        self.start = proof.before(engine)
        self.evaluation = training.evaluation(self.here, engine, self.template, self.data)
        self.fixed = resume.told(self.here, self.data, self.template, self.start)
        if self.found is not None:
            _same_engine(self.found, self.here.config)
            resume.same_run(self.found, self.fixed)
            resume.within(self.found, self.total)
            self.evaluation.history[:] = [tuple(one) for one in self.found.state["evaluation"]["history"]]
            self.evaluation.train_losses[:] = self.found.state["evaluation"]["train_losses"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say what runs, look for leaks, evaluate."""
        here, config = self.here, self.here.config
        if config.train.resume is not None and here.screen.active:
            _forget_after(here, self.found)
        facts = training.facts(here, self.engine, self.plan, self.total, self.done)
        facts |= {"trainer": "transformers.Trainer"}
        training.begun(here, self.engine, self.ds_config, self.data, self.batches, facts)
        inputs = training.inputs(config, self.template)
        positions.at("leak gate")
        here.screen.lines([gate.check(self.engine, config, self.plan, self.batches, self.template, inputs)])
        steps = Steps(
            engine=self.engine,
            steps=(),
            log_steps=config.train.log_steps,
            on_metrics=self._on_metrics,
            after_step=lambda step, reason: reason,
            inputs=inputs,
            per_rank=training.per_rank(here),
            fused_loss=training.compiles(config, self.engine.module),
            stop=self.stop,
            notice=lambda line: here.screen.lines([line]),
            guard=lambda phase: explained(phase, config, lambda: self.engine.module, here.planned),
            speed=speed.measured(here, self.engine.module),
            watch=self.watch,
            scheduler=self.trainer.lr_scheduler,
        )
        with explained("evaluation", config, lambda: self.engine.module, here.planned):
            if self.done == 0:
                self.evaluation.run(0, all_hooks=True)
            elif self.done < self.total and self.evaluation.due(self.done):
                resume.evaluate(here, self.evaluation, self.done)
        self.trainer.measure(steps)
        training.phase("loop")

    def _on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.here.record(step, {**metrics, **planned.metrics(self.here.plan), "train/epoch": self.plan.epoch(step)})
        self.evaluation.train_losses.append(metrics["train/loss"])
        self.bar.show(step, metrics["train/loss"], metrics["perf/tokens_per_s"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Evaluate where a hook is due; tell the Trainer to save and end where there is a reason to."""
        step = state.global_step
        reason = None if step == self.total else self.trainer.steps.reason
        if reason is None and step < self.total and self.evaluation.due(step):
            with (
                self.watch.phase("eval"),
                explained("evaluation", self.here.config, lambda: self.engine.module, self.here.planned),
            ):
                self.evaluation.run(step, all_hooks=False)
            reason = self.stop.reason(step, distributed.sum_over_ranks(self.stop.flags()))
        if reason is not None:
            self.reason = reason
            control.should_save = control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has written ``checkpoint-<step>``: add the tokenizer and what it is held against."""
        distributed.barrier()
        if not self.here.screen.active:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.template.tokenizer.save_pretrained(folder)
        evaluation = {"history": self.evaluation.history, "train_losses": self.evaluation.train_losses}
        about = {"step": state.global_step, "ranks": distributed.world_size(), "evaluation": evaluation}
        write_json(folder / STATE, {**self.fixed, **about})


def _train(here: Session, template: Renderer, data: Prepared, callbacks: list[TrainerCallback]) -> Finished | Stopped:
    """Everything that all ranks do together."""
    config, train = here.config, here.config.train
    batches = Batches.of(data.train, config.data, train.seed, template.pad_id)
    plan = training.plan(config, batches)
    total = plan.total_steps(train.epochs, train.max_steps)
    found = _found(here)
    ds_config = training.lowered(here)
    ear = listener()
    stop = StopPoint(train.stop_after, train.stop_after_s, lambda: ear is not None and ear.agreed, here.began)
    life = _Life(here, template, data, batches, plan, total, found, ds_config, stop, speed.stopwatch(here))

    positions.at("building the model")
    with explained("loading the model", config, lambda: None, here.planned):
        model = training.network(config, ds_config)
        batches = life.batches = training.shaped(config, model, batches)
        assert train.grad_accum is not None, "derived before the run starts"
        life.trainer = StepTrainer(
            model,
            config,
            arguments(config, here.folder / inherit.CHECKPOINTS, ds_config, total),
            MicroBatches(plan.steps_per_epoch, train.grad_accum, _stream(config, batches, plan, life.done, total)),
            [life, *callbacks],
            life.on_engine,
        )
    with here.screen.progress(total, life.done) as life.bar, speed.closing(life.watch, here):
        life.trainer.train(resume_from_checkpoint=None if found is None else str(found.folder))
        training.phase("end")
    last = life.trainer.state.global_step
    if life.reason is not None:
        return training.stopped(here, last, life.reason, stop.by_signal)
    if last < total:
        here.screen.lines([f"a callback ended training after step {last} of {total}"])
    with explained("evaluation", config, lambda: life.engine.module, here.planned):
        life.evaluation.run(last, all_hooks=True)
    return training.finished(here, life.engine, template, data, life.start, life.evaluation, life.done, last)


def _stream(
    config: RunConfig, batches: Batches, plan: StepPlan, done: int, total: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    workers = threads(config.data.num_workers, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    make: Callable[[int], list[dict[str, Any]]] = lambda step: batches.step(plan, step)  # noqa: E731
    return ahead(make, range(done, total), workers, config.data.prefetch)


def _found(here: Session) -> Found | None:
    """The Trainer checkpoint that ``train.resume`` means. Raises ArtifactError where one must be and none is."""
    wanted = here.config.train.resume
    if wanted is None:
        return None
    folder = here.folder / inherit.CHECKPOINTS
    whole = sorted(folder.glob(f"checkpoint-*/{STATE}"), key=lambda file: int(file.parent.name.split("-")[1]))
    named = Path(wanted).name
    if named.startswith("checkpoint-"):
        whole = [file for file in whole if file.parent.name == named]
    if whole:
        found = Found(whole[-1].parent, json.loads(whole[-1].read_text(encoding="utf-8")), [])
        here.screen.lines([f"going on from {found.folder.name} of {here.folder}"])
        return found
    if wanted == inherit.AUTO:
        return None
    raise ArtifactError(
        Problem(
            "train.resume",
            f"{here.folder} holds no whole checkpoint of the Trainer: no {folder.name}/checkpoint-<n> with its {STATE}",
            "runs write them with train.save_steps=N; train.resume=auto would begin anew",
        )
    )


def _same_engine(found: Found, config: RunConfig) -> None:
    """DeepSpeed's own checkpoints are those of one number of ranks and one stage. Raises ConfigError."""
    ranks, stage = found.state["ranks"], found.state["config"]["zero"]["stage"]
    problems = []
    now_there = {"launcher.nproc": (ranks, distributed.world_size()), "zero.stage": (stage, config.zero.stage)}
    for key, (before, now) in now_there.items():
        if before != now:
            text = f"{now}, but {found.folder} was saved with {before}, and DeepSpeed's checkpoints fit no other"
            problems.append(Problem(key, text, f"{key}={before}; checkpoints of entry=train fit all"))
    if problems:
        raise ConfigError(*problems)


def _forget_after(here: Session, found: Found | None) -> None:
    """Cut the records back to the checkpoint; what lies beyond it comes again."""
    done = -1 if found is None else found.step
    for folder in (here.folder / inherit.CHECKPOINTS).glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > done:
            shutil.rmtree(folder)
    if here.metrics is not None:
        here.metrics.truncate_after(done)
        MetricsFile(here.folder / per_rank.FILE).truncate_after(done)
