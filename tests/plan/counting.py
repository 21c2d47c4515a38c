"""Tensors that a real DeepSpeed engine holds, counted: what the plan's states must equal to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from glmexp.config.memory import passes_gpu
from glmexp.engine import distributed, fp8
from glmexp.engine.loss import forward_loss, padded_inputs
from glmexp.plan.shapes import model_of
from glmexp.plan.states import States, states_of
from tests.engine.cells import _engine, batches, configure, rows

Cell = tuple[str, ...]
MODELS = ("tiny", "tiny_chatglm", "tiny_qwen2")
METHODS = (
    "method=full",
    "method=lora",
    "method=freeze",
    "method=ptuning",
)
PLACES = {
    "0": ["zero=stage0"],
    "1": ["zero=stage1"],
    "2": ["zero=stage2"],
    "3": ["zero=stage3"],
    "3 plain": ["zero=stage3", "zero.whole_blocks=false"],
    "1 optimizer": ["zero=stage1", "offload=optimizer", "offload.adam=torch"],
    "2 optimizer": ["zero=stage2", "offload=optimizer", "offload.adam=torch"],
    "1 passing": ["zero=stage1", "offload=optimizer", "offload.adam=gpu"],
    "2 passing": ["zero=stage2", "offload=optimizer", "offload.adam=gpu"],
    "3 optimizer": ["zero=stage3", "offload=optimizer", "offload.adam=torch"],
    "3 all": ["zero=stage3", "offload=all", "offload.adam=torch"],
}
SMALL_BUCKET = 60_000
"""Elements: below the largest tensor's, so that some gradients bypass the bucket."""


def cell(model: str, method: str, place: str, precision: str, accum: int) -> Cell:
    words = [f"model={model}", method, *PLACES[place], f"precision={precision}"]
    words += ["train.micro_batch_size=1", f"train.grad_accum={accum}", "eval=none"]
    if place != "0":
        words += [f"zero.reduce_bucket_size={SMALL_BUCKET}"]
    if place[0] == "3":
        words += ["zero.sub_group_size=100000", "zero.stage3_param_persistence_threshold=1000"]
    return tuple(words)


def compared(cells: list[Cell]) -> list[tuple[Cell, dict[str, tuple[int, int]]]]:
    """By cell: name -> (planned, counted), on this rank."""
    return [(one, _compare(one)) for one in cells]


def _compare(one: Cell) -> dict[str, tuple[int, int]]:
    ranks, rank = distributed.world_size(), distributed.rank()
    config = configure(*one, ranks=ranks)
    planned = states_of(config, model_of(config), ranks, rank)
    engine = _engine(config, 2)
    examples, pad_id = rows(config)
    during: dict[str, int] = {}
    for _, micro_batches in batches(config, examples, pad_id, 0, 2):
        for number, batch in enumerate(micro_batches, start=1):
            engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            loss = forward_loss(engine, padded_inputs(batch), batch)
            with _Watch(engine, during):
                engine.backward(loss, scale_wrt_gas=False)
        gradients = _gradients(engine, config, planned)
        engine.step()
    counted = _kept(engine, config) | {"gradients": gradients} | during
    engine.destroy()
    names = {"weights": planned.weights, "masters": planned.masters, "moments": planned.moments}
    names |= {"passing": planned.passing}
    names |= {"gradients": planned.gradients, "buckets": planned.buckets, "block": planned.block}
    names |= {f"host {name}": size for name, size in planned.host.items()}
    return {name: (size, counted.get(name, 0)) for name, size in names.items()}


def _bytes(tensors: Iterable[Any]) -> int:
    """Of the storages behind them, each once."""
    storages = {}
    for one in tensors:
        if torch.is_tensor(one):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _copies(whole: list[Any], partitions: list[Any]) -> int:
    """Of whole parameters beside their partitions on the host.

    A single rank takes each off the host with ``Tensor.to`` (``partition_parameters.py``, NoGatherHandle). On a GPU
    that is a copy. On a CPU it copies nothing, and the parameter is a view of its partition, which for trained ones
    lies in a buffer with others: it counts as the copy that it would be.
    """
    host = {one.untyped_storage().data_ptr() for one in partitions}
    views = [one for one in whole if one.untyped_storage().data_ptr() in host]
    assert not views or (distributed.world_size() == 1 and not torch.cuda.is_available()), "copies, or gathered"
    return _bytes(one for one in whole if one.untyped_storage().data_ptr() not in host) + sum(
        one.nbytes for one in views
    )


def _kept(engine: Any, config: Any) -> dict[str, int]:
    """Between two steps."""
    optimizer, stage = engine.optimizer, config.zero.stage
    moments = [
        value
        for state in engine.basic_optimizer.state.values()
        for name, value in state.items()
        if name in ("exp_avg", "exp_avg_sq")
    ]
    host = config.offload.optimizer is not None
    prefix = "host " if host else ""
    found = {f"{prefix}moments": _bytes(moments)}
    parameters = [*engine.module.parameters()]
    if stage == 3:
        partitions = [one.ds_tensor for one in parameters]
        whole = [one.data for one in parameters if one.ds_persist]
        if config.offload.params is not None:
            found["host weights"] = _bytes(partitions)
            found["weights"] = _copies(whole, partitions)
        else:
            found["weights"] = _bytes([*partitions, *whole])
        masters = list(optimizer.fp32_partitioned_groups_flat)
        shared = {one.untyped_storage().data_ptr() for one in partitions}
        found[f"{prefix}masters"] = _bytes([m for m in masters if m.untyped_storage().data_ptr() not in shared])
        flat = optimizer.grad_partitions_flat_buffer
        if host:
            found["host gradients"] = _bytes([flat, *(one.grad for one in masters)])
        found["buckets"] = _bytes(bucket.buffer for bucket in optimizer.ipg_buckets.values())
        taken_over = optimizer.parameter_offload.partition_all_parameters.__self__
        found["block"] = max((one.size_bytes for one in getattr(taken_over, "blocks", [])), default=0)
        return found
    kept = [one for _, layer in fp8.layers(engine.module) for one in (layer.scales, layer.transposed)]
    found["weights"] = _bytes([*(one.data for one in parameters), *kept])
    if stage == 0:
        groups = getattr(optimizer, "fp32_groups", [])
        found["masters"] = _bytes(one for group in groups for one in group)
        return found
    masters = optimizer.single_partition_of_fp32_groups
    if passes_gpu(config.offload):
        places = [group.device for group in optimizer.passing._groups]
        return {"weights": found["weights"], "host masters and moments": _bytes(masters), "passing": _bytes(places)}
    found[f"{prefix}masters"] = _bytes(masters)
    if host:
        found["host gradients"] = _bytes(one.grad for one in masters)
        found["host weights on their way"] = _bytes(
            [*optimizer.param_buffer_of_bit16_for_cpu_offload_groups, optimizer.temp_grad_buffer_for_cpu_offload]
        )
        found["host gradients so far"] = _bytes(optimizer.accumulated_grads_in_cpu.values())
    return found


def _gradients(engine: Any, config: Any, planned: States) -> int:
    """Before the step."""
    optimizer, stage = engine.optimizer, config.zero.stage
    if config.offload.optimizer is not None and not passes_gpu(config.offload):
        return 0 if stage == 3 else _bytes([optimizer.temp_grad_buffer_for_gpu_offload])
    if stage == 3:
        return _bytes([optimizer.grad_partitions_flat_buffer])
    own = [one.grad for one in engine.module.parameters()]
    if stage == 0:
        return _bytes(own)
    held = [one for group in optimizer.averaged_gradients.values() if group is not None for one in group]
    padding = [one for one in held if getattr(one, "_zero_padding", False)]
    return _bytes(own) + _bytes(held) - _bytes(padding)


class _Watch:
    """Sees the buckets of stages 1 and 2 before they are released at the end of the backward pass."""

    def __init__(self, engine: Any, found: dict[str, int]) -> None:
        self.optimizer, self.found = engine.optimizer, found

    def __enter__(self) -> None:
        if not hasattr(self.optimizer, "_release_ipg_buffers"):
            return
        release = type(self.optimizer)._release_ipg_buffers

        def seen(optimizer: Any) -> None:
            buffers = [one for bucket in optimizer.ipg_buckets.values() for one in bucket.buffer]
            self.found["buckets"] = max(self.found.get("buckets", 0), _bytes(buffers))
            release(optimizer)

        self.optimizer._release_ipg_buffers = seen.__get__(self.optimizer)

    def __exit__(self, *_: Any) -> None:
        if hasattr(self.optimizer, "_release_ipg_buffers"):
            del self.optimizer._release_ipg_buffers
