"""Train: model, method, data, engine, loop, eval hooks, gather, artifact, proof."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmexp.config.schema import RunConfig
from glmexp.data.batches import StepPlan
from glmexp.data.loader import Batches, ahead, threads
from glmexp.data.prepare import Prepared
from glmexp.engine import build, checkpoint, distributed
from glmexp.engine.host import SwapWatch
from glmexp.engine.loop import Loop
from glmexp.engine.out_of_memory import explained
from glmexp.engine.perf import Stopwatch
from glmexp.engine.stop import StopPoint
from glmexp.entry import gate, planned, proof, resume, speed, training
from glmexp.entry.evaluation import Evaluation
from glmexp.entry.session import Session
from glmexp.entry.training import Finished, Stopped
from glmexp.launcher import positions
from glmexp.launcher.stopping import listener
from glmexp.model.renderer import Renderer


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank of a training run. Returns the exit code; raises what went wrong."""
    return training.run(config, run_folder, train)


def train(here: Session, template: Renderer, data: Prepared) -> Finished | Stopped:
    """Everything that all ranks do together."""
    config = here.config
    batches = Batches.of(data.train, config.data, config.train.seed, template.pad_id)
    plan = training.plan(config, batches)
    total = plan.total_steps(config.train.epochs, config.train.max_steps)

    ds_config = training.lowered(here)
    positions.at("building the model")
    with explained("loading the model", config, lambda: None, here.planned):
        model = training.network(config, ds_config)
        engine = build.initialize(model, config, ds_config, total)
    batches = training.shaped(config, model, batches)
    start = proof.before(engine)
    evaluation = training.evaluation(here, engine, template, data)
    keeper = resume.begin(here, engine, plan, data, template, start, evaluation)
    done = keeper.done
    training.begun(here, engine, ds_config, data, batches, training.facts(here, engine, plan, total, done))
    saves = config.train.save_steps or config.train.stop_after or config.train.stop_after_s
    if saves and done < total and config.entry.name == "train":  # entry=smoke asks whether the process grows
        keeper.saver.prepare()
    positions.at("leak gate")
    here.screen.lines([gate.check(engine, config, plan, batches, template, training.inputs(config, template))])
    with explained("evaluation", config, lambda: engine.module, here.planned):
        if done == 0:
            keeper.check_metric(evaluation.run(0, all_hooks=True))
        elif done < total and evaluation.due(done):
            keeper.judge(done, resume.evaluate(here, evaluation, done))
        reason, stop = _loop(here, engine, plan, batches, template, evaluation, keeper, total)
        if reason is not None:
            keeper.saver.close()
            return training.stopped(here, keeper.saved, reason, stop.by_signal)
        final = evaluation.run(total, all_hooks=True)
    checkpoint.check_finite(engine, total)  # no later loss would show what the last step has spoiled
    keeper.judge(total, final)
    keeper.saver.close()
    return training.finished(here, engine, template, data, start, evaluation, done, total)


@dataclass(frozen=True)
class _Between:
    """What happens between two optimizer steps: a checkpoint, an evaluation, the question whether to stop."""

    save_steps: int | None
    total: int
    evaluation: Evaluation
    keeper: resume.Keeper
    stop: StopPoint
    watch: Stopwatch

    def after(self, step: int, reason: str | None) -> str | None:
        """After ``step``, with the reason to stop that it came with. Returns the reason that stands."""
        keeper, evaluation = self.keeper, self.evaluation
        keeper.saver.check()
        if step == self.total:
            reason = None  # it is done
        due = self.save_steps is not None and (step == self.total or step % self.save_steps == 0)
        if reason is not None or due:
            with self.watch.phase("save"):
                keeper.save(step, evaluation)
        if reason is None and step < self.total and evaluation.due(step):
            with self.watch.phase("eval"):
                metrics = evaluation.run(step, all_hooks=False)
            keeper.judge(step, metrics)
            reason = self.stop.reason(step, distributed.sum_over_ranks(self.stop.flags()))  # it may have taken long
            if reason is not None:
                keeper.save(step, evaluation)
        return reason


def _loop(
    here: Session,
    engine: Any,
    plan: StepPlan,
    batches: Batches,
    template: Renderer,
    evaluation: Evaluation,
    keeper: resume.Keeper,
    total: int,
) -> tuple[str | None, StopPoint]:
    """The optimizer steps up to ``total``, with evaluation and checkpoints between them. Returns why it ended early."""
    train, data, done = here.config.train, here.config.data, keeper.done
    ear = listener()
    stop = StopPoint(train.stop_after, train.stop_after_s, lambda: ear is not None and ear.agreed, here.began)
    workers = threads(data.num_workers, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def steps() -> Iterator[tuple[int, list[dict[str, Any]]]]:
        made = ahead(lambda step: batches.step(plan, step), range(done, total), workers, data.prefetch)
        return ((step + 1, micro_batches) for step, micro_batches in made)

    watch, swap, expected = speed.stopwatch(here), SwapWatch(), planned.metrics(here.plan)
    between = _Between(train.save_steps, total, evaluation, keeper, stop, watch)
    with here.screen.progress(total, done) as bar:

        def on_metrics(step: int, metrics: dict[str, float]) -> None:
            here.record(step, {**metrics, **expected, "train/epoch": plan.epoch(step), **keeper.spent})
            keeper.spent.clear()
            evaluation.train_losses.append(metrics["train/loss"])
            bar.show(step, metrics["train/loss"], metrics["perf/tokens_per_s"])
            swaps = swap.line(step)
            if swaps is not None:
                here.screen.lines([swaps])

        inputs = training.inputs(here.config, template)
        loop = Loop(
            engine=engine,
            steps=steps(),
            log_steps=train.log_steps,
            on_metrics=on_metrics,
            after_step=between.after,
            inputs=inputs,
            per_rank=training.per_rank(here),
            fused_loss=training.compiles(here.config, engine.module),
            stop=stop,
            notice=lambda line: here.screen.lines([line]),
            guard=lambda phase: explained(phase, here.config, lambda: engine.module, here.planned),
            speed=speed.measured(here, engine.module),
            watch=watch,
        )
        training.phase("loop")
        with speed.closing(watch, here):
            reason = loop.run()
        training.phase("end")
    return reason, stop
