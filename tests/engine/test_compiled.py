"""Compiled blocks give what the plain ones give, and only training goes through them."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from glmexp.config.families import FAMILIES
from glmexp.engine.compiled import compile_blocks, wanted
from glmexp.engine.loss import loss_sum
from glmexp.model.build import load_network
from tests.engine.cells import configure


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


def test_compiles_by_itself_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    large = 6_000_000_000
    assert wanted(None, packed=True, cut=False, parameters=large)
    assert not wanted(None, packed=False, cut=False, parameters=large), "padded rows change their length all the time"
    assert not wanted(None, packed=True, cut=True, parameters=large)
    assert not wanted(None, packed=True, cut=False, parameters=1_000_000)
    assert not wanted(False, packed=True, cut=False, parameters=large)
    assert wanted(True, packed=False, cut=False, parameters=1)
