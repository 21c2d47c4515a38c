"""ChatGLM2/3 as GlmForCausalLM and back: the same logits from the same numbers; what has no place is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GlmForCausalLM, PreTrainedModel

from glmexp.config.errors import ArtifactError
from glmexp.model.glm_adapter import adapter_from_glm, adapter_to_glm
from glmexp.model.glm_layout import chatglm_config, from_glm, glm_config, to_glm
from tests.model.samples import small_network

IDS = torch.randint(5, 50, (2, 60), generator=torch.Generator().manual_seed(3))
# float32 on one CPU: other order of the same sums. Logits are up to 5 in size.
LOGITS = 1e-5
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("chatglm2", {}),
    ("chatglm3", {}),
    ("chatglm3", {"multi_query_group_num": 1}),
    ("chatglm3", {"multi_query_group_num": 4}),
    ("chatglm3", {"multi_query_attention": False}),
    ("chatglm3", {"add_qkv_bias": False}),
    ("chatglm3", {"rope_ratio": 8}),
    ("chatglm2", {"rope_ratio": 4}),
]


def as_glm(network: PreTrainedModel) -> GlmForCausalLM:
    glm = GlmForCausalLM(glm_config(network.config)).eval()
    glm.load_state_dict(to_glm(network.state_dict(), network.config))
    return glm


def logits(network: nn.Module) -> Tensor:
    with torch.no_grad():
        return network(input_ids=IDS).logits


def difference(one: nn.Module, other: nn.Module) -> float:
    return float((logits(one) - logits(other)).abs().max())


@pytest.mark.parametrize(("release", "changes"), KINDS, ids=str)
def test_logits_are_equal_there_and_back(release: str, changes: dict[str, Any]) -> None:
    network = small_network(release, **changes)
    glm = as_glm(network)
    assert difference(network, glm) <= LOGITS
    config = chatglm_config(glm.config, release)
    back = type(network)(config).eval()
    back.load_state_dict(from_glm(glm.state_dict(), glm.config))
    assert difference(network, back) <= LOGITS
    assert config.rope_ratio == network.config.rope_ratio


def test_weights_come_back_bit_by_bit_and_inverse_frequencies_are_left_out() -> None:
    network = small_network("chatglm3")
    weights = network.state_dict()
    released = {**weights, "transformer.rotary_pos_emb.inv_freq": torch.ones(4)}
    back = from_glm(to_glm(released, network.config), glm_config(network.config))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"rmsnorm": False},
        {"post_layer_norm": False},
        {"add_bias_linear": True},
        {"apply_residual_connection_post_layernorm": True},
        {"fp32_residual_connection": True},
        {"pre_seq_len": 3},
    ],
    ids=str,
)
def test_what_has_no_place_is_refused_by_name(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ArtifactError, match=f"config.json: {name}: is .*GlmForCausalLM has no place for it"):
        glm_config(small_network("chatglm3", **changes).config)


def test_foreign_keys_and_half_checkpoints_are_refused() -> None:
    network = small_network("chatglm3")
    with pytest.raises(ArtifactError, match=r"transformer.prefix_encoder.embedding: has no place"):
        to_glm({"transformer.prefix_encoder.embedding.weight": torch.ones(1)}, network.config)
    weights = to_glm(network.state_dict(), network.config)
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ArtifactError, match=r"model.layers.1.self_attn.k_proj.weight: is missing"):
        from_glm(weights, glm_config(network.config))
    with pytest.raises(ArtifactError, match="has no place in chatglm2"):
        chatglm_config(glm_config(small_network("chatglm3", rope_ratio=8).config), "chatglm2")


def adapter(network: Any, folder: Path, **settings: Any) -> Any:
    """A LoRA adapter with effect, saved to ``folder``; returns the adapted network."""
    torch.manual_seed(5)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=7, init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(network, lora).eval()
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            parameter.data += 0.1
    adapted.save_pretrained(folder)
    return adapted


def loaded(network: Any, folder: Path) -> Any:
    model = peft.PeftModel.from_pretrained(network, folder).eval()
    assert set(load_file(folder / "adapter_model.safetensors")) == set(peft.get_peft_model_state_dict(model))
    return model


@pytest.mark.parametrize("changes", [{}, {"multi_query_attention": False}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["query_key_value"]},
        {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
        {"target_modules": ["query_key_value"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": r".*layers\.0\..*query_key_value", "use_rslora": True},
        {"target_modules": ["query_key_value"], "modules_to_save": ["output_layer"]},
    ],
    ids=str,
)
def test_adapters_give_equal_logits_there_and_back(
    changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    network = small_network("chatglm3", **changes)
    base = logits(network)
    config, glm = network.config, as_glm(network)
    adapted = adapter(network, tmp_path / "released", **settings)
    adapter_to_glm(tmp_path / "released", tmp_path / "glm", config, base="somewhere")
    assert difference(adapted, loaded(glm, tmp_path / "glm")) <= LOGITS
    assert float((logits(adapted) - base).abs().max()) > 0.1, "the adapter has an effect"
    if changes:
        return
    adapter_from_glm(tmp_path / "glm", tmp_path / "back", glm.config)
    assert difference(adapted, loaded(small_network("chatglm3"), tmp_path / "back")) <= LOGITS
    first, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("released", "back"))
    assert {name: tensor.shape for name, tensor in first.items()} == {n: tensor.shape for n, tensor in again.items()}
    assert json.loads((tmp_path / "back" / "adapter_config.json").read_text())["r"] == 3


@pytest.mark.parametrize(
    "targets", [["q_proj", "k_proj", "v_proj"], ["q_proj", "v_proj"], ["k_proj"], ["q_proj", "o_proj", "down_proj"]]
)
def test_adapters_with_an_a_each_keep_their_function_at_a_higher_rank(targets: list[str], tmp_path: Path) -> None:
    network = small_network("chatglm3")
    glm = as_glm(network)
    adapted = adapter(glm, tmp_path / "glm", target_modules=targets)
    adapter_from_glm(tmp_path / "glm", tmp_path / "released", glm.config)
    assert difference(adapted, loaded(network, tmp_path / "released")) <= LOGITS
    rank = json.loads((tmp_path / "released" / "adapter_config.json").read_text())["r"]
    assert rank == (9 if {"q_proj", "v_proj"} <= set(targets) else 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora: True cannot be converted exactly"),
        ({"rank_pattern": {"layers.0": 2}}, "rank_pattern"),
        ({"use_rslora": True}, "q, k and v have an A each, and rsLoRA's scale does not keep"),
    ],
)
def test_adapters_that_have_no_exact_form_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    glm = as_glm(small_network("chatglm3"))
    adapter(glm, tmp_path / "glm", target_modules=["q_proj", "k_proj", "v_proj"], **settings)
    with pytest.raises(ArtifactError, match=said):
        adapter_from_glm(tmp_path / "glm", tmp_path / "released", glm.config)
