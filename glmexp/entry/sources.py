"""What an export is made from: an artifact, a checkpoint of a run, or a checkpoint that another program wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glmexp.config.artifact_rules import RECOGNISED, no_pickle
from glmexp.config.errors import ArtifactError, ConfigError, Problem
from glmexp.config.families import FAMILIES
from glmexp.config.inherit import run_of
from glmexp.config.registry import option
from glmexp.config.schema import ModelSection, RunConfig
from glmexp.engine import checkpoint, checkpoint_files, ds_files, sharded
from glmexp.engine.build import DTYPES
from glmexp.engine.ds_files import Lazy
from glmexp.entry import artifact
from glmexp.method import peft_files, weight_files
from glmexp.method.base import Method, check_keys, check_shapes, own_weights
from glmexp.model import random_init, vocabulary
from glmexp.model.build import empty_network, location, new_pieces

if TYPE_CHECKING:
    from glmexp.method.base import Whole

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PEFT_PREFIX = "base_model.model."
_IGNORED = "rotary_pos_emb.inv_freq"


@dataclass(frozen=True)
class Source:
    """Where the parameters of the live model come from."""

    path: Path
    words: str
    section: ModelSection
    """Network and tokenizer; the base's weights, where the source does not hold them all."""
    method: Method | None
    """None: the source's tensors are the network's own."""
    trained: Lazy
    """By the names of the live model's parameters."""
    dtype: str | None
    """Number format in which the base was trained on; None where it is not known."""
    card: artifact.Card | None
    run: Path | None
    """Run folder, where there is one: its records go into the model card."""
    partial: bool
    """What ``trained`` lacks comes from the base."""
    tokenizer: ModelSection | None = None
    """Where the tokenizer comes from. None: from ``section``."""
    steps: int | None = None
    """Optimizer steps that it was trained for; None where that is not known."""

    @property
    def base(self) -> str:
        """The base, in words."""
        section = self.section
        return f"random weights of seed {section.init_seed}" if section.init == "random" else str(section.path)

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The live model on the meta device: names and shapes, with the method's parameters."""
        network: Any = empty_network(self.section, dtype)
        return network if self.method is None else self.method.apply(network, FAMILIES[self.section.family])

    def whole(self, model: nn.Module) -> Whole:
        """See ``method.base.Method.merged``."""
        return own_weights(model) if self.method is None else self.method.merged(model)


def of(config: RunConfig) -> Source:
    """What ``artifact.path`` means. Raises ArtifactError or ConfigError."""
    assert config.artifact.path is not None, "the rules ask for artifact.path"
    path = Path(config.artifact.path)
    if artifact.is_one(path):
        return _of_artifact(artifact.find(path), config)
    run = run_of(path)
    states = ds_files.find(path)
    if run is not None and states is None:
        return _of_checkpoint(path, run, config)
    if states is not None:
        return _of_deepspeed(path, states, config)
    if (path / peft_files.CONFIG).is_file():
        return _of_adapter(path, config)
    weights = _weights(path)
    if weights is not None:
        words = f"the weights in {path}"
        source = Source(path, words, _section(path, config), None, weights, None, None, None, partial=False)
        return replace(source, tokenizer=_speaker(path, config))
    raise ArtifactError(Problem("artifact.path", f"{path} holds nothing that can be loaded", RECOGNISED))


def _of_artifact(folder: Path, config: RunConfig) -> Source:
    card = artifact.read_card(folder)
    run = folder.parent if (folder.parent / "config.yaml").is_file() else None
    section = artifact.section(card, folder, config.model.path)
    if card.whole:
        words = f"the whole model in {folder}"
        trained = weight_files.lazy(folder)
        return Source(folder, words, section, None, trained, None, card, run, partial=False, steps=card.steps)
    method = card.method_settings()
    words = f"the artifact {folder}"
    source = Source(folder, words, section, method, {}, card.dtype, card, run, partial=True, steps=card.steps)
    if card.gather == "sharded":
        names = [name for name, p in source.model(torch.float32).named_parameters() if p.requires_grad]
        return replace(source, trained=sharded.lazy(folder, names), words=f"the partitions in {folder}")
    return replace(source, trained=_saved(folder, source))


def _saved(folder: Path, source: Source) -> Lazy:
    """The files of ``gather=trainable`` by the names of the live parameters."""
    if (folder / peft_files.CONFIG).is_file():
        model = source.model(torch.float32)
        names = peft_files.names_in_file(model)
        found = weight_files.lazy_file(folder / peft_files.WEIGHTS)
        check_keys(folder / peft_files.WEIGHTS, set(found), set(names))
        return {names[name]: slot for name, slot in found.items()}
    return _bin(folder / BIN) if (folder / BIN).is_file() else weight_files.lazy(folder)


def _of_checkpoint(path: Path, run: Path, config: RunConfig) -> Source:
    found = checkpoint.find(run, path.name if path.parent.name == checkpoint_files.FOLDER else None)
    if found is None:
        raise ArtifactError(Problem("artifact.path", f"{path} holds no artifact and no checkpoint", RECOGNISED))
    trained, ranks = checkpoint_files.masters(found.folder), found.state["ranks"]
    notes = "".join(f"; {note}" for note in found.notes)
    words = f"the checkpoint {found.folder}: float32 masters of {ranks} rank{'s' if ranks > 1 else ''}{notes}"
    model, method, dtype = config.model, config.method, config.precision.dtype
    return Source(found.folder, words, model, method, trained, dtype, None, run, partial=True, steps=found.step)


def _of_deepspeed(path: Path, folder: Path, config: RunConfig) -> Source:
    trained, what = ds_files.read(folder)
    words = f"the DeepSpeed checkpoint {folder}: {what}"
    if not any(name.startswith(PEFT_PREFIX) for name in trained):
        source = Source(folder, words, _section(path, config), None, trained, None, None, None, partial=True)
        source = replace(source, tokenizer=_speaker(path, config))
        return source if all(there for _, there in held(source)) else replace(source, section=config.model)
    if (path / peft_files.CONFIG).is_file():
        method: Any = _lora_of(path / peft_files.CONFIG, config)
        said = f"alpha {method.alpha} and rank {method.rank} as {path / peft_files.CONFIG} says"
    elif config.method.name == "lora":
        method = config.method
        said = f"method.alpha={method.alpha}, method.rank={method.rank}: the checkpoint does not hold alpha, check it"
    else:
        raise ConfigError(
            Problem(
                "method",
                f"{config.method.name}, and {folder} holds an adapter without its {peft_files.CONFIG}",
                "method=lora with the method.rank and method.alpha that it was trained with",
            )
        )
    return Source(folder, f"{words}; {said}", config.model, method, trained, None, None, None, partial=True)


def _of_adapter(path: Path, config: RunConfig) -> Source:
    """A PEFT folder on the base that ``model.path`` names."""
    if not (path / peft_files.WEIGHTS).is_file():
        raise ArtifactError(no_pickle(path, f"holds no {peft_files.WEIGHTS}"))
    method: Any = _lora_of(path / peft_files.CONFIG, config)
    words = f"the adapter {path} on {config.model.path}"
    source = Source(path, words, config.model, method, {}, None, None, None, partial=True)
    return replace(source, trained=_saved(path, source))


def _lora_of(file: Path, config: RunConfig) -> Method:
    """The LoRA settings of an ``adapter_config.json``. Raises ArtifactError for what merging has no formula for."""
    saved = json.loads(file.read_text(encoding="utf-8"))
    wanted = {"peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None), "use_rslora": (False, None)}
    odd = [f"{key}={saved.get(key)!r}" for key, allowed in wanted.items() if saved.get(key) not in allowed]
    odd += [
        key for key in ("rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication") if saved.get(key)
    ]
    targets = saved.get("target_modules")
    if not isinstance(targets, list):
        odd.append(f"target_modules={targets!r}")
    if odd:
        raise ArtifactError(Problem(str(file), f"{', '.join(odd)} cannot be merged here", "plain LoRA on named layers"))
    return option("method", "lora")(
        name="lora",
        rank=saved["r"],
        alpha=saved["lora_alpha"],
        dropout=saved.get("lora_dropout") or 0.0,
        target_modules=targets,
        modules_to_save=list(saved.get("modules_to_save") or []),
        lr=config.optim.lr,
    )


def _section(path: Path, config: RunConfig) -> ModelSection:
    """The model section; a checkpoint that brings its own config.json is of that size. The weights are its own."""
    if not (path / "config.json").is_file():
        return config.model
    return replace(config.model, path=str(path), init="pretrained", add_tokens=[])


def _speaker(path: Path, config: RunConfig) -> ModelSection | None:
    """The section for the tokenizer: that of ``model.path`` where the checkpoint brings none."""
    return None if (path / "tokenizer_config.json").is_file() else config.model


def _weights(folder: Path) -> Lazy | None:
    """Safetensors or, without them, the .bin files of a folder; None where it has neither."""
    if any((folder / name).is_file() for name in (weight_files.SINGLE, weight_files.INDEX)):
        return weight_files.lazy(folder)
    if (folder / BIN_INDEX).is_file():
        places = json.loads((folder / BIN_INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return {name: slot for file in sorted(set(places)) for name, slot in _bin(folder / Path(file).name).items()}
    return _bin(folder / BIN) if (folder / BIN).is_file() else None


def _bin(file: Path) -> Lazy:
    state = ds_files.load_pickle(file)
    return {name: ds_files.held(tensor) for name, tensor in state.items() if isinstance(tensor, Tensor)}


class Reader:
    """The live model's parameters one at a time: what was trained from the source, the rest from the base."""

    def __init__(self, source: Source, model: nn.Module) -> None:
        self.source = source
        self._parameters = dict(model.named_parameters())
        self._same = _aliases(model)
        self.base_names: list[str] = []
        """Parameters that came from the base, in the order in which they were asked for."""
        self._base: Lazy | None = None
        self._pieces = new_pieces(source.section)
        self._vocabulary = _vocabulary_names(source.section) if self._pieces else set()
        self._check()

    def _check(self) -> None:
        """Every tensor of the source has its place and shape; where it has to be whole, every place has its tensor."""
        names = {one for name in self._parameters for one in self._same[name]}
        trained = {name: slot for name, slot in self.source.trained.items() if not name.endswith(_IGNORED)}
        expected = {name for name in self._parameters if not set(trained).isdisjoint(self._same[name])}
        if not self.source.partial:
            expected = set(self._parameters)
        elif self.source.method is not None:
            expected |= {name for name, p in self._parameters.items() if p.requires_grad}
        found = {self._main(name) if name in names else name for name in trained}
        check_keys(self.source.path, found, expected)
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        check_shapes(
            self.source.path,
            {self._main(name): shape for name, (shape, _) in trained.items()},
            {name: shapes[name] for name in expected},
        )

    def _main(self, name: str) -> str:
        return next(main for main, others in self._same.items() if name in others)

    def read(self, name: str) -> Tensor:
        """One parameter: trained in the precision of the source, of the base in the run's number format."""
        found = next((self.source.trained[one] for one in self._same[name] if one in self.source.trained), None)
        if found is not None:
            return found[1]()
        self.base_names.append(name)
        return self._of_base(name)

    def is_trained(self, name: str) -> bool:
        """Whether the source holds it."""
        return not self._same[name].isdisjoint(self.source.trained)

    def _of_base(self, name: str) -> Tensor:
        section, dtype = self.source.section, self.source.dtype
        parameter = self._parameters[name]
        plain = {base_name(one) for one in self._same[name]}
        if section.init == "random":
            (first,) = {base_name(name)}
            made = DTYPES[dtype] if dtype is not None else parameter.dtype
            return random_init.tensor_of(first, tuple(parameter.shape), made, section.init_seed)
        if self._base is None:
            self._base = base_weights(section)
        found = next((self._base[one] for one in plain if one in self._base), None)
        if found is None:
            raise ArtifactError(
                Problem("model.path", f"{section.path} holds no {base_name(name)}", "name the base that was trained on")
            )
        _, read = found
        tensor = read() if dtype is None else read().to(DTYPES[dtype])
        if plain & self._vocabulary:
            tensor = vocabulary.extended(tensor, self._pieces)
        if tuple(tensor.shape) != tuple(parameter.shape):
            check_shapes(Path(str(section.path)), {name: tuple(tensor.shape)}, {name: tuple(parameter.shape)})
        return tensor


def _vocabulary_names(section: ModelSection) -> set[str]:
    """Parameters whose rows are tokens."""
    network: Any = empty_network(section, torch.float32)
    weights = [module.weight for module in vocabulary.embeddings(network)]
    return {n for n, p in network.named_parameters(remove_duplicate=False) if any(p is w for w in weights)}


def base_name(name: str) -> str:
    """The released name of a live parameter."""
    plain = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
    return plain.replace(".original_module.", ".").replace(".modules_to_save.default.", ".")


def _aliases(model: nn.Module) -> dict[str, set[str]]:
    """Each parameter with all names that it goes by: tied ones have several."""
    by_id: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), set()).add(name)
    return {name: by_id[id(parameter)] for name, parameter in model.named_parameters()}


def base_weights(section: ModelSection) -> Lazy:
    """The base's tensors, whole or sharded safetensors or .bin files, of a folder or of the hub's cache."""
    folder = base_folder(section)
    weights = _weights(folder)
    if weights is None:
        raise ArtifactError(Problem("model.path", f"{folder} holds no weights", "name the folder of a checkpoint"))
    return weights


def base_folder(section: ModelSection) -> Path:
    """Folder of the base, that of the hub's cache for a hub name."""
    place = location(section)
    if Path(place).is_dir():
        return Path(place)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(place, allow_patterns=["*.json", "*.safetensors", "*.bin"]))


def held(source: Source) -> list[tuple[str, bool]]:
    """Each parameter of the live model and whether the source holds it."""
    same = _aliases(source.model(torch.float32))
    return [(name, not others.isdisjoint(source.trained)) for name, others in same.items()]


def live(source: Source, load: Callable[[ModelSection, torch.dtype], Any], dtype: torch.dtype) -> nn.Module:
    """The model as it was trained, not merged, in ``dtype`` on the CPU: what the export is held against."""
    base = dtype if source.dtype is None else DTYPES[source.dtype]
    complete = all(there for _, there in held(source))
    network: Any = empty_network(source.section, base, "cpu") if complete else load(source.section, base)
    model = network if source.method is None else source.method.apply(network, FAMILIES[source.section.family])
    model = model.to(dtype)
    same = _aliases(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = next((source.trained[one] for one in same[name] if one in source.trained), None)
            if found is not None:
                parameter.copy_(found[1]())
    return model.eval()
