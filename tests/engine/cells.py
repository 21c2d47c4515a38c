"""One cell of the matrix on ranks, and the plain torch loop that it must equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from glmexp.config.compose import run_config
from glmexp.config.ds_config import lower
from glmexp.config.errors import ConfigError
from glmexp.config.families import FAMILIES
from glmexp.config.schema import RunConfig
from glmexp.data.batches import StepPlan, pick
from glmexp.data.collate import collate
from glmexp.data.prepare import Example, prepare
from glmexp.engine import build, distributed, gather
from glmexp.engine.loop import Loop
from glmexp.engine.loss import loss_sum, supervised_tokens
from glmexp.engine.schedule import lr_factor
from glmexp.entry import artifact, proof, training
from glmexp.model.build import load_network, load_tokenizer
from glmexp.model.renderer import renderer

STEPS = 5


@dataclass
class Trace:
    """What a run of STEPS steps leaves: the numbers that two implementations must share."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def configure(*overrides: str, ranks: int = 2, gpus: int = 0) -> RunConfig:
    """A checked configuration of the demo data, four rows a rank in two micro batches."""
    defaults = ["tracker=none", "train.max_steps=5"]
    if not any(one.startswith("precision=") for one in overrides):
        defaults.append("precision=fp32")
    sizes = [] if any("micro_batch" in one for one in overrides) else ["train.micro_batch_size=2", "train.grad_accum=2"]
    return run_config([*defaults, *sizes, *overrides], ranks=ranks, gpus=gpus)


def rows(config: RunConfig) -> tuple[list[Example], int]:
    """Training rows of the configuration and the padding id."""
    template = renderer(config.model.family, load_tokenizer(config.model))
    return prepare(config.data, config.train.seed, template).train, template.pad_id


def plain_loop(config: RunConfig, ranks: int) -> Trace:
    """The same steps without DeepSpeed: one process, the whole global batch at once, torch's AdamW and clipping."""
    torch.manual_seed(config.train.seed)
    dtype = build.DTYPES[config.precision.dtype]
    model = config.method.apply(load_network(config.model, dtype), FAMILIES[config.model.family]).train()
    examples, pad_id = rows(config)
    batch_size = config.train.micro_batch_size * config.train.grad_accum * ranks
    plan = StepPlan(len(examples), batch_size, 1, 1, 0, config.train.seed, config.data.shuffle)
    parameters = [p for _, p in build.trainable(model)]
    optim = config.optim
    optimizer = torch.optim.AdamW(parameters, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * lr_factor(optim, STEPS, step)
        (places,) = plan.micro_batches(step)
        batch = collate(pick(examples, places), pad_id)
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
        loss = loss_sum(output.logits, batch["labels"]) / supervised_tokens(batch["labels"])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, optim.max_grad_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Trace(losses, norms, {name: p.detach().clone() for name, p in build.trainable(model)})


def _engine(config: RunConfig, steps: int) -> Any:
    """The product's own path from the configuration to a DeepSpeed engine."""
    torch.manual_seed(config.train.seed)
    ds_config = lower(config, distributed.world_size())
    return build.initialize(training.network(config, ds_config), config, ds_config, steps)


def batches(config: RunConfig, examples: Any, pad_id: int, first: int, count: int) -> Iterator[tuple[int, list[Any]]]:
    """This rank's micro batches of ``count`` optimizer steps from step ``first`` on (from 0), numbered from 1."""
    train = config.train
    plan = StepPlan(
        len(examples), train.micro_batch_size, train.grad_accum, distributed.world_size(), distributed.rank(),
        train.seed, config.data.shuffle,
    )  # fmt: skip
    for step in range(first, first + count):
        yield step + 1, [collate(pick(examples, places), pad_id) for places in plan.micro_batches(step)]


def _train(engine: Any, config: RunConfig, examples: Any, pad_id: int, steps: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of ``steps`` optimizer steps."""
    losses, norms = [], []

    def on_metrics(_: int, metrics: dict[str, float]) -> None:
        losses.append(metrics["train/loss"])
        norms.append(metrics["train/grad_norm"])

    Loop(engine, batches(config, examples, pad_id, 0, steps), 1, on_metrics, lambda *_: None).run()
    return losses, norms


def engine_loop(config: RunConfig, *folders: str) -> Trace:
    """STEPS steps on this rank, gathered and written as an artifact with its probe.

    One folder, or several whose names end with ``-<gather option>``: the same weights in each way to gather them.
    """
    engine = _engine(config, STEPS)
    start = proof.before(engine)
    examples, pad_id = rows(config)
    losses, norms = _train(engine, config, examples, pad_id, STEPS)
    masters = gather.masters(build.trainable(engine.module), engine.optimizer)
    trace = Trace(losses, norms, {name: master.float().cpu() for name, master in masters})
    engine.eval()
    faults = proof.changes(engine, start, config.method, STEPS)
    assert not faults, faults
    for folder in folders:
        name = folder.rpartition("-")[2] if len(folders) > 1 else config.gather.name
        _write(engine, replace(config, gather=replace(config.gather, name=name)), folder, examples)
    engine.destroy()
    return trace


def short_runs(cells: dict[str, list[str]], steps: int) -> dict[str, tuple[list[float], list[float]] | str]:
    """Losses and gradient norms of ``steps`` steps for each cell's overrides; the report where one is refused."""
    found: dict[str, tuple[list[float], list[float]] | str] = {}
    for name, overrides in cells.items():
        config = configure(*overrides)
        try:
            engine = _engine(config, steps)
            found[name] = _train(engine, config, *rows(config), steps)
        except ConfigError as error:
            found[name] = error.report()
        else:
            engine.destroy()
    return found


def learns_at(
    overrides: list[str], stages: tuple[int, ...], steps: int = 60
) -> dict[int, tuple[list[float], float, float]]:
    """By stage: training losses, held-out loss before and after."""
    found = {}
    for stage in stages:
        config = configure(*overrides, f"zero=stage{stage}")
        template = renderer(config.model.family, load_tokenizer(config.model))
        data = prepare(config.data, config.train.seed, template)
        engine = _engine(config, steps)
        before = _held_out(engine, data.eval, template.pad_id)
        losses, _ = _train(engine, config, data.train, template.pad_id, steps)
        found[stage] = (losses, before, _held_out(engine, data.eval, template.pad_id))
        engine.destroy()
    return found


def _held_out(engine: Any, examples: Any, pad_id: int) -> float:
    """Mean loss; every rank computes it on all rows."""
    engine.eval()
    total, tokens = 0.0, 0
    for first in range(0, len(examples), 8):
        batch = collate([examples[place] for place in range(first, min(first + 8, len(examples)))], pad_id)
        with torch.no_grad():
            total += float(loss_sum(engine(input_ids=batch["input_ids"], use_cache=False).logits, batch["labels"]))
        tokens += supervised_tokens(batch["labels"])
    engine.train()
    return total / tokens


def _write(engine: Any, config: RunConfig, folder: str, examples: list[Example]) -> None:
    run_folder = Path(folder)
    if distributed.rank() == 0:
        run_folder.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    proof.write_probe(engine, [example.input_ids for example in examples], run_folder)
    artifact.write(engine, config, config.method, load_tokenizer(config.model), run_folder, engine.global_steps)


def all_stages(overrides: list[str], gathers: list[str], folder: str) -> dict[int, Trace]:
    """``engine_loop`` at every ZeRO stage, one after another in this process; each gathered in all these ways."""
    traces = {}
    for stage in range(4):
        config = configure(*overrides, f"zero=stage{stage}", f"gather={gathers[0]}")
        traces[stage] = engine_loop(config, *(f"{folder}/stage{stage}-{name}" for name in gathers))
    return traces
