"""From the model section to a network and its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from glmexp.config import folders
from glmexp.config.errors import ArtifactError, ConfigError, Problem, first_line
from glmexp.config.families import FAMILIES
from glmexp.config.schema import ModelSection
from glmexp.model import vocabulary
from glmexp.model.auto import config_json, known_tokenizer, register_networks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from glmexp.model.vocabulary import Pieces

_BUILTIN = "builtin:"
NATIVE = ("chatglm", "qwen2")
"""Values of config.json's model_type whose networks are known here or to transformers: code in a folder is not run."""


def location(model: ModelSection) -> str:
    """Folder or hub name of the checkpoint; ``builtin:<name>`` lies beside this file. Raises ArtifactError."""
    assert model.path is not None, "the rules ask for model.path"
    if model.path.startswith(_BUILTIN):
        return _shipped(model.path.removeprefix(_BUILTIN))
    folder = Path(model.path)
    if folder.exists() and not (folder / "config.json").exists():
        raise ArtifactError(Problem("model.path", f"{folder} holds no config.json", "name the folder of a checkpoint"))
    return model.path


def tokenizer_location(model: ModelSection) -> str:
    """Where the tokenizer lies: with init=random and no folder it is the shipped one of the family, without a hub."""
    named = model.path
    if model.init == "pretrained" or (
        named is not None and (named.startswith(_BUILTIN) or Path(named).expanduser().is_dir())
    ):
        return location(model)
    return _shipped(FAMILIES[model.family].tiny)


def _shipped(name: str) -> str:
    folder = Path(__file__).parent / "tiny" / name
    if (
        Path(name).name != name or not (folder / "config.json").exists()
    ):  # transformers would take the path for a hub name and ask there
        raise ArtifactError(
            Problem("model.path", f"builtin:{name} is not shipped", "model.path=FOLDER of a checkpoint")
        )
    return str(folder)


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer with model.add_tokens and model.pad_token. No code of the checkpoint is run unless
    model.trust_remote_code says so. Raises ConfigError or ArtifactError where the network has no row for an id of it.
    """
    tokenizer = _load_tokenizer(model)
    own = len(tokenizer)
    vocabulary.add_tokens(tokenizer, model.add_tokens)
    _check_rows(model, own, len(tokenizer))
    if model.pad_token is not None:
        token = tokenizer.eos_token if model.pad_token == "eos" else model.pad_token
        if token not in tokenizer.get_vocab():
            raise ArtifactError(
                Problem(
                    "model.pad_token", f"{token!r} is no token of {model.path}", "eos, or a token of its vocabulary"
                )
            )
        tokenizer.pad_token = token
    return tokenizer


def _check_rows(model: ModelSection, own: int, with_added: int) -> None:
    """Rows for the ``own`` ids of a checkpoint's tokenizer, which get more for model.add_tokens; for all of them where
    the network is random."""
    sizes = None if model.trust_remote_code else folders.sizes_of(model)
    rows = None if sizes is None else sizes.vocab_size
    if rows is None:
        return
    if model.init == "random" and rows < with_added:
        found = f"{rows} is smaller than the tokenizer's {with_added} ids"
        raise ConfigError(Problem("model.sizes.vocab_size", found, f"model.sizes.vocab_size={with_added} or more"))
    if model.init == "pretrained" and rows < own:
        found = f"the tokenizer of {model.path} has {own} ids, and the network of its config.json rows for {rows}"
        raise ArtifactError(Problem("model.path", found, "copy the tokenizer's files of that checkpoint again"))


def new_pieces(model: ModelSection) -> Pieces:
    """What ``model.add_tokens`` adds to the network; nothing where all weights are random anyway."""
    if model.init == "random" or not model.add_tokens:
        return {}
    return vocabulary.add_tokens(_load_tokenizer(model), model.add_tokens)


def _load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    try:
        place, trusted = tokenizer_location(model), bool(foreign_code(model))
        known = None if trusted else known_tokenizer(place)
        if known is not None:
            return known
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(place, trust_remote_code=trusted)
    except OSError as error:
        raise _unreachable(model, error) from error


def load_network(model: ModelSection, dtype: torch.dtype) -> PreTrainedModel:
    """The network in ``dtype``: the checkpoint's, on the CPU or partitioned while loading; or a random one, on the GPU
    where there is one. No code of the checkpoint is run unless model.trust_remote_code says so."""
    from transformers import AutoModelForCausalLM

    from glmexp.model.attention import DEFAULT_KIND

    register_networks()
    if model.init == "random":
        from glmexp.model.random_init import random_network

        return random_network(model, load_tokenizer(model), dtype)
    try:
        network = AutoModelForCausalLM.from_pretrained(
            location(model),
            config=_pretrained_config(model),
            dtype=dtype,
            attn_implementation=model.attention or DEFAULT_KIND,
            trust_remote_code=bool(foreign_code(model)),
        )
    except OSError as error:
        raise _unreachable(model, error) from error
    pieces = new_pieces(model)
    if pieces:
        vocabulary.extend(network, pieces)
    return network


def empty_network(model: ModelSection, dtype: torch.dtype, place: str = "meta") -> PreTrainedModel:
    """The same network without its weights: on the meta device names, shapes and ties alone, without a byte; on the
    CPU memory for them, with whatever stood there before."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from glmexp.model.attention import DEFAULT_KIND
    from glmexp.model.random_init import network_config

    register_networks()
    config = network_config(model, load_tokenizer(model)) if model.init == "random" else _pretrained_config(model)
    with torch.device(place), no_init_weights():
        network = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=model.attention or DEFAULT_KIND,
            trust_remote_code=bool(foreign_code(model)),
        )
    network.tie_weights()
    pieces = new_pieces(model)
    if pieces:
        vocabulary.extend(network, pieces)
    return network.eval()


def _pretrained_config(model: ModelSection) -> PreTrainedConfig:
    from transformers import AutoConfig

    trusted = bool(foreign_code(model))
    try:
        config = AutoConfig.from_pretrained(location(model), trust_remote_code=trusted)
    except OSError as error:
        raise _unreachable(model, error) from error
    if not trusted:
        problems = [*folders.of_another(model, config_json(location(model)))]
        if problems:
            raise ArtifactError(*problems)
    _check_window(model, config)
    return config


def foreign_code(model: ModelSection) -> list[str]:
    """The Python files of the checkpoint that loading it runs: none where its network is known here.

    Raises ArtifactError for an unknown network whose code may not be run.
    """
    if model.init == "random":
        return []
    content = config_json(location(model))
    if content.get("model_type") in NATIVE or not content.get("auto_map"):
        return []
    problems = [*folders.of_another(model, content)]
    if problems:
        raise ArtifactError(*problems)
    return folders.code_files(content)


def announce_code(model: ModelSection) -> None:
    """Say what model.trust_remote_code does, before it does: once, on standard output."""
    if model.trust_remote_code and model.init == "pretrained" and os.environ.get("RANK", "0") == "0":
        files = foreign_code(model)
        done = (
            f"code from {model.path} is run ({', '.join(files)})"
            if files
            else (f"without effect: the network of {model.path} is known, no code of it is run")
        )
        print(f"model.trust_remote_code=true: {done}", flush=True)


def _check_window(model: ModelSection, config: object) -> None:
    """Raise ConfigError when varlen meets layers that look back a limited way (some Qwen2 folders)."""
    if model.attention == "varlen" and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(
            Problem(
                "model.attention",
                f"varlen has no sliding window, and {model.path} has layers with one",
                "model.attention=sdpa",
            )
        )


def _unreachable(model: ModelSection, error: OSError) -> ArtifactError:
    return ArtifactError(
        Problem(
            "model.path",
            f"cannot load {model.path!r}: {first_line(error)}",
            "name a local folder, or a hub name that can be reached",
        )
    )
