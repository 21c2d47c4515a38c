"""What follows from the rest of a configuration: the batch's third number, whole paths."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from glmexp.config import data_rules
from glmexp.config.entries import PLANS
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.inherit import AUTO
from glmexp.config.schema import RunConfig

MICRO_BATCH_SIZE = 8
"""Where neither train.micro_batch_size nor train.batch_size is given."""
GRAD_ACCUM = 1


def derive(config: RunConfig, ranks: int) -> RunConfig:
    """Fill in what follows from the rest: batch numbers for training, whole paths. Raises ConfigError."""
    train = config.train
    if config.entry.name in PLANS:
        numbers = batch_numbers(config, ranks)
        if isinstance(numbers, Problem):
            raise ConfigError(numbers)
        micro, accum, batch = numbers
        train = dataclasses.replace(train, micro_batch_size=micro, grad_accum=accum, batch_size=batch)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(train, resume=train.resume if train.resume == AUTO else _whole(train.resume)),
        data=dataclasses.replace(
            config.data,
            train_file=_whole(config.data.train_file),
            eval_file=_whole(config.data.eval_file),
            cache_dir=_whole(config.data.cache_dir),
        ),
        inspect=dataclasses.replace(config.inspect, html=_whole(config.inspect.html)),
        generate=dataclasses.replace(
            config.generate,
            prompts_file=_whole(config.generate.prompts_file),
            output=_whole(config.generate.output),
        ),
        eval=dataclasses.replace(
            config.eval, hooks={name: _whole_prompts(hook) for name, hook in config.eval.hooks.items()}
        ),
        artifact=dataclasses.replace(config.artifact, path=_whole(config.artifact.path)),
        model=dataclasses.replace(config.model, path=_whole_if_there(config.model.path)),
        offload=dataclasses.replace(config.offload, nvme_path=_whole(config.offload.nvme_path)),
        placement=dataclasses.replace(config.placement, disk_folder=_whole(config.placement.disk_folder)),
        deepspeed=dataclasses.replace(config.deepspeed, config_file=_whole(config.deepspeed.config_file)),
    )


def _whole(path: str | None) -> str | None:
    """Absolute, so that a run can be started again from any folder."""
    if path is None or path.startswith((data_rules.BUILTIN, data_rules.HUB)):
        return path
    return str(Path(path).expanduser().absolute())


def _whole_prompts(hook: Any) -> Any:
    """A hook whose prompts_file, where it has one, is absolute."""
    path = getattr(hook, "prompts_file", None)
    return hook if path is None else dataclasses.replace(hook, prompts_file=_whole(path))


def _whole_if_there(path: str | None) -> str | None:
    """A model's path may be a hub name: those that are no folder stay as they are."""
    return _whole(path) if path is not None and Path(path).expanduser().is_dir() else path


def batch_numbers(config: RunConfig, ranks: int) -> tuple[int, int, int] | Problem:
    """(micro batch, gradient accumulation, batch) with the empty ones derived, or what contradicts."""
    train = config.train
    micro, accum, batch = train.micro_batch_size, train.grad_accum, train.batch_size
    if batch is None:
        micro, accum = micro or MICRO_BATCH_SIZE, accum or GRAD_ACCUM
        return micro, accum, micro * accum * ranks
    if micro is not None and accum is not None:
        product = micro * accum * ranks
        if product == batch:
            return micro, accum, batch
        return Problem(
            "train.batch_size",
            f"{batch} rows, but train.micro_batch_size x train.grad_accum x ranks = "
            f"{micro} x {accum} x {ranks} = {product}",
            "leave one of the three out and it is computed: without train.batch_size it is "
            f"{product}, without train.grad_accum it is {_quotient(batch, micro * ranks)}",
        )
    if micro is None:
        accum = accum or GRAD_ACCUM
        if batch % (accum * ranks) == 0:
            return batch // (accum * ranks), accum, batch
        return _indivisible(batch, "train.grad_accum", accum, ranks)
    if batch % (micro * ranks) == 0:
        return micro, batch // (micro * ranks), batch
    return _indivisible(batch, "train.micro_batch_size", micro, ranks)


def _quotient(batch: int, divisor: int) -> str:
    return str(batch // divisor) if batch % divisor == 0 else f"{batch} / {divisor}, which is no whole number"


def _indivisible(batch: int, name: str, number: int, ranks: int) -> Problem:
    whole = max(1, round(batch / (number * ranks))) * number * ranks
    return Problem(
        "train.batch_size",
        f"{batch} rows cannot be split: {name} x ranks = {number} x {ranks} = {number * ranks} does not divide {batch}",
        f"train.batch_size={whole}, or another {name}",
    )
