"""Compiled blocks give what the plain ones give, and only training goes through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from glmexp.config.families import FAMILIES
from glmexp.data.batches import StepPlan
from glmexp.data.loader import Batches
from glmexp.data.packing import model_inputs
from glmexp.engine import loss
from glmexp.engine.compiled import compile_blocks, wanted
from glmexp.engine.loss import forward_loss, loss_sum
from glmexp.entry.training import inner
from glmexp.model import varlen
from glmexp.model.build import load_network
from tests.engine.cells import configure, rows


@pytest.mark.parametrize("model", ["tiny", pytest.param("tiny_qwen2", marks=pytest.mark.matrix)])
def test_compiled_blocks_train_alike_with_one_graph_for_all(model: str) -> None:
    config = configure(f"model={model}", ranks=1)
    network = config.method.apply(load_network(config.model, torch.float32), FAMILIES[config.model.family])
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        network.zero_grad()
        loss = loss_sum(network(input_ids=ids, use_cache=False).logits, ids)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in network.parameters() if p.grad is not None]

    network.train()
    plain, plain_grads = step()
    network.eval()
    with torch.no_grad():
        answer = network(input_ids=ids).logits
    torch._dynamo.reset()
    counters.clear()
    assert compile_blocks(network.get_base_model(), backend="aot_eager") == 4
    with torch.no_grad():
        assert torch.equal(network(input_ids=ids).logits, answer)
    assert counters["stats"]["unique_graphs"] == 0, "evaluation goes the plain way"
    network.train()
    loss, grads = step()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for one, other in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # The first block's input needs no gradient, that of the others does: two graphs, however many blocks there are.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.fixture
def kernel_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Something with the signature and the shapes of flash attention, so that a CPU traces the graph of a GPU."""

    def forward(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        numbers = torch.zeros(2, dtype=torch.uint64)
        sums = query.new_zeros(query.shape[1], len(query))
        return query.clone(), sums, numbers, numbers.new_zeros(()), query.new_zeros(0)

    def backward(grad: torch.Tensor, _: torch.Tensor, key: torch.Tensor, *__: Any, **___: Any) -> Any:
        return grad.clone(), torch.zeros_like(key), torch.zeros_like(key)

    operators = torch.library.Library("aten", "IMPL")
    operators.impl("_flash_attention_forward", forward, "CPU")
    operators.impl("_flash_attention_backward", backward, "CPU")
    monkeypatch.setattr(varlen, "has_kernel", lambda _: True)
    compiled = cache(lambda function: torch.compile(function, dynamic=True, backend="aot_eager"))
    monkeypatch.setattr(loss, "_compiled", compiled)
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(dynamic_sources=""):  # type: ignore[attr-defined]
        yield
    operators._destroy()
    torch._dynamo.reset()


@pytest.mark.parametrize(("model", "method", "graphs"), [("tiny", "lora", 2), ("tiny_qwen2", "full", 1)])
def test_a_run_compiles_in_its_first_batch_alone(model: str, method: str, graphs: int, kernel_shapes: None) -> None:
    """Two passes whose last step has a short row and a blank one, with an evaluation between them."""
    config = configure(f"model={model}", f"method={method}", "data.packing=true", "data.max_length=100", ranks=1)
    settings = replace(config.model, attention="varlen")
    network = config.method.apply(load_network(settings, torch.float32), FAMILIES[config.model.family])
    examples, pad_id = rows(config)
    batches = Batches.of(examples[:20], config.data, 0, pad_id)  # type: ignore[arg-type, index]
    plan = StepPlan(batches.rows, 2, 1, 1, 0, 0, shuffle=False)
    short = {batches.step(plan, step)[0]["input_ids"].shape for step in range(plan.steps_per_epoch)}
    assert len(short) > 1, "something to fill up"
    assert batches.rows % 2, "a blank place"
    batches = batches.of_one_length()

    def one_pass(step: int, fused: bool) -> torch.Tensor:
        (batch,) = batches.step(plan, step)
        return forward_loss(network, model_inputs(batch, config.model.family, None, "varlen"), batch, fused)

    compile_blocks(inner(network), backend="aot_eager")
    done = []
    for step in range(2 * plan.steps_per_epoch):
        if step == plan.steps_per_epoch:
            network.eval()
            with torch.no_grad():
                one_pass(0, fused=False)
        network.train()
        one_pass(step, fused=True).backward()
        done.append(counters["stats"]["unique_graphs"])
    # The loss has two: its terms and their gradients. LoRA's first block gets an input that needs no gradient.
    assert done == [graphs + 2] * len(done)
    assert not counters["graph_break"]


def test_compiles_by_itself_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    large = 6_000_000_000
    assert wanted(None, packed=True, cut=False, parameters=large)
    assert not wanted(None, packed=False, cut=False, parameters=large), "padded rows change their length all the time"
    assert not wanted(None, packed=True, cut=True, parameters=large)
    assert not wanted(None, packed=True, cut=False, parameters=1_000_000)
    assert not wanted(False, packed=True, cut=False, parameters=large)
    assert wanted(True, packed=False, cut=False, parameters=1)
