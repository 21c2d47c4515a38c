"""What a run leaves behind: written from a live engine, loaded by a process that knows nothing but the folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glmexp.config.artifact_rules import no_pickle
from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.families import FAMILIES
from glmexp.config.folders import CONFIG_JSON
from glmexp.config.inherit import CARD, WHOLE, own_weights
from glmexp.config.registry import option
from glmexp.config.schema import Family, ModelSection, RunConfig, Sizes
from glmexp.engine import distributed, fingerprint, fp8, gather, sharded
from glmexp.engine.build import DTYPES, frozen, trainable
from glmexp.method import weight_files
from glmexp.method.base import Method
from glmexp.model.build import load_network
from glmexp.model.renderer import renderer

FOLDER = "artifact"
_NOT_COMPUTED = (
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
)
"""Of config.json: names, and what is asked for anew when a model is loaded."""
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 12 + 30?\n一共多少？"},
    {"role": "assistant", "content": "42.\tThat is 四十二。"},
    {"role": "user", "content": 'Thanks :) <b>x</b>  "y"'},
    {"role": "assistant", "content": "不客气！"},
]


@dataclass(frozen=True)
class Card:
    """``glmexp.json``: how to put the artifact on its base, and what must come out."""

    gather: str
    stage: int
    dtype: str
    model: dict[str, Any]
    method: dict[str, Any]
    tensors: dict[str, int]
    """Fingerprint of each tensor that was trained (full16: of each that was written)."""
    base: str
    """Digest over the fingerprints of the frozen parameters: another base has another."""
    template: str | None = None
    """Digest over a conversation in the chat template: another template or vocabulary has another."""
    base_format: str | None = None
    """``precision.base``: what the frozen layers were rounded to. ``base`` is their digest before that."""
    steps: int | None = None
    """Optimizer steps that it was trained for; None where that is not known."""
    network: dict[str, Any] | None = None
    """Of a whole model: what its config.json says of computing, which no tensor vouches for."""

    def write(self, folder: Path) -> None:
        """Write the card into the artifact folder."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / CARD).write_text(text + "\n", encoding="utf-8")

    def model_section(self) -> ModelSection:
        """The base model."""
        return ModelSection(
            **{"add_tokens": [], "pad_token": None, **self.model, "sizes": Sizes(**self.model["sizes"])}
        )

    @property
    def whole(self) -> bool:
        """The folder holds a whole model and needs no base."""
        return self.gather in WHOLE

    def method_settings(self) -> Method:
        """The method with its settings."""
        return option("method", self.method["name"])(**self.method)


def find(path: Path) -> Path:
    """The artifact folder that ``artifact.path`` means: itself, or the one in a run folder. Raises ArtifactError."""
    for folder in (path, path / FOLDER):
        if (folder / CARD).exists():
            return folder
    raise ArtifactError(no_pickle(path, f"holds no {CARD}"))


def is_one(path: Path) -> bool:
    """Whether ``find`` finds an artifact there."""
    return any((folder / CARD).exists() for folder in (path, path / FOLDER))


def read_card(folder: Path) -> Card:
    """The card of an artifact folder. Raises ArtifactError where it is none."""
    try:
        card = Card(**json.loads((folder / CARD).read_text(encoding="utf-8")))
        card.model_section()
        if not isinstance(card.tensors, dict) or not isinstance(card.method["name"], str):
            raise ValueError("names no method, or no tensors")
        return card
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(Problem(str(folder / CARD), f"is no card: {error}", "restore the file")) from error


def section(card: Card, folder: Path, base: str | None = None) -> ModelSection:
    """The model section to load an artifact with. ``base``: where the base lies now, if not where it was."""
    found = card.model_section()
    if card.whole:
        _check_network(card, folder)
        return replace(found, **own_weights(folder))
    return found if base is None else replace(found, path=base)


def network_settings(folder: Path) -> dict[str, Any]:
    """What config.json in ``folder`` says of computing. Raises ArtifactError where it cannot be read."""
    file = folder / CONFIG_JSON
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(Problem(str(file), f"cannot be read: {error}", "restore the file")) from error
    return {key: value for key, value in content.items() if key not in _NOT_COMPUTED}


def _check_network(card: Card, folder: Path) -> None:
    """Raise ArtifactError where config.json is not as it was written: other settings give other answers."""
    if card.network is None:  # of a version that did not keep them
        return
    found = network_settings(folder)
    values = {key: (found.get(key), card.network.get(key)) for key in {**card.network, **found}}
    text = "{} is {!r}, and was {!r} when the weights were written"
    other = [text.format(key, now, before) for key, (now, before) in values.items() if now != before]
    if other:
        raise ArtifactError(*(Problem(str(folder / CONFIG_JSON), one, "restore the file") for one in other))


def template_digest(family: Family, tokenizer: Any) -> str:
    """Digest over what the template makes of a conversation: text of several kinds, two turns, labels."""
    ids, learned = renderer(family, tokenizer).train(_CONVERSATION)
    return hashlib.sha256(json.dumps([ids, learned]).encode()).hexdigest()[:32]


def check_template(card: Card, family: Family, tokenizer: Any, where: str) -> None:
    """Raise ArtifactError where the artifact was trained with another template or vocabulary."""
    found = template_digest(family, tokenizer)
    if card.template is not None and found != card.template:
        raise ArtifactError(
            Problem(
                "artifact.path",
                f"was trained with another chat template or vocabulary than {where} brings",
                "use the tokenizer files that lie in the artifact's folder, or the base as it was",
            )
        )


def base_digest(model: nn.Module) -> str:
    """Digest of what is frozen, as it was loaded; the same whole or partitioned. Collective."""
    return digest(fp8.prints(model, frozen(model)))


def digest(prints: dict[str, int]) -> str:
    """One short word for many fingerprints."""
    return hashlib.sha256(json.dumps(sorted(prints.items())).encode()).hexdigest()[:32]


def write(engine: Any, config: RunConfig, method: Method, tokenizer: Any, run_folder: Path, steps: int) -> Card:
    """Write ``artifact/``. Collective; files come from rank 0 (sharded: from each rank). Gathers only what is saved."""
    folder = run_folder / FOLDER
    model = engine.module
    if distributed.rank() == 0:
        folder.mkdir(exist_ok=True)
    distributed.barrier()
    prints = fingerprint.of_parameters(trainable(model))
    if config.gather.name == "sharded":
        sharded.write(engine, folder)
    elif config.gather.name == "full16":
        prints = _write_full16(folder, config, method, model)
    else:
        tensors = gather.tensors(trainable(model))
        if distributed.rank() == 0:
            held = {name: fingerprint.of_tensor(t) for name, t in method.write(folder, model, tensors).items()}
            torn = [name for name, value in held.items() if prints.get(name, value) != value]
            assert not torn, f"gathering changed {torn[:3]}: the partitions hold something else"
            prints = held
    card = Card(
        gather=config.gather.name,
        stage=config.zero.stage,
        dtype=_half(config) if config.gather.name == "full16" else config.precision.dtype,
        model=asdict(config.model),
        method=asdict(method),  # type: ignore[call-overload]  # every method is a dataclass
        tensors=prints,
        base=base_digest(model),
        template=template_digest(config.model.family, tokenizer),
        base_format=config.precision.base,
        steps=steps,
    )
    if distributed.rank() == 0:
        tokenizer.save_pretrained(folder)
        replace(card, network=network_settings(folder) if card.whole else None).write(folder)
    distributed.barrier()
    return card


def _half(config: RunConfig) -> str:
    """16-bit format of ``full16``: the run's own, else bf16, whose range is that of fp32."""
    return config.precision.dtype if config.precision.dtype != "fp32" else "bf16"


def _write_full16(folder: Path, config: RunConfig, method: Method, model: nn.Module) -> dict[str, int]:
    """The whole model, adapters merged: rank 0 writes each tensor as it is gathered, and holds no other."""
    dtype = DTYPES[_half(config)]
    units = list(method.merged(model))
    prints: dict[str, int] = {}

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parts, merge in units:
            values = [value for _, value in gather.whole(parts)]
            if distributed.rank() == 0:
                tensor = merge(*values).to(dtype)
                prints[name] = fingerprint.of_tensor(tensor)
                yield name, tensor

    if distributed.rank() == 0:
        plan = [(name, tuple(getattr(parts[0][1], "ds_shape", parts[0][1].shape))) for name, parts, _ in units]
        weight_files.stream(folder, plan, gathered(), dtype)
        weight_files.write_config(folder, model.config, prints, dtype)
    else:
        for _ in gathered():
            pass
    return prints


def load(folder: Path, dtype: torch.dtype, base: str | None = None, rounded: bool = True) -> tuple[nn.Module, Card]:
    """The trained model from an artifact folder, in ``dtype``, on the CPU, in eval mode.

    ``base``: where its base lies now, if not where it was. ``rounded``: the base in the format that it was trained on;
    False: all of it in ``dtype``, as an export merges it. Raises ArtifactError where a file, the base or a tensor is
    not what the card says.
    """
    card = read_card(folder)
    where = section(card, folder, base)
    if card.whole:
        return load_layout(folder, where, dtype).eval(), card
    network = load_network(where, dtype)
    method, family = card.method_settings(), FAMILIES[where.family]
    if card.gather == "sharded":
        model = method.apply(network, family)
        tensors = sharded.lazy(folder, [name for name, _ in trainable(model)])
        with torch.no_grad():
            for name, parameter in trainable(model):
                parameter.copy_(tensors[name][1]())
    else:
        model = method.load(folder, network, family)
    if card.base_format == "fp8" and rounded:
        fp8.check_device()
        fp8.convert(model, network, card.tensors, keep_transposed=False)
    return model.eval(), card


def load_layout(folder: Path, where: ModelSection, dtype: torch.dtype) -> nn.Module:
    """A whole model from its folder, in whichever of the two layouts it lies."""
    content = json.loads((folder / CONFIG_JSON).read_text(encoding="utf-8"))
    if content.get("model_type") != "glm":
        return load_network(where, dtype)
    from transformers import GlmForCausalLM

    from glmexp.model.attention import DEFAULT_KIND

    return GlmForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=where.attention or DEFAULT_KIND)


def check(model: nn.Module, card: Card) -> list[str]:
    """What in a loaded model is not as the card says, in words. Call with the card's dtype."""
    return faults(fp8.prints(model, model.named_parameters()), card)


def faults(found: dict[str, int], card: Card) -> list[str]:
    """The same for the fingerprints of a model's parameters."""
    wrong = [name for name, value in card.tensors.items() if found.get(name) != value]
    said = []
    if wrong:
        said.append(
            f"{len(wrong)} of {len(card.tensors)} trained tensors are not as they were trained: {', '.join(wrong[:3])}"
        )
    rest = {name: value for name, value in found.items() if name not in card.tensors}
    if not card.whole and digest(rest) != card.base:
        said.append(f"the base is another one: {card.model['path']} does not hold the weights that were trained on")
    return said
