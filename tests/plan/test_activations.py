"""What the plan says that the forward pass keeps is what autograd keeps, by family and method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from glmexp.config.compose import run_config
from glmexp.config.families import FAMILIES
from glmexp.engine.compiled import compile_blocks
from glmexp.model.build import load_network
from glmexp.plan.activations import Batch, Kind, activations_of
from glmexp.plan.shapes import model_of

ROWS, LENGTH = 2, 256
# On a CPU attention's result is copied once more where the layer behind it is trained.
TOLERANCE = 0.07


def _kept(network: Any, family: str) -> int:
    """Bytes of what autograd keeps of a forward pass, parameters and logits aside."""
    own = {one.untyped_storage().data_ptr() for one in network.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.randint(5, 200, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    if family == "chatglm":
        ids[:, 0], ids[:, 1] = network.config.gmask_token_id, network.config.bos_token_id
    unpack: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        network(input_ids=ids, use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize("model", ["tiny", "tiny_qwen2", "tiny_chatglm"])
@pytest.mark.parametrize("method", ["full", "lora", "freeze", "ptuning"])
def test_the_forward_pass_keeps_what_is_planned(model: str, method: str) -> None:
    config = run_config([f"model={model}", f"method={method}", "eval=none", "tracker=none", "precision=bf16"])
    network = load_network(config.model, torch.bfloat16)
    trained = config.method.apply(network, FAMILIES[config.model.family]).train()
    planned = activations_of(
        config, model_of(config), Batch(ROWS, LENGTH, ROWS * LENGTH), Kind(2, "sdpa", False, False)
    )
    found = _kept(trained, config.model.family)
    assert planned.blocks + planned.rest == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("tiny", ["method=lora", "method.target_modules=[dense_4h_to_h]"]),
        ("tiny_qwen2", ["method=full"]),
    ],
)
def test_compiled_blocks_keep_what_is_planned(model: str, words: list[str]) -> None:
    """With inductor's choice of what is computed again, which no kernel is needed for. A weight (or an adapter) behind
    the product with the gate keeps that product."""
    torch._dynamo.reset()
    config = run_config([f"model={model}", *words, "eval=none", "tracker=none", "precision=bf16"])
    network = load_network(config.model, torch.bfloat16)
    trained = config.method.apply(network, FAMILIES[config.model.family]).train()
    compile_blocks(network, backend="aot_eager_decomp_partition")
    planned = activations_of(config, model_of(config), Batch(ROWS, LENGTH, ROWS * LENGTH), Kind(2, "sdpa", True, False))
    assert planned.blocks + planned.rest == pytest.approx(_kept(trained, config.model.family), rel=1e-3)


def test_checkpointing_keeps_the_inputs_of_blocks_and_one_block() -> None:
    config = run_config(["model=tiny", "method=lora", "eval=none", "tracker=none"])
    model, batch = model_of(config), Batch(4, 512, 1024)
    whole = activations_of(config, model, batch, Kind(2, "sdpa", False, False))
    less = activations_of(config, model, batch, Kind(2, "sdpa", False, True))
    network = model.network
    assert less.blocks == network.layers * batch.places * network.hidden * 2
    assert less.one_block * network.layers == pytest.approx(whole.blocks, rel=0.1)
