"""An export is the model that was trained: every method and layout, sharded, streamed, judged the other way round."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glmexp.config import load as files
from glmexp.config.compose import run_config
from glmexp.config.errors import ArtifactError, ConfigError
from glmexp.config.families import FAMILIES
from glmexp.config.schema import RunConfig
from glmexp.engine import gather
from glmexp.engine.build import DTYPES, trainable
from glmexp.entry import artifact, evaluate, export, verify
from glmexp.method import weight_files
from glmexp.model.build import empty_network, load_network, load_tokenizer, location
from tests.engine.cells import configure


def trained(folder: Path, *words: str) -> Path:
    """An artifact of a model whose trained parameters were moved by chance: no engine, one process, milliseconds."""
    config = configure(*words)
    model = moved(config)
    folder.mkdir(parents=True)
    files.write(config, folder / "config.yaml")
    engine: Any = SimpleNamespace(module=model)
    artifact.write(engine, config, config.method, load_tokenizer(config.model), folder, steps=3)
    return folder


def moved(config: RunConfig) -> Any:
    """The live model of ``trained``, the same each time."""
    torch.manual_seed(1)
    network = load_network(config.model, DTYPES[config.precision.dtype])
    model = config.method.apply(network, FAMILIES[config.model.family]).eval()
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def exported(run: Path, out: Path, *words: str) -> tuple[Path, dict[str, Any]]:
    """The export of a run, and what the proof (in this process) says of it."""
    config = run_config(["entry=export", f"artifact.path={run}", f"run.dir={out}", "export.verify=false", *words])
    out.mkdir()
    files.write(config, out / "config.yaml")
    assert export.run(config, out) == 0
    return out / "artifact", verify.judge(out)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None], use_cache=False).logits


@pytest.mark.parametrize(
    "words",
    [
        ("model=tiny", "method=lora"),
        ("model=tiny_qwen2", "method=lora", "method.modules_to_save=[lm_head]"),
        ("model=tiny_chatglm", "method=ptuning"),
        ("model=tiny_chatglm2", "method=freeze"),
        pytest.param(("model=tiny_chatglm", "method=full"), marks=pytest.mark.matrix),
        ("model=tiny", "method=lora", "model.add_tokens=['<a1>','<a2>']"),
    ],
)
def test_merged_logits_are_those_of_the_adapter(words: tuple[str, ...], tmp_path: Path) -> None:
    """fp32: 1e-5 of the largest logit, another order of summation."""
    run = trained(tmp_path / "run", *words)
    folder, verdict = exported(run, tmp_path / "out")
    assert verdict["faults"] == []
    live, _ = artifact.load(run / "artifact", torch.float32)
    whole, card = artifact.load(folder, torch.float32)
    expected = logits(live)
    assert float((logits(whole) - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert card.base == artifact.read_card(run / "artifact").base, "the card names the base"
    assert {"config.json", "generation_config.json", "README.md", "tokenizer_config.json"} <= {
        file.name for file in folder.iterdir()
    }
    base = load_network(configure(*words).model, torch.float32).eval()
    assert float((logits(base) - expected).abs().max()) > 1e-3, "the test would not see a merge without effect"
    settings = json.loads((folder / "config.json").read_text())
    name = "rms_norm_eps" if "rms_norm_eps" in settings else "layernorm_epsilon"
    (folder / "config.json").write_text(json.dumps({**settings, "use_cache": False, name: 0.5}))
    with pytest.raises(ArtifactError, match=f"config.json: {name} is 0.5, and was 1e-0") as refused:
        artifact.load(folder, torch.float32)
    assert len(refused.value.problems) == 1, "use_cache changes no answer"


def test_tied_embeddings_survive_and_are_untied_where_the_output_layer_was_trained(tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base")
    words = ("model=tiny_qwen2", f"model.path={base}", "method=lora", "model.add_tokens=['<a1>','<a2>']")
    for name, more, tied in (("tied", (), True), ("untied", ("method.modules_to_save=[lm_head]",), False)):
        run = trained(tmp_path / name, *words, *more)
        folder, verdict = exported(run, tmp_path / f"{name}-out")
        assert verdict["faults"] == []
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 1282
        assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied
        assert len(load_tokenizer(configure("model=tiny_qwen2", f"model.path={folder}").model)) == 1282


def tied_base(folder: Path) -> Path:
    """A Qwen2 whose output layer is its embedding, as in Qwen2-0.5B."""
    config = configure("model=tiny_qwen2", "model.init=random", "model.sizes.tied_embedding=true")
    load_network(config.model, torch.float32).save_pretrained(folder)
    load_tokenizer(config.model).save_pretrained(folder)
    return folder


def test_an_adapter_of_peft_alone_is_merged_into_the_named_base(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "model=tiny_qwen2", "method=lora")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(run / "artifact" / name, adapter)
    _, verdict = exported(adapter, tmp_path / "out", "model=tiny_qwen2", "export.dtype=fp32")
    assert verdict["faults"] == []
    whole, _ = artifact.load(tmp_path / "out" / "artifact", torch.float32)
    live, _ = artifact.load(run / "artifact", torch.float32)
    assert float((logits(whole) - logits(live)).abs().max()) <= 1e-5 * float(logits(live).abs().max())
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "use_dora": True}))
    with pytest.raises(ArtifactError, match="use_dora=True cannot be merged"):
        exported(adapter, tmp_path / "dora", "model=tiny_qwen2")


def test_16_bit_shards_in_the_layout_of_transformers(tmp_path: Path) -> None:
    """bf16 rounds the merged weights once more; how far that carries is said."""
    run = trained(tmp_path / "run", "model=tiny", "method=lora")
    words = ("export.dtype=bf16", "export.layout=transformers", "export.max_shard_bytes=400000")
    folder, verdict = exported(run, tmp_path / "out", *words)
    assert verdict["faults"] == []
    assert 0 < verdict["logits_difference"] <= verdict["logits_allowed"]
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GlmForCausalLM"]
    places = json.loads((folder / weight_files.INDEX).read_text())["weight_map"]
    for file in set(places.values()):
        held = load_file(folder / file)
        assert len(held) == 1 or sum(one.nbytes for one in held.values()) <= 400_000
        assert {one.dtype for one in held.values()} == {torch.bfloat16}
    assert type(artifact.load(folder, torch.float32)[0]).__name__ == "GlmForCausalLM"


def test_partitioned_and_16_bit_sources_can_be_exported_again(tmp_path: Path) -> None:
    first, _ = exported(trained(tmp_path / "run", "model=tiny", "method=full"), tmp_path / "one", "export.dtype=fp16")
    second, verdict = exported(first, tmp_path / "two", "export.dtype=fp32")
    assert verdict["faults"] == []
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert all(torch.equal(after[name], before[name].float()) for name in before)


def test_a_moved_base_is_taken_and_another_one_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(location(configure("model=tiny").model), base)
    run = trained(tmp_path / "run", "model=tiny", f"model.path={base}", "method=lora")
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="is no folder"):
        exported(run, tmp_path / "gone")
    _, verdict = exported(run, tmp_path / "out", f"model.path={moved}")
    assert verdict["faults"] == []
    weights = load_file(moved / "model.safetensors")
    next(iter(weights.values()))[0, 0] += 0.5
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="the base is another one"):
        exported(run, tmp_path / "other", f"model.path={moved}")
    assert not (tmp_path / "other" / "artifact").exists(), "nothing half is left"


def test_another_template_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "model=tiny_qwen2", "method=lora")
    base = tmp_path / "base"
    shutil.copytree(location(configure("model=tiny_qwen2").model), base)
    template = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").write_text(template.replace("a helpful assistant", "a careful assistant"))
    with pytest.raises(ArtifactError, match="another chat template or vocabulary"):
        exported(run, tmp_path / "out", f"model.path={base}")
    words = ["entry=evaluate", f"artifact.path={run}", f"model.path={base}", f"run.dir={tmp_path}/e", "tracker=none"]
    with pytest.raises(ArtifactError, match="another chat template or vocabulary"):
        evaluate.run(run_config(words), tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=tiny_chatglm", "export.layout=transformers"), "transformers has no network for chatglm"),
        (("model=tiny_qwen2", "export.layout=transformers"), "released layout is that of transformers"),
        (("model=tiny_qwen2", "method=ptuning"), "cannot be merged into them"),
        (("model=tiny", "method=ptuning", "export.layout=transformers"), "no place for a prefix"),
        (("export.form=trained", "export.dtype=bf16"), "without effect with export.form=trained"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_read(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        run_config(["entry=export", f"artifact.path={tmp_path}", *words])


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "model=tiny", "method=lora")
    file = run / "artifact" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"adapter_model.safetensors: cannot be read"):
        exported(run, tmp_path / "out")


def test_saving_an_adapter_gathers_only_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under stage 3 each gathered parameter is whole on the GPU: the base is not to be."""
    gathered: list[int] = []
    plain = gather._gathered
    monkeypatch.setattr(gather, "_gathered", lambda one: gathered.append(one.numel()) or plain(one))
    run = trained(tmp_path / "run", "model=tiny", "method=lora")
    adapter = load_file(run / "artifact" / "adapter_model.safetensors")
    assert sorted(gathered) == sorted(one.numel() for one in adapter.values())


def test_a_large_model_passes_through_a_tensor_at_a_time(tmp_path: Path) -> None:
    """200 MB in shards of 20 MB: resident memory grows by less than a shard and a few of the largest tensor (8 MB)."""
    words = ["model=tiny_qwen2", "model.init=random", "model.sizes.hidden_size=512", "model.sizes.num_layers=12"]
    words += ["model.sizes.intermediate_size=2048", "model.sizes.vocab_size=4096"]
    config = configure(*words)
    source = tmp_path / "source"
    source.mkdir()
    network = empty_network(config.model, torch.float32)
    plan = [(name, tuple(p.shape)) for name, p in network.named_parameters()]
    total = sum(p.nbytes for p in network.parameters())
    weight_files.stream(source, plan, ((n, torch.full(shape, 0.01)) for n, shape in plan), torch.float32)
    weight_files.write_config(source, network.config, [name for name, _ in plan], torch.float32)
    load_tokenizer(config.model).save_pretrained(source)
    wanted = run_config(
        [
            *("model=tiny_qwen2", "entry=export", f"artifact.path={source}"),
            *("export.verify=false", "export.dtype=fp32", "export.max_shard_bytes=20000000"),
        ]
    )
    del network
    with Resident() as resident:
        export.run(wanted, tmp_path)
    assert total > 190e6
    assert len(weight_files.files(tmp_path / "artifact")) > 9
    assert resident.growth < 20e6 + 3 * 8.4e6, f"grew by {resident.growth / 1e6:.0f} MB of {total / 1e6:.0f}"


class Resident:
    """Growth of this process's resident memory while the context is open, looked at every millisecond."""

    growth = 0

    def __enter__(self) -> Resident:
        self._start, self._open = self._now(), True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()

    def _watch(self) -> None:
        while self._open:
            self.growth = max(self.growth, self._now() - self._start)
            time.sleep(0.001)

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
