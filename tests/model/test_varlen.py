"""Attention kind varlen: segments alone, with adapters and recomputation; sdpa without them; refused elsewhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.masking_utils import AttentionMaskInterface

from glmexp.config.errors import ConfigError
from glmexp.config.families import FAMILIES
from glmexp.config.model_rules import attention_kind
from glmexp.data.packing import collate_packed, model_inputs
from glmexp.engine.loss import forward_loss
from glmexp.model import chatglm2
from glmexp.model.build import load_network
from tests.config.helpers import config, refusal
from tests.data.test_packing import GRADIENT, LOSS
from tests.model.samples import examples, network, small_network

CAUSAL = ("chatglm2", "chatglm3", "qwen2")
TINY = {"chatglm2": "tiny_chatglm2", "chatglm3": "tiny", "qwen2": "tiny_qwen2"}
SIZES = [(3, 2), (0, 0), (6, 1), (20, 9), (1, 5)]
"""Tokens of context and answer; each example has an end token too, so the second is of one token."""


def packed(family: str, seed: int = 0) -> dict[str, Any]:
    """Two rows, the second with padding behind it."""
    rows = examples(family, SIZES, seed)
    return collate_packed([rows[:4], [rows[4], rows[1]]], pad_id=3, budget=64)


def adapted(model: Any, family: str) -> Any:
    """LoRA on the family's default layers, with a B that is not zero."""
    targets = list(FAMILIES[family].lora_targets)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def loss_and_gradients(model: Any, batch: dict[str, Any], inputs: dict[str, Any]) -> tuple[float, Tensor]:
    model.zero_grad()
    loss = forward_loss(model, inputs, batch)
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", CAUSAL)
def test_the_shipped_models_learn_the_same_with_segments_a_mask_or_one_by_one(family: str, method: str) -> None:
    """And with gradient checkpointing, bit for bit what it is without."""
    model = load_network(config(f"model={TINY[family]}").model, torch.float32)
    model = adapted(model, family) if method == "lora" else model
    network_ = model.get_base_model() if method == "lora" else model
    rows, found = examples(family, SIZES), {}
    for kind in ("sdpa", "varlen"):
        network_.set_attn_implementation(kind)
        batch = packed(family)
        inputs = model_inputs(batch, family, None, kind)  # type: ignore[arg-type]
        found[kind] = loss_and_gradients(model, batch, inputs)
    network_.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = loss_and_gradients(model.train(), batch, inputs)
    assert torch.equal(again[1], found["varlen"][1])
    alone, total = torch.zeros_like(again[1]), 0.0
    for row in (rows[0], rows[2], rows[3], rows[4]):
        one = collate_packed([[row]], 3, 64)
        loss, gradients = loss_and_gradients(model, one, {"input_ids": one["input_ids"]})
        total, alone = total + loss, alone + gradients
    count = len(packed(family)["targets"])
    for loss, gradients in found.values():
        assert abs(loss - total) / count <= LOSS
        assert float((gradients - alone).norm() / alone.norm()) <= GRADIENT


@pytest.mark.parametrize("family", CAUSAL)
def test_no_gradient_reaches_the_tokens_of_another_example(family: str) -> None:
    model = network(family, "varlen")
    batch = packed(family)
    ids = batch["input_ids"]
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    given = model_inputs(batch, family, None, "varlen")  # type: ignore[arg-type]
    logits = model(**{**given, "input_ids": None, "inputs_embeds": embedded}, use_cache=False).logits
    third = batch["segments"][0] == 3
    logits[0][third].square().sum().backward()
    assert embedded.grad is not None
    touched = embedded.grad.abs().sum(-1) > 0
    assert torch.equal(touched[0], third)
    assert not bool(touched[1].any())


@pytest.mark.parametrize("family", CAUSAL)
def test_no_mask_is_made_for_segments(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(chatglm2, "decoder_mask", refuse)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "varlen", refuse)
    model, batch = network(family, "varlen"), packed(family)
    assert torch.isfinite(model(**model_inputs(batch, family, None, "varlen"), use_cache=False).logits).all()  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a mask was made"):
        model(input_ids=batch["input_ids"], attention_mask=(batch["segments"] != 0).long(), use_cache=False)


def test_qwen2_sees_packed_positions_without_segments_as_packed() -> None:
    """transformers masks nothing for an attention name without a mask function, and positions alone must do here."""
    batch = packed("qwen2")
    logits = [
        network("qwen2", kind)(**model_inputs(batch, "qwen2", None, "sdpa"), use_cache=False).logits
        for kind in ("sdpa", "varlen")
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", CAUSAL)
def test_padded_rows_and_generation_are_those_of_sdpa(family: str, side: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    plain, varlen = network(family, "sdpa"), network(family, "varlen")
    with torch.no_grad():
        assert torch.equal(plain(**given).logits, varlen(**given).logits)
        assert torch.equal(plain(input_ids=ids).logits, varlen(input_ids=ids).logits)
    if side == "left":
        sentences = [
            model.generate(**given, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=3)
            for model in (plain, varlen)
        ]
        assert sentences[0].shape == (2, 15)
        assert torch.equal(*sentences)


def test_what_segments_cannot_be_combined_with_is_refused() -> None:
    batch = packed("chatglm3")
    given = model_inputs(batch, "chatglm3", None, "varlen")
    with pytest.raises(ValueError, match="cu_seq_lens_q needs attn_implementation='varlen'"):
        small_network("chatglm3", "sdpa")(**given)
    with pytest.raises(ValueError, match="cu_seq_lens_q needs"):
        small_network("chatglm", "sdpa")(**given)
    model = small_network("chatglm3", "varlen")
    with pytest.raises(ValueError, match="and an attention mask"):
        model(**given, attention_mask=torch.ones_like(batch["input_ids"]))
    cache = model(input_ids=batch["input_ids"], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="segments are whole"):
        model(**given, past_key_values=cache)
    with pytest.raises(ConfigError, match="'varlen' does not apply to ChatGLMForConditionalGeneration"):
        small_network("chatglm", "varlen")


def test_layers_with_a_window_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes, **window).save_pretrained(tmp_path)
    section = config("model=tiny_qwen2", "data.packing=true", "model.attention=varlen").model
    section = dataclasses.replace(section, path=str(tmp_path))  # a configuration alone: no folder that a run may name
    with pytest.raises(ConfigError, match="varlen has no sliding window"):
        load_network(section, torch.float32)


def test_null_is_varlen_for_packed_rows_where_it_applies() -> None:
    assert attention_kind(config("data.packing=true")) == ("varlen", "")
    assert attention_kind(config("data.packing=true", "model=tiny_qwen2")) == ("varlen", "")
    assert attention_kind(config("data.packing=true", "method=ptuning")) == ("varlen", "")
    assert attention_kind(config("data.packing=true", "model.attention=eager")) == ("eager", "")
    assert attention_kind(config()) == ("sdpa", "")
    kind, reason = attention_kind(config("data.packing=true", "model=tiny_chatglm"))
    assert (kind, reason.split(",")[0]) == (
        "sdpa",
        "the context of ChatGLM-6B's rows sees itself in both directions",
    )


def test_varlen_where_it_does_nothing_is_refused() -> None:
    assert refusal("model=tiny_chatglm", "data.packing=true", "model.attention=varlen") == (
        "config error:\n"
        "  model.attention: varlen does not apply: the context of ChatGLM-6B's rows sees itself in both directions, "
        "which needs a mask (from the command line)\n"
        "    -> model.attention=sdpa"
    )
    assert "model.attention: varlen without effect: no rows are packed" in refusal("model.attention=varlen")
    assert "without effect under entry=evaluate" in refusal("entry=evaluate", "model.attention=varlen")


def test_a_saved_network_asks_nobody_for_varlen(tmp_path: Path) -> None:
    """Others load the folder without this package."""
    network("qwen2", "varlen").save_pretrained(tmp_path)
    assert "varlen" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
