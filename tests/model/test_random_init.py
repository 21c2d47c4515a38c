"""Random networks of true sizes: their sizes, and the same bits wherever and however they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from glmexp.config.compose import run_config
from glmexp.config.ds_config import lower
from glmexp.config.families import FAMILIES
from glmexp.config.nearest import conf_folder
from glmexp.config.schema import RunConfig
from glmexp.engine import build, distributed, fingerprint
from glmexp.entry import proof
from glmexp.model.build import load_network, load_tokenizer, location, tokenizer_location
from glmexp.model.random_init import STD, network_config, random_network
from glmexp.model.tiny.recipes import qwen2_tokenizer
from tests.engine.cells import configure, engine_loop
from tests.model.samples import make_vocabulary, released_config
from tests.ranks import run_on_ranks

FAMILY_NAMES = ["chatglm", "chatglm2", "chatglm3", "qwen2"]


class AnyTokenizer:
    """Stands in where only the sizes matter."""

    bos_token_id, eos_token_id, pad_token_id, mask_token_id, gmask_token_id = 1, 2, 0, 3, 4

    def __len__(self) -> int:
        return 8


def true_network(option: str) -> Any:
    """The network of an option's own sizes without memory."""
    section = run_config([f"model={option}", "model.init=random"], ranks=1).model
    with torch.device("meta"):
        config = network_config(section, AnyTokenizer())
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), FAMILIES[section.family]


def tokenizer_folder(folder: Path, family: str) -> Path:
    """A checkpoint folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if family == "qwen2":
        qwen2_tokenizer(["one two three four five"], folder).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    else:
        make_vocabulary(folder, family)
        name = {"name_or_path": family, "tokenizer_class": "ChatGLMTokenizer"}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(name | ({"num_image_tokens": 0} if family == "chatglm" else {}))
        )
        (folder / "config.json").write_text(json.dumps(released_config(family)))
    return folder


def small(folder: Path, family: str, *more: str) -> RunConfig:
    """A run of a random network of two layers, with the tokenizer of ``folder``."""
    words = [f"model={family}", f"model.path={folder}", "model.init=random", "data.max_length=64"]
    sizes = {"vocab_size": 1501, "hidden_size": 48, "intermediate_size": 67, "num_layers": 2, "num_attention_heads": 4}
    if family != "chatglm":
        sizes["num_key_value_heads"] = 2
    if "head_size" in FAMILIES[family].sizes:
        sizes["head_size"] = 12
    words += [f"model.sizes.{name}={value}" for name, value in sizes.items()]
    return run_config(["tracker=none", *words, *more], ranks=2)


@pytest.mark.parametrize(
    ("option", "parameters", "adapted"),
    [
        ("chatglm", 6_173_286_400, 3_670_016),
        ("chatglm2", 6_243_584_000, 1_949_696),
        ("chatglm3", 6_243_584_000, 1_949_696),
        ("qwen2", 7_615_616_512, 5_046_272),
        ("qwen2_0_5b", 494_032_768, 1_081_344),
        ("qwen2_1_5b", 1_543_714_304, 2_179_072),
        ("qwen2_72b", 72_706_203_648, 32_768_000),
    ],
)
def test_true_sizes_and_rank_8_adapters_have_the_published_number_of_parameters(
    option: str, parameters: int, adapted: int
) -> None:
    network, family = true_network(option)
    assert build.count(list(network.named_parameters())) == parameters
    lora = configure("method=lora", "method.rank=8").method
    assert build.count(build.trainable(lora.apply(network, family))) == adapted


def test_sizes_of_shipped_models_are_those_of_their_files() -> None:
    for option in sorted(path.stem for path in (conf_folder() / "model").glob("tiny*.yaml")):
        section = configure(f"model={option}").model
        content = json.loads((Path(location(section)) / "config.json").read_text())
        for name, key in FAMILIES[section.family].sizes.items():
            assert getattr(section.sizes, name) == content[key], f"{option}: {name}"


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_matrices_are_random_norms_one_and_biases_zero(family: str, tmp_path: Path) -> None:
    section = small(tokenizer_folder(tmp_path, family), family).model
    for name, parameter in load_network(section, torch.float32).named_parameters():
        parameter = parameter.detach()
        if parameter.ndim == 1:
            assert bool((parameter == (0.0 if name.endswith("bias") else 1.0)).all()), name
            continue
        count = parameter.numel()
        assert float(parameter.mean()) == pytest.approx(0, abs=5 * STD / count**0.5), name
        assert float(parameter.std()) == pytest.approx(STD, rel=5 / count**0.5), name
        assert float(parameter.abs().max()) < 5 * STD, name
        assert parameter.unique().numel() > 500, name


def test_layers_differ_and_the_seed_decides(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, "chatglm3")
    one, again, other = (
        dict(load_network(small(folder, "chatglm3", *words).model, torch.float32).named_parameters())
        for words in ([], [], ["model.init_seed=7"])
    )
    prints = {name: fingerprint.of_tensor(parameter) for name, parameter in one.items() if parameter.ndim > 1}
    assert len(set(prints.values())) == len(prints)
    for name in prints:
        assert torch.equal(one[name], again[name])
        assert not torch.equal(one[name], other[name])
    assert small(folder, "chatglm3", "train.seed=7").model.init_seed == 7


def partitioned(folders: list[str], families: list[str]) -> list[tuple[dict[str, int], int, int]]:
    """On a rank: fingerprints of the partitioned networks, partitioned and all parameters."""
    found = []
    for folder, family in zip(folders, families, strict=True):
        config = small(Path(folder), family, "zero=stage3", "precision=bf16")
        with build.partitioned_loading(lower(config, distributed.world_size())):
            network = load_network(config.model, torch.bfloat16)
        parts = [hasattr(parameter, "ds_tensor") for parameter in network.parameters()]
        found.append((fingerprint.of_parameters(network.named_parameters()), sum(parts), len(parts)))
    return found


def test_partitions_of_two_ranks_hold_the_bits_of_the_whole(tmp_path: Path) -> None:
    """1501 rows of 48 and biases of odd lengths do not divide evenly: padding is met."""
    folders = [tokenizer_folder(tmp_path / family, family) for family in FAMILY_NAMES]
    by_rank = run_on_ranks(partitioned, [str(f) for f in folders], FAMILY_NAMES, folder=tmp_path)
    for place, (folder, family) in enumerate(zip(folders, FAMILY_NAMES, strict=True)):
        whole = load_network(small(folder, family).model, torch.bfloat16)
        expected = fingerprint.of_parameters(whole.named_parameters())
        for rank in by_rank:
            prints, parts, count = rank[place]
            assert prints == expected, family
            assert parts == count, family


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_gives_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    section = small(tokenizer_folder(tmp_path, "chatglm3"), "chatglm3").model
    on_gpu = load_network(section, torch.bfloat16)
    assert on_gpu.device.type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = load_network(section, torch.bfloat16)
    for (name, one), (_, other) in zip(on_gpu.named_parameters(), on_cpu.named_parameters(), strict=True):
        assert torch.equal(one.cpu(), other), name


def test_special_ids_are_those_of_the_tokenizer_and_a_short_vocabulary_is_refused(tmp_path: Path) -> None:
    section = small(tokenizer_folder(tmp_path, "chatglm"), "chatglm").model
    tokenizer = load_tokenizer(section)
    config = random_network(section, tokenizer, torch.float32).config
    assert (config.bos_token_id, config.gmask_token_id) == (tokenizer.bos_token_id, tokenizer.gmask_token_id)
    assert tokenizer.decode([config.vocab_size - 1]) == "", "ids of the padded vocabulary have no text"
    section.sizes.vocab_size = 100
    with pytest.raises(Exception, match=f"100 is smaller than the tokenizer's {len(tokenizer)} ids"):
        load_tokenizer(section)


def test_no_hub_is_asked_for_the_tokenizer() -> None:
    section = configure("model=chatglm3", "model.init=random").model
    assert section.path == "THUDM/chatglm3-6b"
    assert Path(tokenizer_location(section)).is_dir()
    assert load_tokenizer(section).release == "chatglm3"


def _train(words: list[str], folder: str) -> None:
    engine_loop(configure(*words), folder)


def test_a_fresh_process_makes_the_random_base_again(tmp_path: Path) -> None:
    words = ["model=tiny", "model.init=random", "model.sizes.num_layers=2", "method=lora", "zero=stage3"]
    run_on_ranks(_train, words, str(tmp_path / "run"), folder=tmp_path)
    verdict = proof.judge(tmp_path / "run")
    assert verdict["faults"] == []
    assert verdict["logits_effect_of_training"] > verdict["logits_allowed"]
    card_file = tmp_path / "run" / "artifact" / "glmexp.json"
    card = json.loads(card_file.read_text())
    card["model"]["init_seed"] += 1
    card_file.write_text(json.dumps(card))
    assert any("the base is another one" in fault for fault in proof.judge(tmp_path / "run")["faults"])
