"""Useful operations are those that torch counts, less padding, the masked half and what is computed twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from glmexp.config.families import FAMILIES
from glmexp.data.collate import collate
from glmexp.data.packing import collate_packed, model_inputs, visible
from glmexp.data.store import Example
from glmexp.engine import flops, perf
from glmexp.engine.loop import size_over_ranks
from glmexp.engine.loss import forward_loss, padded_inputs
from glmexp.entry.training import _recompute_activations
from glmexp.model.build import load_network
from tests.engine.cells import configure, rows


def _model(*words: str) -> tuple[Any, Any, flops.Work]:
    """(configuration, model with attention that torch counts as plain products, what we count)."""
    config = configure(*words)
    network = load_network(replace(config.model, attention="eager"), torch.float32)
    model = config.method.apply(network, FAMILIES[config.model.family]).train()
    sop = network.config.bos_token_id if config.model.family == "chatglm" else None
    work = flops.count(model, FAMILIES[config.model.family].layers, sop)
    assert work is not None
    return config, model, work


def _counted(model: Any, inputs: dict[str, Any], batch: dict[str, Any]) -> tuple[int, int]:
    """(linear layers, attention's products) of a forward and a backward pass, as torch sees them."""
    with FlopCounterMode(display=False) as counter:
        forward_loss(model, inputs, batch).backward()
    by_kind = {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for kind, count in by_kind.items() if "bmm" in kind)
    return sum(by_kind.values()) - attention, attention


def _linears(work: flops.Work, tokens: int, batch: dict[str, Any]) -> int:
    return work.per_token * tokens + work.per_label * len(batch["predicting"]) + work.per_batch


@pytest.mark.parametrize("model", ["tiny", "tiny_chatglm", "tiny_qwen2"])
@pytest.mark.parametrize(
    "method",
    [
        ["method=full"],
        ["method=lora"],
        ["method=lora", "method.target_modules=[dense]"],
        ["method=freeze", "method.num_layers=1"],
        ["method=ptuning"],
        ["method=ptuning", "method.prefix_projection=true"],
    ],
)
def test_linear_layers_and_attention_are_what_torch_counts(model: str, method: list[str]) -> None:
    """Exactly, and attention's square where nothing is masked. Of a prefix torch leaves out one of the six products
    in the first layer, whose queries need no gradient: at most 1/12 of attention with two layers."""
    if model == "tiny_qwen2":
        if "method.prefix_projection=true" in method:
            pytest.skip("PEFT makes the same prefix once a row")
        method = [word.replace("[dense]", "[o_proj]") for word in method]
    config, network, work = _model(f"model={model}", *method)
    examples, pad_id = rows(config)
    batch = collate([examples[0]] * 3, pad_id)
    length = int(batch["lengths"][0])
    linears, attention = _counted(network, padded_inputs(batch), batch)
    assert linears == _linears(work, 3 * length, batch)
    square = work.per_pair * 3 * length * (length + work.virtual_tokens)
    assert (square == attention) or (method[0] == "method=ptuning" and 0 <= square - attention <= square / 12)


def test_recomputation_is_no_useful_work() -> None:
    """The same network counts the same under checkpointing, where torch sees the forward pass of all blocks twice."""
    config, network, work = _model("model=tiny", "method=lora")
    examples, pad_id = rows(config)
    batch = collate([examples[0]], pad_id)
    plain, _ = _counted(network, padded_inputs(batch), batch)
    _recompute_activations(network)
    again, _ = _counted(network, padded_inputs(batch), batch)
    assert again > 1.3 * plain
    assert flops.count(network, FAMILIES["chatglm3"].layers) == work
    assert plain == _linears(work, int(batch["lengths"][0]), batch)


def test_full_lora_and_freeze_by_hand() -> None:
    """6N, about 4N, and 2N below the last layer: N counted from the shapes, layer by layer."""
    _, network, work = _model("model=tiny", "method=full")
    blocks = network.transformer.encoder.layers
    size = sum(p.numel() for p in blocks.parameters() if p.ndim == 2)
    head = network.transformer.output_layer.weight.numel()
    assert (work.per_token, work.per_label) == (6 * size, 6 * head)

    _, network, work = _model("model=tiny", "method=freeze", "method.num_layers=1")
    block = network.transformer.encoder.layers[-1]
    first = block.self_attention.query_key_value.weight.numel()
    last = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    # The last layer's first matmul needs no gradient of its input: nothing before it is trained but a norm.
    assert work.per_token == 2 * (size - last) + 6 * last - 2 * first * (not block.input_layernorm.weight.requires_grad)
    assert work.per_label == 4 * head

    _, network, work = _model("model=tiny", "method=lora", "method.rank=4")
    adapters = sum(p.numel() for n, p in network.named_parameters() if "lora_" in n)
    below = sum(p.numel() for n, p in network.named_parameters() if "layers.0." in n and "lora_A" in n)
    # The first layer's query_key_value has nothing trained before it: 2N for it and 4 for its lora_A.
    assert work.per_token == 4 * size - 2 * first + 6 * adapters - 2 * below


def _packed(config: Any) -> tuple[dict[str, Any], list[list[Example]]]:
    examples, pad_id = rows(config)
    packed = [[examples[0], examples[1], examples[2]], [examples[3]]]
    return collate_packed(packed, pad_id, 4096), packed


@pytest.mark.parametrize("model", ["tiny", "tiny_chatglm"])
def test_attention_counts_what_is_attended(model: str) -> None:
    """Packed and padded alike: the pairs that the mask shows, v1's open context too; padding is worth nothing."""
    config, network, work = _model(f"model={model}", "method=lora", "data.packing=true")
    batch, packed = _packed(config)
    gmask = getattr(network.base_model.model.config, "gmask_token_id", None)
    inputs = model_inputs(batch, config.model.family, gmask, "eager")
    seen = ~inputs["attention_mask"] if model == "tiny_chatglm" else visible(batch["segments"], None)
    real = batch["segments"] != 0
    pairs = int((seen[:, 0] & real[:, :, None]).sum())
    tokens = int(batch["lengths"].sum())
    assert work.of(batch) == _linears(work, tokens, batch) + work.per_pair * pairs

    one_by_one = [collate([example], 0) for row in packed for example in row]
    assert sum(map(work.of, one_by_one)) == work.of(batch), "packed or not, the useful work is the same"
    examples = [example for row in packed for example in row]
    assert work.of(collate(examples, 0)) == work.of(batch), "and padded too"
    linears, _ = _counted(network, inputs, batch)
    padding = batch["input_ids"].numel() - tokens
    assert linears == _linears(work, tokens + padding, batch)


def test_blank_rows_count_as_padding() -> None:
    config, _, work = _model("model=tiny", "method=full")
    examples, pad_id = rows(config)
    full, blank = collate([examples[0]], pad_id), collate([examples[0], examples[0].blank()], pad_id)
    assert work.of(blank) == work.of(full)
    speed = perf.Speed(work, perf.Peak(1e12, "made up"))
    sizes = [size_over_ranks([batch], speed) for batch in (full, blank)]
    assert sizes[0].tokens == sizes[1].tokens == len(examples[0].input_ids)
    assert sizes[0].operations == sizes[1].operations == work.of(full)
    assert sizes[1].places == 2 * sizes[0].places
    assert speed.metrics(4 * 10**12, step_s=2.0, ranks=2) == {"perf/tflops_per_gpu": 1.0, "perf/mfu": 1.0}


def test_an_unknown_network_is_not_guessed() -> None:
    assert flops.count(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)])), "0") is None


def test_listed_peaks_are_found_by_the_whole_word() -> None:
    def flops_of(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
        found = perf.listed(name, dtype)
        return None if found is None else found.flops

    assert flops_of("NVIDIA H200") == 989.4e12
    assert flops_of("NVIDIA H20") == 148e12
    assert flops_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert flops_of("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert flops_of("NVIDIA H100 NVL") == 835.5e12
    assert flops_of("NVIDIA L40S") == 362e12
    assert flops_of("NVIDIA Something 1") is None
    assert perf.listed("NVIDIA H200", torch.float16).source == "listed for NVIDIA H200"  # type: ignore[union-attr]
    assert perf.peak_of(torch.bfloat16) is None or np.isfinite(perf.peak_of(torch.bfloat16).flops)  # type: ignore[union-attr]
