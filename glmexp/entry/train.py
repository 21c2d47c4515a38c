"""Train: model, method, data, engine, loop, eval hooks, gather, artifact, proof."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from glmexp.config.ds_config import lower
from glmexp.config.errors import EXIT_STOPPED
from glmexp.config.families import FAMILIES
from glmexp.config.model_rules import attention_kind
from glmexp.config.schema import RunConfig
from glmexp.data.batches import StepPlan
from glmexp.data.loader import Batches, ahead, threads
from glmexp.data.packing import model_inputs
from glmexp.data.prepare import Prepared, prepare
from glmexp.engine import build, compiled, distributed, per_rank
from glmexp.engine.host import SwapWatch
from glmexp.engine.loop import Batch, Loop
from glmexp.engine.loss import padded_inputs
from glmexp.engine.out_of_memory import explained
from glmexp.engine.perf import peak_memory_bytes
from glmexp.engine.stop import StopPoint
from glmexp.entry import artifact, gate, proof, resume, speed
from glmexp.entry.console import relative
from glmexp.entry.evaluation import Evaluation
from glmexp.entry.session import Session, session
from glmexp.launcher import positions
from glmexp.launcher.folder import write_json, write_status
from glmexp.launcher.stopping import Phase, listener
from glmexp.model.build import announce_code, load_network, load_tokenizer
from glmexp.model.renderer import Renderer, renderer
from glmexp.tracker.metrics_file import MetricsFile


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank of a training run. Returns the exit code; raises what went wrong."""
    announce_code(config.model)
    positions.at("preparing data")
    # Data first: its mistakes are found before a model is built, and no process group waits for a long preparation.
    template = renderer(config.model.family, load_tokenizer(config.model))
    data = prepare(config.data, config.train.seed, template)
    with session(config, run_folder) as here:
        result = _train(here, template, data)
    if isinstance(result, Stopped):
        return result.exit_code
    # The process group is left: a fresh process judges the artifact with the device to itself.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if result is not None:
        _prove_and_close(here, *result)
    return 0


@dataclass(frozen=True)
class Stopped:
    """The run was ended on purpose before its last step, and can go on."""

    exit_code: int


Result = tuple[list[str], Evaluation, int, int] | Stopped | None
"""On rank 0: (faults found so far, evaluation, first step, last step)."""


def _train(here: Session, template: Renderer, data: Prepared) -> Result:
    """Everything that all ranks do together."""
    config, method = here.config, here.config.method
    batches = Batches.of(data.train, config.data, config.train.seed, template.pad_id)
    plan = _plan(config, batches)
    total = plan.total_steps(config.train.epochs, config.train.max_steps)

    ds_config = lower(config, distributed.world_size())
    positions.at("building the model")
    with explained("loading the model", config, lambda: None):
        with build.partitioned_loading(ds_config):
            kind, _ = attention_kind(config)
            network = load_network(replace(config.model, attention=kind), build.DTYPES[config.precision.dtype])
        model = method.apply(network, FAMILIES[config.model.family])
        if config.train.gradient_checkpointing:
            _recompute_activations(model)
        if _compiles(config, model):
            compiled.compile_blocks(_network(model))
        engine = build.initialize(model, config, ds_config, total)
    start = proof.before(engine)
    evaluation = _evaluation(here, engine, template, data)
    keeper = resume.begin(here, engine, plan, data, template, start, evaluation)
    done = keeper.done
    if here.screen.active:
        write_json(here.folder / "ds_config.json", ds_config)
        write_json(here.folder / "data.json", data.record())
        here.start_tracker()
        here.screen.lines([*data.report, *batches.report()])
        here.screen.facts(f"glmexp {config.run.name}", _facts(here, engine, plan, total, done))

    positions.at("leak gate")
    here.screen.lines([gate.check(engine, config, plan, batches, template, _inputs(config, template))])
    with explained("evaluation", config, lambda: engine.module):
        if done == 0:
            keeper.check_metric(evaluation.run(0, all_hooks=True))
        elif done < total and evaluation.due(done) and not resume.evaluated(here, done):
            keeper.judge(done, evaluation.run(done, all_hooks=False))  # the run was ended before it
        reason, stop = _loop(here, engine, plan, batches, template, evaluation, keeper, total)
        if reason is not None:
            return _stop(here, keeper, reason, stop)
        final = evaluation.run(total, all_hooks=True)
    keeper.judge(total, final)
    keeper.saver.close()
    here.tracker.summary(final)

    positions.at("gathering and writing the artifact", total)
    engine.eval()
    faults = proof.changes(engine, start, method, total)
    proof.write_probe(engine, data.train.shortest(2), here.folder)
    artifact.write(engine, config, method, template.tokenizer, here.folder)
    engine.destroy()
    return (faults, evaluation, done, total) if here.screen.active else None


def _plan(config: RunConfig, batches: Batches) -> StepPlan:
    micro, accum = config.train.micro_batch_size, config.train.grad_accum
    assert micro is not None, "derived before the run starts"
    assert accum is not None, "derived before the run starts"
    return batches.plan(config.data, micro, accum, distributed.world_size(), distributed.rank(), config.train.seed)


def _recompute_activations(model: Any) -> None:
    """Gradient checkpointing that also works where no input of a layer needs a gradient (a frozen embedding)."""
    _network(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _compiles(config: RunConfig, model: Any) -> bool:
    parameters = build.count(build.trainable(model) + build.frozen(model))
    return compiled.wanted(config.train.compile, config.data.packing, config.zero.stage, parameters)


def _network(model: Any) -> Any:
    """The transformers model inside of PEFT's, where there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _evaluation(here: Session, engine: Any, template: Renderer, data: Prepared) -> Evaluation:
    """The chosen hooks on the live model."""
    return Evaluation(
        settings=here.config.eval,
        model=engine,
        network=engine.module,
        synced=here.config.zero.stage == 3 and distributed.world_size() > 1,
        renderer=template,
        examples=data.eval,
        samples=here.folder / "samples",
        record=here.record,
        tracker=here.tracker,
        screen=here.screen,
    )


def _stop(here: Session, keeper: resume.Keeper, reason: str, stop: StopPoint) -> Stopped:
    """Everything is on the disk before the first rank ends: a launcher ends the others then. Collective."""
    keeper.saver.close()
    if here.screen.active:
        lines = here.tracker.finish("stopped")
        write_status(here.folder, "stopped", steps=keeper.saved, reason=reason)
        where = relative(here.folder)
        here.screen.lines(
            [
                f"stopped after step {keeper.saved} ({reason}); everything is in {where}",
                *lines,
                f"go on: python -m glmexp train.resume={where}",
            ]
        )
    _phase("stopped")
    distributed.barrier()
    return Stopped(EXIT_STOPPED if stop.by_signal else 0)


def _phase(phase: Phase) -> None:
    """What a signal would interrupt from here on."""
    ear = listener()
    if ear is not None:
        ear.phase = phase


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

    def after_step(step: int, reason: str | None) -> str | None:
        keeper.saver.check()
        if step == total:
            reason = None  # it is done
        last = step == total and train.save_steps is not None
        if reason is not None or last or (train.save_steps is not None and step % train.save_steps == 0):
            with watch.phase("save"):
                keeper.save(step, evaluation)
        if reason is None and step < total and evaluation.due(step):
            with watch.phase("eval"):
                metrics = evaluation.run(step, all_hooks=False)
            keeper.judge(step, metrics)
            reason = stop.reason(step, distributed.sum_over_ranks(stop.flags()))  # it may have taken long
            if reason is not None:
                keeper.save(step, evaluation)
        return reason

    watch, swap = speed.stopwatch(here), SwapWatch()
    with here.screen.progress(total, done) as bar:

        def on_metrics(step: int, metrics: dict[str, float]) -> None:
            here.record(step, {**metrics, "train/epoch": plan.epoch(step), **keeper.spent})
            keeper.spent.clear()
            evaluation.train_losses.append(metrics["train/loss"])
            bar.show(step, metrics["train/loss"], metrics["perf/tokens_per_s"])
            swaps = swap.line(step)
            if swaps is not None:
                here.screen.lines([swaps])

        inputs = _inputs(here.config, template)
        loop = Loop(
            engine=engine,
            steps=steps(),
            log_steps=train.log_steps,
            on_metrics=on_metrics,
            after_step=after_step,
            inputs=inputs,
            per_rank=_per_rank(here),
            fused_loss=_compiles(here.config, engine.module),
            stop=stop,
            notice=lambda line: here.screen.lines([line]),
            guard=lambda phase: explained(phase, here.config, lambda: engine.module),
            speed=speed.measured(here, engine.module),
            watch=watch,
        )
        _phase("loop")
        with speed.closing(watch, here):
            reason = loop.run()
        _phase("end")
    return reason, stop


def _per_rank(here: Session) -> per_rank.PerRank:
    """Numbers of each rank: rank 0 keeps and tells them."""
    if not here.screen.active:
        return per_rank.PerRank()
    return per_rank.PerRank(MetricsFile(here.folder / per_rank.FILE).write, lambda line: here.screen.lines([line]))


def _inputs(config: RunConfig, template: Renderer) -> Callable[[Batch], dict[str, Any]]:
    """From a batch on the device to what the network is given."""
    if not config.data.packing:
        return padded_inputs
    gmask_id = getattr(template.tokenizer, "gmask_token_id", None)
    kind, _ = attention_kind(config)
    return lambda batch: model_inputs(batch, config.model.family, gmask_id, kind)


def _facts(here: Session, engine: Any, plan: StepPlan, total: int, done: int) -> dict[str, str]:
    """What will run, for the terminal."""
    config, ranks = here.config, distributed.world_size()
    trained, rest = build.trainable(engine.module), build.frozen(engine.module)
    train = config.train
    kind, reason = attention_kind(config)
    steps = f"{done} done, on to {total}" if done else str(total)
    return {
        "model": f"{config.model.name} ({config.model.family}), {build.count(trained + rest):,} parameters",
        "attention": " ".join([kind, f"with a dense mask: {reason}" if reason else ""]).strip(),
        "method": f"{config.method.name}, {build.count(trained):,} of them trained",
        "engine": f"ZeRO stage {config.zero.stage}, {config.precision.dtype}, {type(engine.basic_optimizer).__name__}"
        + (", compiled blocks" if _compiles(config, engine.module) else ""),
        "ranks": f"{ranks} on {distributed.device().type}",
        "batch": f"{train.batch_size} rows = {train.micro_batch_size} x {train.grad_accum} x {ranks} "
        "(micro batch x accumulation x ranks)",
        "steps": f"{steps} ({plan.report()})",
        "folder": relative(here.folder),
    }


def _prove_and_close(here: Session, faults: list[str], evaluation: Evaluation, first: int, last: int) -> None:
    """Rank 0, alone: the proof, the table of answers, the last lines."""
    with here.closing_on_failure():
        result = proof.run_fresh(here.folder, faults)
    here.screen.answers(evaluation.best_table(first, last))
    here.screen.lines(
        [
            f"proof: {result['tensors']} trained tensors moved and reload exactly; a fresh process gives the live "
            f"model's logits to {result['logits_difference']:.2g} (allowed {result['logits_allowed']:.2g})",
        ]
    )
    tracker_lines = here.tracker.finish("finished")
    write_status(here.folder, "finished", steps=last, peak_bytes=peak_memory_bytes())
    where = relative(here.folder)
    here.screen.lines(
        [
            f"everything lies in {where}: metrics.jsonl, config.yaml, ds_config.json, samples/, artifact/, proof.json",
            *tracker_lines,
            "next:",
            f"  python -m glmexp entry=evaluate artifact.path={where}   # the artifact alone, on held-out rows",
            "  python -m glmexp method=ptuning zero=stage3   # another method, partitioned weights",
            "  python -m glmexp -m +experiments=rank_and_bucket   # a sweep, grouped in wandb",
        ]
    )
