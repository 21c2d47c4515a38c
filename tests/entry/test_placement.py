"""Where a network lies changes nothing of what it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glmexp.config.errors import ConfigError
from glmexp.config.families import FAMILIES as FACTS
from glmexp.config.inference_schema import DecodingSection, PlacementSection
from glmexp.config.registry import option
from glmexp.entry import placement
from tests.model.samples import FAMILIES, network
from tests.model.test_decoder import prompts


def section(folder: Path | None, cpu_bytes: int | None) -> PlacementSection:
    return PlacementSection("layers", None, cpu_bytes, None if folder is None else str(folder), True)


def logits(model: Any, family: str) -> torch.Tensor:
    ids, real = prompts(family, 9, 5)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=real).logits


@pytest.mark.parametrize("prefix", [False, True], ids=["", "prefix"])
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_blocks_lie_on_the_disk_and_answer_the_same(family: str, prefix: bool, tmp_path: Path) -> None:
    if prefix and not FACTS[family].native_prefix:  # type: ignore[index]
        pytest.skip("its prefix is PEFT's")
    model = network(family, "sdpa")
    if prefix:
        model.add_prefix_encoder(3, prefix_projection=False)
        model.eval()
    before = logits(model, family)
    blocks = FACTS[family].layers  # type: ignore[index]
    bytes_of_all = sum(parameter.numel() * 4 for parameter in model.parameters())
    some = section(tmp_path / "disk", int(0.95 * bytes_of_all))
    found = placement.map_of(model, some)
    where = [
        {place for name, place in found.items() if f"{name}.".startswith(block) or block.startswith(f"{name}.")}
        for block in (f"{blocks}.{index}." for index in range(2))
    ]
    assert all(len(places) == 1 for places in where), "no block is split"
    assert {"disk"} in where, found
    placed = placement.place(model, family, some, DecodingSection("plain"), 60.0)  # type: ignore[arg-type]
    assert any(parameter.device.type == "meta" for parameter in placed.parameters())
    assert (logits(placed, family) - before).abs().max() <= 1e-5
    ids, real = prompts(family, 9, 5)
    new = placed.generate(input_ids=ids, attention_mask=real, max_new_tokens=3, do_sample=False, pad_token_id=3)
    assert new.shape[1] == ids.shape[1] + 3


def test_what_fits_nowhere_is_said() -> None:
    with pytest.raises(ConfigError) as caught:
        placement.over_devices(network("chatglm3", "sdpa"), section(None, 20_000))
    assert "placement.disk_folder: is null" in caught.value.report()


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_is_merged_where_our_decoder_writes_and_kept_elsewhere(family: str) -> None:
    method = option("method", "lora")(
        name="lora", rank=2, alpha=4, dropout=0.1, target_modules=None, modules_to_save=[], lr=1e-3
    )
    model: Any = method.apply(network(family, "sdpa"), FACTS[family])  # type: ignore[index]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.eval()
    before = logits(model, family)
    single = PlacementSection("single", None, None, None, True)
    kept = placement.place(model, family, single, DecodingSection("plain"), 60.0)  # type: ignore[arg-type]
    assert kept is model
    merged = placement.place(model, family, single, DecodingSection("static"), 60.0)  # type: ignore[arg-type]
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    assert (logits(merged, family) - before).abs().max() <= 1e-5


def test_a_way_that_does_not_apply_is_refused() -> None:
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(network("qwen2", "sdpa"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError) as caught:
        placement.decoder(model, DecodingSection("static"), True)
    assert "static does not apply to PeftModelForCausalLM" in caught.value.report()
    assert placement.decoder(model, DecodingSection(None), True) is None
    split = PlacementSection("tensor_parallel", None, None, None, True)
    with pytest.raises(ConfigError) as caught:
        placement.place(model, "qwen2", split, DecodingSection(None), 60.0)
    assert "has no place for a prefix of PEFT" in caught.value.report()
