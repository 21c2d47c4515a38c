"""From the model section to a network and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.schema import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BUILTIN = "builtin:"


def location(model: ModelSection) -> str:
    """Folder or hub name of the checkpoint; ``builtin:<name>`` lies beside this file. Raises ArtifactError."""
    assert model.path is not None, "the rules ask for model.path"
    if model.path.startswith(_BUILTIN):
        return str(Path(__file__).parent / "tiny" / model.path.removeprefix(_BUILTIN))
    folder = Path(model.path)
    if folder.exists() and not (folder / "config.json").exists():
        raise ArtifactError(Problem("model.path", f"{folder} holds no config.json", "name the folder of a checkpoint"))
    return model.path


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer. No code of the checkpoint is run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(location(model))
    except OSError as error:
        raise _unreachable(model, error) from error


def load_network(model: ModelSection, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint's network in ``dtype``, on the CPU or partitioned while loading. None of its code is run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(location(model))
        _check_family(model, config)
        return AutoModelForCausalLM.from_pretrained(
            location(model), config=config, dtype=dtype, attn_implementation=model.attention
        )
    except OSError as error:
        raise _unreachable(model, error) from error


def _check_family(model: ModelSection, config: object) -> None:
    """Raise ArtifactError when config.json is of another family than the option says."""
    found = getattr(config, "release", None) or getattr(config, "model_type", None)
    if found != model.family:
        raise ArtifactError(
            Problem(
                "model.path",
                f"{model.path} holds a {found} model, model={model.name} is for {model.family}",
                "choose the model option of that family",
            )
        )


def _unreachable(model: ModelSection, error: OSError) -> ArtifactError:
    first_line = str(error).splitlines()[0]
    return ArtifactError(
        Problem(
            "model.path",
            f"cannot load {model.path!r}: {first_line}",
            "name a local folder, or a hub name that can be reached",
        )
    )
