"""What a rank holds of the training state, in words that no ZeRO stage, rank count or offload appears in.

Whatever DeepSpeed (0.19.8) does, a rank holds pieces: of the parameter ``name``, flattened, the elements from
``offset`` on, as float32 master and Adam's two moments. Pieces of all ranks together are every trained parameter once,
so what one arrangement wrote another can read. 16-bit weights are not kept: they are the masters, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from glmexp.engine import distributed, passing
from glmexp.engine.build import trainable

MASTER, MEAN, SQUARE = "master", "exp_avg", "exp_avg_sq"
KINDS = (MASTER, MEAN, SQUARE)


@dataclass(frozen=True)
class Piece:
    """A stretch of one trained parameter: float32 views (length,) into what the optimizer steps on."""

    name: str
    offset: int
    length: int
    tensors: dict[str, torch.Tensor]
    """By kind; the moments are absent where Adam has not stepped yet (fp16 skips its first steps)."""
    step: float
    """Adam's own count of steps."""


Sink = Callable[[Piece], None]
Source = Callable[[Piece], float]


def read(engine: Any, sink: Sink) -> None:
    """Hand every piece of this rank to ``sink``, which copies what it wants to keep."""
    for piece in _pieces(engine, None):
        sink(piece)


def pieces(engine: Any) -> Iterator[Piece]:
    """Every piece of this rank, one at a time; on nvme a piece is there until the next one is asked for."""
    return _pieces(engine, None)


def write(engine: Any, source: Source) -> None:
    """Let ``source`` fill every piece of this rank in place and return Adam's step; then renew the weights.

    Collective.
    """
    for _ in _pieces(engine, source):
        pass
    _renew_weights(engine)


def size_bytes(engine: Any) -> int:
    """Masters and moments that this rank holds."""
    if engine.zero_optimization_stage() == 3:
        return 12 * sum(int(numel) for numel in engine.optimizer.fp16_partitioned_groups_flat_numel)
    return 12 * sum(piece.length for piece in _pieces(engine, None))


def on_nvme(engine: Any) -> bool:
    """The states come into memory a sub group at a time, and leave it again."""
    return bool(getattr(engine.optimizer, "swap_optimizer", False))


def shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each trained parameter, whole."""
    return {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in trainable(engine.module)}


def _pieces(engine: Any, source: Source | None) -> Iterator[Piece]:
    """Every piece of this rank; with a source, filled by it."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        yield from _partitioned(engine, source)
    elif stage in (1, 2):
        yield from _flat_groups(engine, source)
    else:
        yield from _replicated(engine, source)


def _one(
    name: str,
    offset: int,
    base: Any,
    key: torch.Tensor,
    start: int,
    length: int,
    source: Source | None,
) -> Piece:
    """The piece at ``start`` of the flat tensor ``key`` of the optimizer ``base``, filled by ``source``."""
    if source is not None:
        _allocate(base, key)
    state = base.state.get(key, {})  # a defaultdict: plain indexing would make an entry
    tensors = {MASTER: key.detach().view(-1)[start : start + length]}
    tensors |= {kind: state[kind].view(-1)[start : start + length] for kind in (MEAN, SQUARE) if kind in state}
    piece = Piece(name, offset, length, tensors, float(state.get("step", 0.0)))
    if source is not None:
        _set_step(state, source(piece))
    return piece


def _allocate(base: Any, key: torch.Tensor) -> None:
    """Adam's states as its first step makes them (torch/optim/adam.py, deepspeed/ops/adam/cpu_adam.py)."""
    state = base.state[key]
    if MEAN in state:
        return
    group = base.param_groups[0]
    if type(base).__name__ == "DeepSpeedCPUAdam":
        state["step"] = 0
    else:
        on_device = group.get("fused") or group.get("capturable")
        state["step"] = torch.zeros((), dtype=torch.float32, device=key.device if on_device else "cpu")
    for kind in (MEAN, SQUARE):
        state[kind] = torch.zeros_like(key.data, memory_format=torch.preserve_format)


def _set_step(state: dict[str, Any], step: float) -> None:
    if isinstance(state["step"], torch.Tensor):
        state["step"].fill_(step)
    else:
        state["step"] = int(step)


def _flat_groups(engine: Any, source: Source | None) -> Iterator[Piece]:
    """Stages 1 and 2: each rank steps on one stretch of each group's parameters laid end to end."""
    optimizer = engine.optimizer
    passing.settle(optimizer)
    for name, parameter in trainable(engine.module):
        place = cast(Any, parameter)._hp_mapping
        if place is not None:  # else all of it lies with other ranks
            flat = optimizer.single_partition_of_fp32_groups[place.param_group_index]
            lp, hp = place.lp_fragment_address, place.hp_fragment_address
            yield _one(name, lp.start, optimizer.optimizer, flat, hp.start, hp.numel, source)


def _partitioned(engine: Any, source: Source | None) -> Iterator[Piece]:
    """Stage 3: each parameter is cut into equal parts, one a rank, the last ones padded; on nvme a sub group at a
    time."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in trainable(engine.module)}
    if source is None and torch.cuda.is_available():
        optimizer.reduce_and_partition_stream.synchronize()
    for number, group in enumerate(optimizer.fp16_groups):
        swapped = optimizer._swappable_optimizer_subgroup(number)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        flat = optimizer.fp32_partitioned_groups_flat[number]
        for parameter in group:
            _, start, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
            offset = part * optimizer._get_param_partition_rank(parameter)
            length = max(0, min(part, parameter.ds_numel - offset))
            if length:
                yield _one(names[id(parameter)], offset, optimizer.optimizer, flat, start, length, source)
        if swapped and source is not None:
            optimizer._optimizer_states_and_gradient_swap_out(number)
        elif swapped:
            optimizer._release_swap_buffers(number)


def _replicated(engine: Any, source: Source | None) -> Iterator[Piece]:
    """Stage 0: every rank holds everything. Writing fills all of it; for reading each rank answers for its share."""
    optimizer = engine.optimizer
    masters = {
        id(low): high
        for group, highs in zip(
            getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", []), strict=False
        )
        for low, high in zip(group, highs, strict=True)
    }
    base = optimizer.optimizer if masters else optimizer
    for name, parameter in trainable(engine.module):
        key = masters.get(id(parameter), parameter)
        start, length = (0, key.numel()) if source is not None else _share(key.numel())
        if length:
            yield _one(name, start, base, key, start, length, source)


def _share(numel: int) -> tuple[int, int]:
    """(start, length) of this rank's part of what all ranks hold alike."""
    part = -(-numel // distributed.world_size())
    start = min(numel, part * distributed.rank())
    return start, min(part, numel - start)


def _renew_weights(engine: Any) -> None:
    """The weights that the network computes with, from the masters. Collective."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    with torch.no_grad():
        if stage in (1, 2):
            optimizer.update_lp_params()
        elif stage == 3:
            optimizer._partition_all_parameters()
            for number in range(len(optimizer.fp16_groups)):
                swapped = optimizer._swappable_optimizer_subgroup(number)
                if swapped:
                    optimizer._optimizer_states_and_gradient_swap_in(number)
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
                if swapped:
                    optimizer._release_swap_buffers(number)
            optimizer.checkpoint_event_epilogue()
        else:
            for lows, highs in zip(
                getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", []), strict=False
            ):
                for low, high in zip(lows, highs, strict=True):
                    low.data.copy_(high.data)


def counters(engine: Any) -> dict[str, Any]:
    """The schedule's place, DeepSpeed's counts and fp16's loss scale, as plain numbers."""
    scheduler = engine.lr_scheduler
    return {
        "schedule_steps": scheduler.last_epoch,
        "skipped_steps": engine.skipped_steps,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "loss_scale": {name: getattr(scaler(engine), name) for name in _SCALE if hasattr(scaler(engine), name)},
    }


_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def set_counters(engine: Any, saved: dict[str, Any], grad_accum: int) -> None:
    """Put back what ``counters`` gave. The rate follows from the schedule's place, also where its end has moved."""
    engine.global_steps, engine.global_samples = saved["global_steps"], saved["global_samples"]
    engine.skipped_steps = saved["skipped_steps"]
    engine.micro_steps = engine.global_steps * grad_accum
    scheduler = engine.lr_scheduler
    scheduler.last_epoch = saved["schedule_steps"]
    scheduler._step_count = saved["schedule_steps"] + 1
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
    keeper = scaler(engine)
    for name, value in saved["loss_scale"].items():
        if hasattr(keeper, name):
            setattr(keeper, name, value)


def scaler(engine: Any) -> Any:
    """Where DeepSpeed keeps the loss scale: in two places, by stage; None where it keeps none."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)
