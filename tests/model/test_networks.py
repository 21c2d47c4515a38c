"""Networks without recorded numbers: loading, saving, dtypes, counts, masks, checkpointing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from glmexp.config.errors import ConfigError
from glmexp.model import (
    ChatGLM2Config,
    ChatGLM2ForConditionalGeneration,
    ChatGLMConfig,
    ChatGLMForConditionalGeneration,
)
from glmexp.model.rope import inverse_frequencies
from tests.model.samples import GMASK, MASK, RELEASES, SOP, released_config, small_batch, small_config, small_network

release_names = pytest.mark.parametrize("release", RELEASES)


def released_checkpoint(folder: Path, release: str, suffix: str = "safetensors") -> PreTrainedModel:
    """Write a network as a release has it on disk, with inverse frequencies and both of v1's tied tensors."""
    model = small_network(release)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    extra = "transformer.rotary_pos_emb.inv_freq"
    tensors[extra if release != "chatglm" else "transformer.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
    (folder / "config.json").write_text(json.dumps(released_config(release)))
    if suffix == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(batch["input_ids"]).logits


@release_names
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_released_folder_loads_without_running_its_code(
    release: str, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = released_checkpoint(tmp_path, release, suffix)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    wanted = ChatGLMForConditionalGeneration if release == "chatglm" else ChatGLM2ForConditionalGeneration
    assert type(loaded) is wanted
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(logits(loaded.eval(), small_batch(release)), logits(model, small_batch(release)))


@release_names
def test_saving_keeps_the_release_the_names_and_the_numbers(release: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    model = released_checkpoint(first, release)
    loaded = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32).eval()
    loaded.save_pretrained(second)
    names = set(load_file(second / "model.safetensors"))
    tied = {"lm_head.weight"} if release == "chatglm" else set()
    assert names | tied == set(model.state_dict()) | tied
    again = AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32).eval()
    assert again.config.release == release
    batch = small_batch(release)
    assert torch.equal(logits(again, batch), logits(loaded, batch))


def test_v1_is_tied_although_its_config_does_not_say_so(tmp_path: Path) -> None:
    released_checkpoint(tmp_path, "chatglm")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.transformer.word_embeddings.weight
    assert len([name for name, _ in model.named_parameters() if "lm_head" in name or "word_embeddings" in name]) == 1


def test_the_first_release_with_150528_ids_gets_its_mask_ids() -> None:
    released = {**released_config("chatglm"), "vocab_size": 150528, "bos_token_id": 150004, "eos_token_id": 150005}
    config = ChatGLMConfig.from_dict(released)
    assert (config.mask_token_id, config.gmask_token_id) == (150000, 150001)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.transformer.word_embeddings.weight.shape == (150528, 32)


def test_rope_ratio_without_a_release_is_refused() -> None:
    config = {**released_config("chatglm2"), "rope_ratio": 50, "_name_or_path": "mine"}
    with pytest.raises(ConfigError, match="rope_ratio") as error:
        ChatGLM2Config.from_dict(config)
    assert '"release": "chatglm2"' in str(error.value)
    assert ChatGLM2Config.from_dict({**config, "release": "chatglm2"}).release == "chatglm2"


def test_a_config_of_another_release_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="describes chatglm, which ChatGLM2Config cannot read"):
        ChatGLM2Config.from_dict(released_config("chatglm"))


def test_quantized_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="4-bit packed weights cannot be trained"):
        ChatGLMConfig(quantization_bit=4)


@release_names
@pytest.mark.parametrize("kind", ["flash_attention_2", "flex_attention", "paged|eager", "nonsense"])
def test_an_attention_kind_that_does_not_apply_is_refused(release: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"does not apply to ChatGLM.*\n.*choose one of eager, sdpa"):
        small_network(release, attention=kind)
    model = small_network(release)
    with pytest.raises(ConfigError, match="choose one of eager, sdpa"):
        model.set_attn_implementation(kind)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


@release_names
def test_eager_and_sdpa_agree_with_their_gradients(release: str) -> None:
    batch = small_batch(release)
    results = []
    for attention in ("eager", "sdpa"):
        model = small_network(release, attention)
        loss = model(**batch).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for eager, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(sdpa, eager, rtol=1e-4, atol=1e-5)


@release_names
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_leaves_rope_in_float32(release: str, dtype: torch.dtype) -> None:
    """Positions above 256 fall together in bfloat16: a rounded table would give equal angles."""
    model = small_network(release, seq_length=2048, max_sequence_length=2048).to(dtype)
    assert not [name for name, buffer in model.named_buffers() if "freq" in name or "cos" in name]
    positions = torch.tensor([[1000, 1001]])
    if release == "chatglm":
        ((cos, _), _) = model.transformer.rotation(positions[:, None].expand(1, 2, 2))
    else:
        cos, _ = model.transformer.rotation(positions)
    assert cos.dtype == torch.float32
    assert cos[0, 0, 0, 0].item() == pytest.approx(torch.tensor(1000.0).cos().item(), abs=1e-6)
    assert (cos[0, 0, 0] - cos[0, 0, 1]).abs().max() > 0.1
    assert logits(model, small_batch(release)).dtype == dtype


def test_v1_frequencies_are_those_of_half_precision() -> None:
    frequencies = inverse_frequencies(64, torch.device("cpu"), half_rounded=True)
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, frequencies.half().float())
    exact = inverse_frequencies(64, torch.device("cpu"))
    assert not torch.equal(exact, frequencies)
    torch.testing.assert_close(exact, frequencies, rtol=1e-3, atol=1e-7)


def meta_model(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def lora_count(model: PreTrainedModel) -> int:
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["query_key_value"], task_type="CAUSAL_LM"))
    return sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)


def test_parameter_counts_of_the_6b_sizes() -> None:
    chatglm3, chatglm = meta_model(ChatGLM2Config()), meta_model(ChatGLMConfig())
    assert sum(parameter.numel() for parameter in chatglm3.parameters()) == 6_243_584_000
    # 28 * 201,379,840 in the blocks, 130,528 * 4096 tied once, 8192 in the last norm.
    assert sum(parameter.numel() for parameter in chatglm.parameters()) == 6_173_286_400
    assert lora_count(chatglm3) == 1_949_696
    assert lora_count(chatglm) == 3_670_016


@release_names
def test_left_pads_change_nothing_for_the_real_tokens(release: str) -> None:
    model, batch = small_network(release), small_batch(release)
    ids, pads = batch["input_ids"], 3
    padded = torch.nn.functional.pad(ids, (pads, 0), value=model.config.pad_token_id)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (pads, 0))
    positions = {} if release == "chatglm" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        shifted = model(padded, attention_mask=mask, **positions).logits[:, pads:]
    torch.testing.assert_close(shifted, logits(model, batch), rtol=1e-4, atol=1e-5)


@release_names
def test_right_pads_need_no_mask(release: str) -> None:
    model, batch = small_network(release), small_batch(release)
    padded = torch.nn.functional.pad(batch["input_ids"], (0, 4), value=model.config.pad_token_id)
    with torch.no_grad():
        shorter = model(padded).logits[:, : batch["input_ids"].shape[1]]
    torch.testing.assert_close(shorter, logits(model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("release", ["chatglm2", "chatglm3"])
def test_packed_rows_with_a_block_mask_equal_single_rows(release: str) -> None:
    model, ids = small_network(release, padded_vocab_size=64), small_batch(release)["input_ids"]
    length = ids.shape[1]
    packed = ids.reshape(1, -1)
    row = torch.arange(2).repeat_interleave(length)
    mask = (row[:, None] == row[None]) & torch.ones(2 * length, 2 * length, dtype=torch.bool).tril()
    positions = torch.arange(length).repeat(2)[None]
    with torch.no_grad():
        together = model(packed, attention_mask=mask[None, None], position_ids=positions).logits.view(2, length, -1)
    torch.testing.assert_close(together, logits(model, {"input_ids": ids}), rtol=1e-4, atol=1e-5)


@release_names
def test_kept_logits_are_a_part_of_all_logits_and_give_the_same_loss(release: str) -> None:
    model, batch = small_network(release), small_batch(release)
    whole = model(**batch)
    supervised = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1))
    for keep in (7, torch.arange(5, 12), supervised):
        part = model(**batch, logits_to_keep=keep)
        wanted = whole.logits[supervised] if keep is supervised else whole.logits[:, 5:]
        torch.testing.assert_close(part.logits, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(part.loss, whole.loss, rtol=1e-5, atol=1e-6)


@release_names
def test_the_loss_is_in_float32_and_counts_supervised_tokens_only(release: str) -> None:
    model, batch = small_network(release).to(torch.bfloat16), small_batch(release)
    output = model(**batch)
    assert output.loss.dtype == torch.float32
    kept = batch["labels"][:, 1:] != -100
    wanted = torch.nn.functional.cross_entropy(output.logits[:, :-1].float()[kept], batch["labels"][:, 1:][kept])
    torch.testing.assert_close(output.loss, wanted)
    half = model(**batch, num_items_in_batch=2 * int(kept.sum()))
    torch.testing.assert_close(half.loss, wanted / 2)


@release_names
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(release: str, reentrant: bool) -> None:
    batch, gradients = small_batch(release), []
    for checkpointing in (False, True):
        model = small_network(release).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(**batch).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@release_names
def test_training_makes_no_cache_and_inference_does(release: str) -> None:
    model, batch = small_network(release), small_batch(release)
    assert model(**batch).past_key_values is not None
    assert model(**batch, use_cache=False).past_key_values is None
    assert model.train()(**batch).past_key_values is None


def test_positions_beyond_seq_length_are_an_error() -> None:
    model = small_network("chatglm3")
    with pytest.raises(ValueError, match="position 64 is outside the model's seq_length of 64"):
        model(torch.ones(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match="position 70"):
        model(torch.ones(1, 1, dtype=torch.long), position_ids=torch.tensor([[70]]))


def test_v1_rows_without_sop_or_mask_token_are_an_error() -> None:
    model = small_network("chatglm")
    for ids in ([[5, 6, GMASK, 7]], [[5, 6, SOP, 7]]):
        with pytest.raises(ValueError, match="row 0 of input_ids lacks sop"):
            model(torch.tensor(ids))
    with pytest.raises(ValueError, match=r"ChatGLM-6B has \(batch, 2, length\)"):
        model(torch.tensor([[5, GMASK, SOP, 7]]), position_ids=torch.arange(4)[None])
    past = model(torch.tensor([[5, MASK, SOP]]), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="give position_ids"):
        model(torch.tensor([[7]]), past_key_values=past)


@release_names
def test_a_mask_of_another_length_is_an_error(release: str) -> None:
    with pytest.raises(ValueError, match="attention_mask is"):
        small_network(release)(**small_batch(release), attention_mask=torch.ones(2, 5))


@release_names
def test_added_tokens_widen_embedding_and_head(release: str) -> None:
    model = small_network(release)
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == 70
    assert model(**small_batch(release)).logits.shape[-1] == 70
    if release == "chatglm":
        assert model.lm_head.weight is model.transformer.word_embeddings.weight


def test_auto_config_finds_the_class_of_the_release(tmp_path: Path) -> None:
    for release in RELEASES:
        (tmp_path / "config.json").write_text(json.dumps(released_config(release)))
        config = AutoConfig.from_pretrained(tmp_path)
        assert config.release == release
        assert type(config) is type(small_config(release))
