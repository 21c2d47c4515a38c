"""The host gives a step to the device without waiting for it, and the numbers are DeepSpeed's to the bit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glmexp.data.collate import collate
from glmexp.engine import run_ahead
from glmexp.engine.loop import Loop
from glmexp.launcher import positions
from tests.engine.cells import _engine, _train, configure, rows
from tests.engine.streams import Streams
from tests.ranks import run_on_ranks


def device() -> Streams:
    return Streams(SimpleNamespace(name=lambda: "device"))


BOTH_WAYS = ["reductions waits for compute", "compute waits for reductions"]
"""As the wait of a host does: without ``zero.contiguous_gradients`` a reduction reads gradients behind no other one."""


def test_streams_are_ordered_in_place_of_a_wait_of_the_host() -> None:
    streams = device()
    module = SimpleNamespace(get_accelerator=lambda: streams)

    def reduce(fails: bool) -> str:
        module.get_accelerator().synchronize()
        if fails:
            raise RuntimeError("reduction")
        return module.get_accelerator().name()

    ordered = run_ahead.in_order(reduce, module, streams.named("reductions"))
    assert ordered(fails=False) == "device"
    with pytest.raises(RuntimeError, match="reduction"):
        ordered(fails=True)
    assert streams.told == BOTH_WAYS * 2
    assert module.get_accelerator() is streams, "everywhere else the accelerator is itself"


def test_only_the_last_micro_batch_waits_for_its_reductions() -> None:
    """Where sums are made beside the passes; then the memory of a bucket is kept until its reduction has read it."""
    streams, told = device(), []
    module = SimpleNamespace(get_accelerator=lambda: streams)
    optimizer = SimpleNamespace(
        reduction_stream=streams.named("reductions"),
        bit16_groups=[[]],
        contiguous_gradients=True,
        use_grad_accum_attribute=False,
        cpu_offload=False,
        copy_grads_in_partition=lambda parameter, group: None,
        last=False,
        _use_compact_grad_partition_buffer=lambda group: False,
        allreduce_and_copy=lambda: None,
        average_tensor=lambda tensor, dtype: told.append(f"average {dtype}"),
        independent_gradient_partition_epilogue=lambda: module.get_accelerator().synchronize(),
        finalize_gradient_accumulation_boundary=lambda: told.append("finalize"),
    )
    optimizer.is_gradient_accumulation_boundary = lambda: optimizer.last
    run_ahead.order(optimizer, module)
    optimizer.independent_gradient_partition_epilogue()
    assert streams.told == []
    optimizer.average_tensor(SimpleNamespace(record_stream=lambda one: told.append(f"kept for {one.name}")), "bf16")
    assert told == ["kept for reductions", "average bf16"]
    optimizer.last = True
    optimizer.independent_gradient_partition_epilogue()
    optimizer.finalize_gradient_accumulation_boundary()
    assert streams.told == [*BOTH_WAYS, BOTH_WAYS[1]]


def ends_of_micro_batches(*words: str) -> tuple[bool, list[bool]]:
    """Whether sums are read at a step's end alone; for each micro batch of two steps: whether it was the last one."""
    config = configure(*words)
    engine = _engine(config, 2)
    optimizer, ends = engine.optimizer, []
    plain = optimizer.independent_gradient_partition_epilogue

    def noted() -> None:
        ends.append(optimizer.is_gradient_accumulation_boundary())
        plain()

    optimizer.independent_gradient_partition_epilogue = noted
    _train(engine, config, *rows(config), 2)
    return run_ahead.reads_sums_at_the_end_alone(optimizer), ends


def test_deepspeed_says_which_micro_batch_is_the_last_one(tmp_path: Path) -> None:
    words = ["method=full", "zero=stage2", "precision=bf16", "train.micro_batch_size=1", "train.grad_accum=3"]
    found = run_on_ranks(ends_of_micro_batches, *words, folder=tmp_path)
    assert found == [(True, [False, False, True] * 2)] * 2


def test_stage_3_orders_streams_behind_a_backward_pass_and_asks_no_norm() -> None:
    streams = device()
    module = SimpleNamespace(get_accelerator=lambda: streams, is_invalid_grad_norm=lambda norm: norm < 0)

    def epilogue() -> None:
        if not module.get_accelerator().resolves_data_dependency():
            streams.synchronize()

    run_ahead.in_order(epilogue, module, streams.named("reductions"), kind=run_ahead._Resolving)()
    assert streams.told == BOTH_WAYS
    assert run_ahead.unasked(lambda norm: module.is_invalid_grad_norm(norm), module)(-1.0) is False
    assert module.is_invalid_grad_norm(-1.0), "everywhere else it is asked"


def test_deepspeeds_stage_3_waits_where_this_takes_its_place() -> None:
    """In these two methods, in these words: a version that waits elsewhere must be looked at again."""
    from deepspeed.runtime.zero import stage3

    source = inspect.getsource(stage3)
    epilogue, step = (
        source.split(f"    def {name}(self")[1].split("    def ")[0]
        for name in ("independent_gradient_partition_epilogue", "step")
    )
    waits = "self.reduce_and_partition_stream.synchronize()"
    asks = f"if not get_accelerator().resolves_data_dependency():\n            {waits}"
    assert [epilogue.count(one) for one in (asks, "get_accelerator()", "synchronize()")] == [1, 1, 1]
    assert step.count("is_invalid_grad_norm(") == 1


@pytest.mark.parametrize("norm", [0.25, 4.0, -1.0])
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_clipping_by_a_norm_on_the_device_is_deepspeeds(norm: float, scale: float) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = SimpleNamespace(clip_grad=1.0, loss_scale=scale, device="cpu")
    gradients = [torch.linspace(-1, 1, 7) for _ in range(2)]

    def theirs(given: Any, total: Any) -> None:
        DeepSpeedZeroOptimizer.unscale_and_clip_grads(optimizer, given, total)

    theirs([gradients[0]], torch.tensor(norm))
    run_ahead._clipping(optimizer, theirs)([gradients[1]], torch.tensor(norm))
    assert torch.equal(*gradients)


def test_the_next_batches_are_fetched_before_a_step_is_waited_for() -> None:
    told: list[str] = []
    config = configure("model=tiny")
    examples, pad_id = rows(config)

    class Told(Loop):
        def _look(self, step: int, *args: Any) -> str | None:
            told.append(f"look at {step}")
            positions.at("records", step)
            return "enough" if step == 2 else None

        def _update(self, step: int) -> None:
            told.append(f"update {step}")

        def _forward_backward(self, *args: Any) -> torch.Tensor:
            told.append(f"passes of {positions._here.position.step}")
            return torch.zeros(())

        _first = _forward_backward

    def steps() -> Iterator[tuple[int, list[dict[str, Any]]]]:
        for step in range(1, 9):
            told.append(f"fetch {step}")
            yield step, [collate([examples[0]], pad_id)]

    engine = SimpleNamespace(train=lambda: None)
    reason = Told(engine, steps(), 1, lambda *_: None, lambda step, reason: reason).run()
    assert reason == "enough"
    assert told == [
        *("fetch 1", "passes of 1", "update 1", "fetch 2", "look at 1"),
        *("passes of 2", "update 2", "fetch 3", "look at 2"),
    ], "a rank that stands in a pass tells the step of that pass"
