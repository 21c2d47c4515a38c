"""What the plan says of parameters is what the network has: names of the trained, sizes and order of all."""

from __future__ import annotations

import pytest
import torch

from glmexp.config.compose import run_config
from glmexp.config.families import FAMILIES
from glmexp.model.build import empty_network
from glmexp.plan.shapes import model_from, model_of

MODELS = ("tiny", "tiny_chatglm", "tiny_chatglm2", "tiny_qwen2")
METHODS = {
    "full": ["method=full"],
    "lora": ["method=lora"],
    "lora on the MLP too": ["method=lora", "method.rank=3"],
    "freeze": ["method=freeze", "method.num_layers=2"],
    "freeze by pattern": ["method=freeze", "method.num_layers=null", "method.patterns=[layernorm,mlp]"],
    "ptuning": ["method=ptuning"],
    "ptuning with projection": ["method=ptuning", "method.prefix_projection=true"],
}


def _overrides(model: str, method: str) -> list[str]:
    words = list(METHODS[method])
    if method == "lora on the MLP too":
        mlp = "[q_proj,down_proj]" if model == "tiny_qwen2" else "[query_key_value,dense,dense_4h_to_h]"
        head = "lm_head" if model in ("tiny_qwen2", "tiny_chatglm") else "output_layer"
        words += [f"method.target_modules={mlp}"]
        if model != "tiny_chatglm":  # tied to the embedding
            words += [f"method.modules_to_save=[{head}]"]
    return [f"model={model}", *words, "eval=none", "tracker=none"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_of_the_network_is_known(model: str, method: str) -> None:
    config = run_config(_overrides(model, method))
    network = empty_network(config.model, torch.float32)
    network = config.method.apply(network, FAMILIES[config.model.family])
    found = [(tuple(one.shape), one.requires_grad) for _, one in network.named_parameters()]
    planned = [(one.shape, one.trained) for one in model_of(config).parameters]
    assert sorted(planned) == sorted(found)
    trained = {name.removeprefix("base_model.model.") for name, one in network.named_parameters() if one.requires_grad}
    assert {one.name for one in model_of(config).trained} == trained
    built = model_from(config, [(name, one.shape, one.requires_grad) for name, one in network.named_parameters()])
    assert sorted((one.layer, one.shape) for one in built.parameters) == sorted(
        (one.layer, one.shape) for one in model_of(config).parameters
    )


def test_added_tokens_and_a_tied_output_layer_are_counted() -> None:
    words = ["eval=none", "tracker=none", "method=full"]
    for extra in (["model=tiny_qwen2", "model.add_tokens=[zebra,quagga]"],
                  ["model=qwen2_0_5b", "model.init=random", "model.sizes.num_layers=1", "model.sizes.hidden_size=64",
                   "model.sizes.num_attention_heads=4", "model.sizes.intermediate_size=96"]):  # fmt: skip
        config = run_config([*words, *extra])
        network = empty_network(config.model, torch.float32)
        assert model_of(config).elements == sum(one.numel() for one in network.parameters()), extra
