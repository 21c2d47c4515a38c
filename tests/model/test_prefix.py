"""P-Tuning v2: a prefix that survives checkpointing, loading and generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from glmexp.config.errors import ArtifactError
from glmexp.model import load_prefix
from tests.model.samples import RELEASES, small_batch, small_network

release_names = pytest.mark.parametrize("release", RELEASES)
projections = pytest.mark.parametrize("projection", [False, True])
NAMES = {
    False: {"embedding.weight"},
    True: {"embedding.weight", "trans.0.weight", "trans.0.bias", "trans.2.weight", "trans.2.bias"},
}


def with_prefix(release: str, projection: bool, **changes: object) -> PreTrainedModel:
    model = small_network(release, **changes)
    torch.manual_seed(2)
    model.add_prefix_encoder(pre_seq_len=3, prefix_projection=projection)
    return model


def prefix_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if ".prefix_encoder." in name}


@release_names
@projections
def test_a_new_prefix_has_the_released_names_and_widths(release: str, projection: bool) -> None:
    model = with_prefix(release, projection)
    found = {
        name.removeprefix("transformer.prefix_encoder."): p for name, p in model.named_parameters() if "prefix" in name
    }
    assert set(found) == NAMES[projection]
    assert all(parameter.requires_grad for parameter in found.values())
    config = model.config
    assert (config.pre_seq_len, config.prefix_projection) == (3, projection)
    width = config.num_layers * 2 * config.num_key_value_heads * config.head_size
    narrow = projection and release == "chatglm"
    assert found["embedding.weight"].shape == (3, config.hidden_size if narrow else width)
    assert found["embedding.weight"].std().item() == pytest.approx(config.initializer_range, rel=0.2)


@release_names
@projections
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_prefix_learns_the_same_under_gradient_checkpointing(
    release: str, projection: bool, reentrant: bool
) -> None:
    batch, results = small_batch(release), []
    for checkpointing in (False, True):
        model = with_prefix(release, projection).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("prefix_encoder" in name)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)  # the prefix has dropout
        loss = model(**batch).loss
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    torch.testing.assert_close(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-5, atol=1e-8, msg=name)


@release_names
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_prefix_works_in_generation_with_and_without_cache(release: str, attention: str) -> None:
    model = with_prefix(release, False, attention=attention)
    ids = small_batch(release)["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    cached, whole = (model.generate(ids, use_cache=use_cache, **settings) for use_cache in (True, False))
    assert torch.equal(cached.sequences, whole.sequences)
    plain = small_network(release, attention).generate(ids, **settings)
    for with_cache, without, no_prefix in zip(cached.logits, whole.logits, plain.logits, strict=True):
        torch.testing.assert_close(with_cache, without, rtol=1e-4, atol=1e-4)
        assert (with_cache - no_prefix).abs().max() > 1e-3


@release_names
@projections
def test_a_released_prefix_checkpoint_gives_a_plain_model_its_prefix(release: str, projection: bool) -> None:
    source, target = with_prefix(release, projection), small_network(release)
    batch = small_batch(release)
    load_prefix(target, prefix_of(source))
    assert (target.config.pre_seq_len, target.config.prefix_projection) == (3, projection)
    assert torch.equal(target(**batch).logits, source(**batch).logits)


@release_names
def test_a_prefix_that_does_not_fit_is_named_and_changes_nothing(release: str) -> None:
    model = small_network(release)
    checkpoint = prefix_of(with_prefix(release, False, num_layers=3))
    checkpoint["transformer.layers.0.weight"] = torch.zeros(1)
    with pytest.raises(ArtifactError) as error:
        load_prefix(model, checkpoint)
    text = str(error.value)
    assert "transformer.prefix_encoder.embedding.weight: has shape" in text
    assert "transformer.layers.0.weight: is no weight of this model's prefix encoder" in text
    assert model.transformer.prefix_encoder is None
    assert model.config.pre_seq_len is None
    with pytest.raises(ArtifactError, match=r"has no transformer\.prefix_encoder\.embedding\.weight"):
        load_prefix(model, {})


@release_names
def test_missing_weights_of_a_prefix_are_named(release: str) -> None:
    model = with_prefix(release, True)
    checkpoint = prefix_of(model)
    del checkpoint["transformer.prefix_encoder.trans.2.bias"]
    with pytest.raises(ArtifactError, match=r"trans\.2\.bias: is missing"):
        load_prefix(model, checkpoint)


@release_names
@projections
def test_a_base_folder_with_pre_seq_len_gets_an_initialised_prefix(
    release: str, projection: bool, tmp_path: Path
) -> None:
    small_network(release).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, pre_seq_len=3, prefix_projection=projection, dtype=torch.float32
    ).eval()
    for name, tensor in prefix_of(model).items():
        if name.endswith("bias"):
            assert tensor.abs().max() == 0, name
        else:
            assert tensor.std().item() == pytest.approx(model.config.initializer_range, rel=0.25), name
    assert torch.isfinite(model(**small_batch(release)).loss)


@release_names
def test_a_model_with_a_prefix_survives_saving(release: str, tmp_path: Path) -> None:
    model = with_prefix(release, True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    batch = small_batch(release)
    assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_a_second_prefix_is_refused() -> None:
    model = with_prefix("chatglm3", False)
    with pytest.raises(ValueError, match="has a prefix of 3 virtual tokens already"):
        model.add_prefix_encoder(2, False)
