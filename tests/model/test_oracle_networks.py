"""Every recorded case of every variant: logits, hidden states, loss, gradients, cached decoding, greedy ids."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.oracles import GRADIENT, LOGITS, LOSS, Recorded, needs_oracles, network, recorded, variants

pytestmark = needs_oracles
ATTENTION = ("eager", "sdpa")


def forward_cases(oracle: Recorded) -> list[str]:
    return [case for case, facts in oracle.cases.items() if "inputs_passed" in facts]


def compare_forward(model: PreTrainedModel, oracle: Recorded, case: str) -> None:
    facts, real = oracle.cases[case], oracle.get(case, "real_mask").bool()
    model.zero_grad(set_to_none=True)
    output = model(**oracle.inputs(case), labels=oracle.get(case, "labels"), output_hidden_states=True)
    worst = (output.logits - oracle.get(case, "logits"))[real].abs().max()
    assert worst <= LOGITS, f"{case}: logits differ by {worst:.1e}"
    if oracle.get(case, "hidden_states") is not None:
        states = torch.stack(output.hidden_states)
        worst = (states - oracle.get(case, "hidden_states"))[:, real].abs().max()
        assert worst <= LOGITS, f"{case}: hidden states differ by {worst:.1e}"
    if "loss" in facts:
        assert output.loss.item() == pytest.approx(facts["loss"], abs=LOSS)
    if "grad_norms" in facts:
        output.loss.backward()
        compare_gradients(model, oracle, case)


def compare_gradients(model: PreTrainedModel, oracle: Recorded, case: str) -> None:
    parameters = dict(model.named_parameters())
    facts = oracle.cases[case]
    for name, norm in facts["grad_norms"].items():
        assert parameters[name].grad.norm().item() == pytest.approx(norm, rel=GRADIENT), name
    for name in facts.get("full_grads", []):
        wanted = oracle.get(case, f"grad.{name}")
        worst = (parameters[name].grad - wanted).abs().max()
        assert worst <= GRADIENT * wanted.abs().max(), f"{case}: gradient of {name} differs by {worst:.1e}"


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("variant", variants())
def test_forward_equals_the_released_code(variant: str, attention: str) -> None:
    oracle = recorded(variant)
    assert forward_cases(oracle), f"{variant} records no forward"
    for case in forward_cases(oracle):
        compare_forward(network(variant, attention), oracle, case)


def cached_steps(model: PreTrainedModel, oracle: Recorded) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Logits of the single steps after the prefill, and layer 0's (key, value) right after the prefill."""
    inputs = oracle.inputs("gmask_leftpad" if oracle.is_v1 else "leftpad")
    ids, mask, positions = inputs["input_ids"], inputs["attention_mask"], inputs["position_ids"]
    length, first = ids.shape[1], oracle.cases["incremental"]["prefill"]
    prefill = mask[..., :first, :first] if oracle.is_v1 else mask[:, :first]
    output = model(ids[:, :first], attention_mask=prefill, position_ids=positions[..., :first], use_cache=True)
    layer = output.past_key_values.layers[0]
    states = layer.keys.clone(), layer.values.clone()
    steps = []
    for place in range(first, length):
        step = mask[..., place : place + 1, : place + 1] if oracle.is_v1 else mask[:, : place + 1]
        output = model(
            ids[:, place : place + 1],
            attention_mask=step,
            position_ids=positions[..., place : place + 1],
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        steps.append(output.logits[:, -1])
    return torch.stack(steps, dim=1), states


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("variant", variants())
def test_decoding_with_a_cache_equals_the_released_code(variant: str, attention: str) -> None:
    oracle, model = recorded(variant), network(variant, attention)
    if "incremental" not in oracle.cases:
        pytest.skip(f"{variant} records no cached decoding")
    with torch.no_grad():
        logits, states = cached_steps(model, oracle)
    worst = (logits - oracle.get("incremental", "logits")).abs().max()
    assert worst <= LOGITS, f"logits of the single steps differ by {worst:.1e}"
    extra = model.config.pre_seq_len or 0
    real = oracle.get("gmask_leftpad" if oracle.is_v1 else "leftpad", "real_mask").bool()
    for name, own in zip(("past_key_layer0", "past_value_layer0"), states, strict=True):
        # The recorded cache has the prefix in front; ours gives it to the layers and caches the tokens alone.
        wanted = oracle.get("incremental", name)[extra:].permute(1, 0, 2, 3)
        keep = real[:, : wanted.shape[1]]
        worst = (own.transpose(1, 2) - wanted)[keep].abs().max()
        assert worst <= LOGITS, f"{name} differs by {worst:.1e}"


def generate(model: PreTrainedModel, oracle: Recorded, case: str, use_cache: bool) -> Tensor:
    inputs = oracle.inputs(case, ["input_ids", "attention_mask", "position_ids"])
    if oracle.is_v1 and "attention_mask" in inputs:
        # transformers takes 2D masks only; the model finds v1's positions by it.
        inputs = {"input_ids": inputs["input_ids"], "attention_mask": (~inputs["attention_mask"][:, 0, -1]).long()}
    eos = oracle.cases[case].get("eos_token_id")
    stop = {} if eos is None else {"eos_token_id": eos}
    return model.generate(**inputs, max_new_tokens=20, do_sample=False, use_cache=use_cache, **stop)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("variant", variants())
def test_greedy_generation_equals_the_released_code(variant: str, attention: str) -> None:
    oracle, model = recorded(variant), network(variant, attention)
    cases = [case for case in oracle.cases if case.startswith("generate")]
    if not cases:
        pytest.skip(f"{variant} records no generation")
    for case in cases:
        assert generate(model, oracle, case, use_cache=True).tolist() == oracle.get(case, "sequences").tolist(), case


@pytest.mark.parametrize("variant", variants())
def test_generation_without_a_cache_gives_the_same_ids(variant: str) -> None:
    oracle, model = recorded(variant), network(variant, "sdpa")
    if "generate_batch" not in oracle.cases:
        pytest.skip(f"{variant} records no generation")
    wanted = oracle.get("generate_batch", "sequences").tolist()
    assert generate(model, oracle, "generate_batch", use_cache=False).tolist() == wanted


@pytest.mark.parametrize("variant", [name for name in variants() if not name.startswith(("v2", "v3"))])
def test_positions_of_the_tokenizer_can_be_given_to_v1_generation(variant: str) -> None:
    oracle, model = recorded(variant), network(variant, "sdpa")
    if "generate_batch" not in oracle.cases:
        pytest.skip(f"{variant} records no generation")
    inputs = oracle.inputs("generate_batch", ["input_ids", "attention_mask", "position_ids"])
    real = (~inputs["attention_mask"][:, 0, -1]).long()
    ids = model.generate(
        inputs["input_ids"],
        attention_mask=real,
        position_ids=inputs["position_ids"],
        max_new_tokens=20,
        do_sample=False,
    )
    assert ids.tolist() == oracle.get("generate_batch", "sequences").tolist()


@pytest.mark.parametrize("variant", variants())
def test_lora_of_zero_effect_changes_nothing(variant: str) -> None:
    oracle = recorded(variant)
    base = AutoModelForCausalLM.from_pretrained(oracle.folder, dtype=torch.float32).eval()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["query_key_value"], task_type="CAUSAL_LM")).eval()
    for case in forward_cases(oracle):
        real = oracle.get(case, "real_mask").bool()
        with torch.no_grad():
            logits = model(**oracle.inputs(case)).logits
        assert (logits - oracle.get(case, "logits"))[real].abs().max() <= LOGITS, case
