"""What the two training entries share: data, network, what is said, evaluation, the end of a run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from glmexp.config.ds_config import cuts_blocks, gathers_blocks, lower
from glmexp.config.errors import EXIT_STOPPED
from glmexp.config.families import FAMILIES
from glmexp.config.model_rules import attention_kind
from glmexp.config.quoting import typed
from glmexp.config.schema import RunConfig
from glmexp.data.batches import StepPlan
from glmexp.data.loader import Batches
from glmexp.data.packing import model_inputs
from glmexp.data.prepare import Prepared, prepare
from glmexp.engine import build, compiled, distributed, fp8
from glmexp.engine.loop import Batch
from glmexp.engine.loss import padded_inputs
from glmexp.engine.per_rank import FILE, PerRank
from glmexp.engine.perf import peak_memory_bytes
from glmexp.entry import artifact, planned, proof
from glmexp.entry.console import relative
from glmexp.entry.evaluation import Evaluation
from glmexp.entry.proof import Before
from glmexp.entry.session import Session, session
from glmexp.launcher import positions, swap_folder
from glmexp.launcher.folder import MODEL, write_json, write_status
from glmexp.launcher.stopping import Phase, listener
from glmexp.model.build import announce_code, load_network, load_tokenizer
from glmexp.model.renderer import Renderer, renderer
from glmexp.plan.report import short
from glmexp.tracker.metrics_file import MetricsFile


@dataclass(frozen=True)
class Stopped:
    """The run was ended on purpose before its last step, and can go on."""

    exit_code: int


@dataclass(frozen=True)
class Finished:
    """All steps are done, and the artifact is written."""

    faults: list[str]
    """What the proof has found so far."""
    evaluation: Evaluation
    first: int
    """Steps that were done before this start."""
    last: int


def run(config: RunConfig, run_folder: Path, train: Callable[[Session, Renderer, Prepared], Finished | Stopped]) -> int:
    """One rank of a training run by ``train``. Returns the exit code; raises what went wrong."""
    announce_code(config.model)
    positions.at("preparing data")
    # Data first: its mistakes are found before a model is built, and no process group waits for a long preparation.
    template = renderer(config.model.family, load_tokenizer(config.model))
    data = prepare(config.data, config.train.seed, template)
    plan = planned.of(config, data)
    if plan is not None:
        planned.refuse(plan)
    with session(config, run_folder) as here:
        here.plan = plan
        result = train(here, template, data)
    swap_folder.leave()
    if isinstance(result, Stopped):
        return result.exit_code
    # The process group is left: a fresh process judges the artifact with the device to itself.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if here.screen.active:
        _prove_and_close(here, result)
    return 0


def network(config: RunConfig, ds_config: dict[str, Any]) -> Any:
    """The model with the method on it, ready for an engine."""
    if config.precision.base == "fp8":
        fp8.check_device()
    with build.partitioned_loading(ds_config):
        kind, _ = attention_kind(config)
        loaded = load_network(replace(config.model, attention=kind), build.DTYPES[config.precision.dtype])
    model = config.method.apply(loaded, FAMILIES[config.model.family])
    if config.precision.base == "fp8":
        trained = {name for name, _ in build.trainable(model)}
        fp8.convert(model, inner(model), trained, config.precision.base_transposed is not False)
    if config.train.gradient_checkpointing:
        _recompute_activations(model)
    if compiles(config, model):
        if fp8.layers(model):
            fp8.check_compiled()
        if config.method.name == "lora" and (config.zero.stage < 3 or gathers_blocks(config)):
            from glmexp.engine.adapters import make_thin

            make_thin(model)
        compiled.compile_blocks(inner(model))
    return model


def compiles(config: RunConfig, model: Any) -> bool:
    """Whether blocks and loss are compiled."""
    parameters = build.count(build.trainable(model) + build.frozen(model))
    return compiled.wanted(config.train.compile, config.data.packing, cuts_blocks(config), parameters)


def shaped(config: RunConfig, model: Any, batches: Batches) -> Batches:
    """``batches`` as ``model`` is to get them: of one shape where blocks are compiled, else no longer than needed."""
    return batches.of_one_length() if compiles(config, model) else batches


def plan(config: RunConfig, batches: Batches) -> StepPlan:
    micro, accum = config.train.micro_batch_size, config.train.grad_accum
    assert micro is not None, "derived before the run starts"
    assert accum is not None, "derived before the run starts"
    return batches.plan(config.data, micro, accum, distributed.world_size(), distributed.rank(), config.train.seed)


def _recompute_activations(model: Any) -> None:
    """Gradient checkpointing that also works where no input of a layer needs a gradient (a frozen embedding)."""
    inner(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def inner(model: Any) -> Any:
    """The transformers model inside of PEFT's, where there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def evaluation(here: Session, engine: Any, template: Renderer, data: Prepared) -> Evaluation:
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


def begun(
    here: Session, engine: Any, ds_config: dict[str, Any], data: Prepared, batches: Batches, facts: dict[str, str]
) -> None:
    """Write and say what will run."""
    trained, rest = build.count(build.trainable(engine.module)), build.count(build.frozen(engine.module))
    sizes = {"parameters": trained + rest, "trainable_parameters": trained}
    if here.screen.active:
        write_json(here.folder / "ds_config.json", ds_config)
        write_json(here.folder / "data.json", data.record())
        write_json(here.folder / MODEL, sizes)
        here.start_tracker()
        here.screen.lines([*data.report, *batches.report(), *([] if here.plan is None else short(here.plan))])
        here.screen.facts(f"glmexp {here.config.run.name}", facts)


def stopped(here: Session, step: int, reason: str, by_signal: bool) -> Stopped:
    """Everything is on the disk before the first rank ends: a launcher ends the others then. Collective."""
    if here.screen.active:
        lines = here.close_tracker("stopped")
        write_status(here.folder, "stopped", steps=step, reason=reason)
        where = relative(here.folder)
        entry = "" if here.config.entry.name == "train" else f"entry={here.config.entry.name} "
        here.screen.lines(
            [
                f"stopped after step {step} ({reason}); everything is in {where}",
                *lines,
                f"go on: python -m glmexp {entry}{typed('train.resume', where)}",
            ]
        )
    phase("stopped")
    distributed.barrier()
    return Stopped(EXIT_STOPPED if by_signal else 0)


def finished(
    here: Session,
    engine: Any,
    template: Renderer,
    data: Prepared,
    start: Before,
    evaluation: Evaluation,
    done: int,
    total: int,
) -> Finished:
    """What was trained becomes an artifact. Collective; the engine is gone afterwards."""
    positions.at("gathering and writing the artifact", total)
    engine.eval()
    faults = proof.changes(engine, start, here.config.method, total)
    proof.write_probe(engine, data.train.shortest(2), here.folder)
    artifact.write(engine, here.config, here.config.method, template.tokenizer, here.folder, total)
    engine.destroy()
    return Finished(faults, evaluation, done, total)


def phase(phase: Phase) -> None:
    """What a signal would interrupt from here on."""
    ear = listener()
    if ear is not None:
        ear.phase = phase


def per_rank(here: Session) -> PerRank:
    """Numbers of each rank: rank 0 keeps and tells them."""
    if not here.screen.active:
        return PerRank()
    on_gpu = distributed.device().type == "cuda"
    return PerRank(MetricsFile(here.folder / FILE).write, lambda line: here.screen.lines([line]), memory=on_gpu)


def inputs(config: RunConfig, template: Renderer) -> Callable[[Batch], dict[str, Any]]:
    """From a batch on the device to what the network is given."""
    if not config.data.packing:
        return padded_inputs
    gmask_id = getattr(template.tokenizer, "gmask_token_id", None)
    kind, _ = attention_kind(config)
    return lambda batch: model_inputs(batch, config.model.family, gmask_id, kind)


def lowered(here: Session) -> dict[str, Any]:
    """What DeepSpeed is given; what is offloaded to a disk goes into a folder of this run alone. Collective."""
    config = here.config
    if config.offload.nvme_path is not None:
        folder = swap_folder.place(config.offload.nvme_path, here.folder)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            swap_folder.take(folder)
        distributed.barrier()
        config = replace(config, offload=replace(config.offload, nvme_path=str(folder)))
    return lower(config, distributed.world_size())


def facts(here: Session, engine: Any, plan: StepPlan, total: int, done: int) -> dict[str, str]:
    """What will run, for the terminal."""
    config, ranks = here.config, distributed.world_size()
    trained, rest = build.trainable(engine.module), build.frozen(engine.module)
    train = config.train
    kind, reason = attention_kind(config)
    low = fp8.layers(engine.module)
    steps = f"{done} done, on to {total}" if done else str(total)
    return {
        "model": f"{config.model.name} ({config.model.family}), {build.count(trained + rest):,} parameters",
        "attention": " ".join([kind, f"with a dense mask: {reason}" if reason else ""]).strip(),
        "method": f"{config.method.name}, {build.count(trained):,} of them trained",
        "engine": f"ZeRO stage {config.zero.stage}, {config.precision.dtype}, {type(engine.basic_optimizer).__name__}"
        + (", blocks fetched as one piece" if gathers_blocks(config) else "")
        + (", compiled blocks" if compiles(config, engine.module) else "")
        + (f", {len(low)} frozen layers in fp8" if low else ""),
        "ranks": f"{ranks} on {distributed.device().type}",
        "batch": f"{train.batch_size} rows = {train.micro_batch_size} x {train.grad_accum} x {ranks} "
        "(micro batch x accumulation x ranks)",
        "steps": f"{steps} ({plan.report()})",
        "folder": relative(here.folder),
    }


def _prove_and_close(here: Session, end: Finished) -> None:
    """Rank 0, alone: the proof, the table of answers, the last lines."""
    with here.closing_on_failure():
        result = proof.run_fresh(here.folder, end.faults)
    here.screen.answers(end.evaluation.best_table(end.first, end.last), end.first)
    here.screen.lines(
        [
            f"proof: {result['tensors']} trained tensors moved and reload exactly; a fresh process gives the live "
            f"model's logits to {result['logits_difference']:.2g} (allowed {result['logits_allowed']:.2g})",
        ]
    )
    here.tracker.artifact(here.folder / artifact.FOLDER)
    tracker_lines = here.close_tracker("finished")
    write_status(here.folder, "finished", steps=end.last, peak_bytes=peak_memory_bytes())
    where = relative(here.folder)
    named = typed("artifact.path", where)
    here.screen.lines(
        [
            f"everything lies in {where}: metrics.jsonl, config.yaml, ds_config.json, samples/, artifact/, proof.json",
            *tracker_lines,
            "next:",
            f"  python -m glmexp entry=evaluate {named}   # the artifact alone, on held-out rows",
            f"  python -m glmexp entry=generate {named}   # a chat with it",
            "  python -m glmexp method=ptuning zero=stage3   # another method, partitioned weights",
            "  python -m glmexp -m +experiments=rank_and_bucket   # a sweep, grouped in wandb",
        ]
    )
