"""What the folder of a checkpoint says before anything is loaded: config.json, sizes, family, which files are there.

A hub name that is no folder here says nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.families import FAMILIES, GLM_SIZES, chatglm_release
from glmexp.config.inherit import CARD, run_of
from glmexp.config.schema import Family, ModelSection, RunConfig, Sizes

BUILTIN = "builtin:"
CONFIG_JSON = "config.json"
_SHIPPED = Path(__file__).resolve().parents[1] / "model" / "tiny"
GLM = "glm"
"""``model_type`` of transformers' GlmForCausalLM, which exports of ChatGLM2 and 3 may have."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json")
WORDS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "ice_text.model", "vocab.json")
"""Files of a tokenizer: one of them is in each folder that has one."""


def folder_of(model: ModelSection) -> Path | None:
    """The folder on this machine that ``model.path`` means; None: a hub name, or nothing."""
    path = model.path
    if path is None:
        return None
    folder = _SHIPPED / path.removeprefix(BUILTIN) if path.startswith(BUILTIN) else Path(path).expanduser()
    return folder if folder.is_dir() else None


def config_json(model: ModelSection) -> dict[str, Any] | None:
    """config.json of ``model.path``; None: random weights, a checkpoint on a hub, or none that can be read."""
    folder = None if model.init == "random" else folder_of(model)
    return None if folder is None else read(folder / CONFIG_JSON)


def read(file: Path) -> dict[str, Any] | None:
    """A JSON object; None: no such file, or none that can be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def sizes_in(content: dict[str, Any], family: Family) -> Sizes:
    """Sizes that a config.json names, in the release's own words or in those of transformers."""
    names = GLM_SIZES if content.get("model_type") == GLM else FAMILIES[family].sizes
    return Sizes(**{name: content.get(names.get(name, "")) for name in Sizes.__dataclass_fields__})


def sizes_of(model: ModelSection) -> Sizes | None:
    """Sizes of the network that will be built; None where only its checkpoint on a hub knows them."""
    if model.init == "random":
        return model.sizes
    content = config_json(model)
    return None if content is None else sizes_in(content, model.family)


def tokens_in(model: ModelSection) -> int:
    """Ids that the tokenizer in the folder of ``model.path`` has at the least: those of its vocabulary's file, without
    what its code adds. 0: there is none here. Reading it takes a tenth of a second, loading a tokenizer two."""
    folder = folder_of(model) or (_SHIPPED / FAMILIES[model.family].tiny if model.init == "random" else None)
    if folder is None:
        return 0
    whole = read(folder / "tokenizer.json")
    if whole is not None:
        vocabulary = (whole.get("model") or {}).get("vocab") or ()
        return max(len(vocabulary), *(one["id"] + 1 for one in whole.get("added_tokens", [])), 0)
    words = read(folder / "vocab.json")
    if words is not None:
        return len(words)
    return sum(_pieces(file) for name in ("tokenizer.model", "ice_text.model") if (file := folder / name).is_file())


def _pieces(file: Path) -> int:
    """Pieces of a SentencePiece file: its entries of field 1, each shorter than 2^14 bytes, come first
    (https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto)."""
    content, place, count = file.read_bytes(), 0, 0
    while place + 2 < len(content) and content[place] == 0x0A:
        length, more = content[place + 1], content[place + 2]
        place += 2 + length if length < 0x80 else 3 + (length & 0x7F | more << 7)
        count += 1
    return count


def family_in(content: dict[str, Any]) -> str:
    """The family that a config.json describes. Raises ConfigError for a release that is unknown."""
    kind = str(content.get("model_type"))
    return str(chatglm_release(content)) if kind == "chatglm" else kind


def answering(config: RunConfig) -> ModelSection:
    """The network that an entry which asks a model loads: ``model``, which an artifact and a checkpoint bring along, or
    that of a folder which another program wrote."""
    if config.artifact.path is None:
        return config.model
    folder = Path(config.artifact.path).expanduser().absolute()
    carded = any((one / CARD).is_file() for one in (folder, folder / "artifact"))
    if carded or run_of(folder) is not None or not (folder / CONFIG_JSON).is_file():
        return config.model
    return dataclasses.replace(config.model, path=str(folder), init="pretrained", add_tokens=[])


def faults(model: ModelSection, weights: bool, tokenizer: bool, exported: bool) -> Iterator[Problem]:
    """What keeps the folder of ``model.path`` from being loaded. ``weights``, ``tokenizer``: those are needed too;
    ``exported``: it may be one that was exported in the layout of transformers."""
    if model.init == "random" or model.path is None:
        return
    folder = folder_of(model)
    if folder is None:
        if model.path.startswith(BUILTIN):
            known = ", ".join(f"{BUILTIN}{one.name}" for one in sorted(_SHIPPED.glob("*/")) if read(one / CONFIG_JSON))
            yield Problem("model.path", f"{model.path} is not shipped", f"one of {known}, or a checkpoint's folder")
        return
    if not (folder / CONFIG_JSON).is_file():
        yield Problem("model.path", f"{folder} holds no {CONFIG_JSON}", "name the folder of a checkpoint")
        return
    content = read(folder / CONFIG_JSON)
    if content is None:
        yield Problem(str(folder / CONFIG_JSON), "is no JSON object", "download or copy the file again")
        return
    if not (exported and content.get("model_type") == GLM):
        yield from of_another(model, content)
    if weights and not any(any(folder.glob(kind)) for kind in WEIGHTS):
        yield Problem(
            "model.path",
            f"{folder} holds no weights ({', '.join(WEIGHTS[::2])})",
            "name the folder of a whole checkpoint",
        )
    if tokenizer and not any((folder / name).is_file() for name in WORDS):
        names = ", ".join(WORDS)
        yield Problem("model.path", f"{folder} holds no tokenizer (none of {names})", "copy those of the checkpoint")


def of_another(model: ModelSection, content: dict[str, Any]) -> Iterator[Problem]:
    """A config.json of another family than the option's, or of a network that only the checkpoint's own code knows."""
    try:
        found = family_in(content)
    except ConfigError as error:
        yield from error.problems
        return
    if found in FAMILIES or not content.get("auto_map"):
        if found != model.family:
            yield Problem(
                "model.path",
                f"{model.path} holds a {found} model, model={model.name} is for {model.family}",
                f"model={found}" if found in FAMILIES else f"a checkpoint of {', '.join(FAMILIES)}",
            )
    elif not model.trust_remote_code:
        yield Problem(
            "model.path",
            f"{model.path} holds a {found} model, which is not known here, and brings code of its own for it "
            f"({', '.join(code_files(content))}); it was not run",
            "read that code, then model.trust_remote_code=true runs it; or name a ChatGLM or Qwen2 folder",
        )


def code_files(content: dict[str, Any]) -> list[str]:
    """The Python files that a config.json names for its network."""
    places = (content.get("auto_map") or {}).values()
    return sorted({f"{str(place).split('--')[-1].rsplit('.', 1)[0]}.py" for place in places})
