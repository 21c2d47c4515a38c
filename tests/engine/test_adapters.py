"""Thin LoRA layers learn what PEFT's do, compiled to as few products as promised, and leave the rest to PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from glmexp.config.families import FAMILIES
from glmexp.engine.adapters import Thin, make_thin
from glmexp.engine.compiled import compile_blocks
from glmexp.engine.loss import loss_sum
from glmexp.model.build import load_network
from tests.engine.cells import configure

ALL = "method.target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))


def adapted(*words: str) -> Any:
    """A network in float64 whose B are no zeros, so that A has gradients."""
    config = configure(*words, ranks=1)
    network = config.method.apply(load_network(config.model, torch.float64), FAMILIES[config.model.family])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network.train()


def step(network: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    network.zero_grad()
    loss = loss_sum(network(input_ids=IDS, use_cache=False).logits, IDS)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("words", "layers"),
    [(("model=tiny_qwen2", ALL, "method.alpha=12"), 28), (("model=tiny",), 4)],
    ids=["qwen2", "glm"],
)
def test_loss_and_gradients_are_pefts(words: tuple[str, ...], layers: int) -> None:
    network = adapted("method.dropout=0", *words)
    names = list(network.state_dict())
    loss, gradients = step(network)
    with torch.no_grad():
        answer = network.eval()(input_ids=IDS).logits
    assert make_thin(network) == layers
    assert list(network.state_dict()) == names
    with torch.no_grad():
        assert torch.equal(network(input_ids=IDS).logits, answer), "evaluation is PEFT's"
    compared(network.train(), loss, gradients)
    assert all(layer.pending is None for layer in network.modules() if isinstance(layer, Thin)), "nothing is kept"

    if words[0] == "model=tiny":
        return
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(network.get_base_model(), backend="eager")  # what is traced; the rest is test_compiled.py
    compared(network, loss, gradients)
    assert counters["stats"]["unique_graphs"] == 2, "the first block, whose input needs no gradient, and the others"
    assert not counters["graph_break"]


def compared(network: Any, loss: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    """To 1e-6 of the loss and of each gradient, in norm."""
    found_loss, found = step(network)
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name


def test_neighbours_share_one_product_over_their_input() -> None:
    network = adapted("model=tiny_qwen2", ALL, "method.dropout=0")
    make_thin(network)
    block = network.get_base_model().model.layers[0]
    attention = block.self_attn
    assert attention.q_proj.following == (attention.k_proj, attention.v_proj)
    assert block.mlp.gate_proj.following == (block.mlp.up_proj,)
    assert not attention.o_proj.following
    # Another input than the neighbour's gets its own product.
    states = torch.randn(2, 3, attention.q_proj.in_features, dtype=torch.float64)
    attention.q_proj(states)
    other = torch.randn_like(states)
    expected = attention.k_proj.base_layer(other)
    low = attention.k_proj.lora_B["default"](attention.k_proj.lora_A["default"](other))
    torch.testing.assert_close(attention.k_proj(other), expected + low * attention.k_proj.scaling["default"])
    with network.disable_adapter():
        assert torch.equal(attention.q_proj(states), attention.q_proj.base_layer(states))


def test_dropout_is_left_to_peft() -> None:
    assert make_thin(adapted("model=tiny_qwen2", "method.dropout=0.1")) == 0
