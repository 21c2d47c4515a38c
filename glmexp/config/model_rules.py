"""Rules of the model section: what a random network needs, and keys without effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path

from glmexp.config import folders
from glmexp.config.entries import PLANS, TRAINS
from glmexp.config.errors import Problem
from glmexp.config.families import FAMILIES
from glmexp.config.schema import AttentionKind, ModelSection, RunConfig

_READS_SIZES = ("plan", "doctor")
"""Entries that load nothing of a checkpoint."""


def path(model: ModelSection) -> Iterator[Problem]:
    """A path must be a folder where it cannot be a hub name, and something must be named."""
    named = model.path
    if named is None and model.init == "pretrained":
        yield Problem("model.path", "is null: there are no weights to start from", "model.path=FOLDER")
    elif named is not None and named.startswith(("/", "./", "../", "~")) and not Path(named).expanduser().is_dir():
        yield Problem("model.path", f"{named} is no folder", "name the folder with the model's config.json")


def folder(config: RunConfig) -> Iterator[Problem]:
    """The folder that is loaded, as far as its files tell."""
    model = folders.answering(config)
    own = model is config.model  # what another program wrote may lie in parts, with the tokenizer of model.path
    tokenizer = own and config.entry.name not in _READS_SIZES
    weights = tokenizer and config.entry.name != "inspect"
    yield from folders.faults(model, weights, tokenizer, exported=config.artifact.path is not None)


def length(config: RunConfig) -> Iterator[Problem]:
    """Rows that are longer than the network of a folder has positions; of a random one see ``sizes``."""
    found = None if config.model.init == "random" else folders.sizes_of(config.model)
    if config.entry.name not in (*TRAINS, "plan") or found is None or found.max_positions is None:
        return
    if config.data.max_length > found.max_positions:
        yield Problem(
            "data.max_length",
            f"{config.data.max_length} tokens, and the network of {config.model.path} ends at {found.max_positions}",
            f"data.max_length={found.max_positions} at most",
        )


def pad_token(model: ModelSection) -> Iterator[Problem]:
    """The vocabularies of the ChatGLMs fix what padding is."""
    if model.pad_token is not None and model.family != "qwen2":
        found = f"{model.pad_token!r} cannot be set: the vocabulary of {model.family} fixes it"
        yield Problem("model.pad_token", found, "leave it out")


def without_effect(model: ModelSection, explicit: Collection[str]) -> Iterator[Problem]:
    """What the user set and ``model.init`` leaves unread."""
    if model.init == "pretrained":
        for key in sorted(explicit):
            if key == "model.init_seed" or key.startswith("model.sizes."):
                yield Problem(
                    key,
                    "without effect: model.init=pretrained reads sizes and weights from model.path",
                    "leave it out, or model.init=random",
                )
        return
    named = model.path if "model.path" in explicit else None
    if named is not None and not named.startswith(folders.BUILTIN) and not Path(named).expanduser().is_dir():
        yield Problem(
            "model.path",
            f"{named} without effect: with model.init=random only a folder's tokenizer is read, and this is none",
            "leave it out for a small tokenizer, or name a folder",
        )
    if model.trust_remote_code:
        yield Problem("model.trust_remote_code", "without effect: with model.init=random no folder's code is needed")


def attention_kind(config: RunConfig) -> tuple[AttentionKind, str]:
    """The attention of a training run, and the reason where packed rows would have another: model.attention, or where
    it is null varlen with packed rows, else sdpa."""
    model = config.model
    if model.attention is not None:
        return model.attention, ""
    if not config.data.packing:
        return "sdpa", ""
    reason = _not_varlen(model)
    return ("varlen", "") if reason is None else ("sdpa", reason)


def _not_varlen(model: ModelSection) -> str | None:
    if model.family == "chatglm":
        return "the context of ChatGLM-6B's rows sees itself in both directions, which needs a mask"
    if model.trust_remote_code:
        return "a network with code of its own (model.trust_remote_code) may not heed the ends of packed examples"
    return None


def attention(config: RunConfig, explicit: Collection[str]) -> Iterator[Problem]:
    """varlen where it does not apply, or where no rows are packed."""
    if config.model.attention != "varlen":
        return
    reason = _not_varlen(config.model)
    if reason is not None:
        yield Problem("model.attention", f"varlen does not apply: {reason}", "model.attention=sdpa")
    elif "model.attention" in explicit and (config.entry.name not in PLANS or not config.data.packing):
        where = "" if config.entry.name in PLANS else f" under entry={config.entry.name}"
        yield Problem(
            "model.attention",
            f"varlen without effect{where}: no rows are packed, and others go through sdpa",
            "model.attention=null" + (", or data.packing=true" if config.entry.name in PLANS else ""),
        )


def sizes(model: ModelSection, max_length: int) -> Iterator[Problem]:
    """Sizes of a random network: all that the family has and no other, and such that they fit together."""
    if model.init != "random":
        return
    names = FAMILIES[model.family].sizes
    given = {field.name: getattr(model.sizes, field.name) for field in dataclasses.fields(model.sizes)}
    lacking = [name for name in names if given[name] is None]
    for name in lacking:
        yield Problem(f"model.sizes.{name}", f"is null, and {model.family} needs it", f"model.sizes.{name}=NUMBER")
    for name in given:
        if name not in names and given[name] is not None:
            yield Problem(f"model.sizes.{name}", f"{model.family} has no such size", "leave it out")
    if lacking:
        return
    hidden, heads, groups = (given[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if groups is not None and heads % groups:
        yield _indivisible("num_attention_heads", heads, "num_key_value_heads", groups)
    own_width = "head_size" in names
    if not own_width and hidden % heads:
        yield _indivisible("hidden_size", hidden, "num_attention_heads", heads)
    else:
        width = given["head_size"] if own_width else hidden // heads
        parts = 2 if model.family == "qwen2" else 4
        if width % parts:
            yield Problem(
                f"model.sizes.{'head_size' if own_width else 'hidden_size'}",
                f"makes heads of {width}, and the rotary embedding of {model.family} needs a multiple of {parts}",
            )
    if max_length > given["max_positions"]:
        yield Problem(
            "data.max_length",
            f"{max_length} tokens, and a network of model.sizes.max_positions={given['max_positions']} ends before",
            "a smaller data.max_length, or a larger model.sizes.max_positions",
        )


def _indivisible(name: str, number: int, other: str, divisor: int) -> Problem:
    whole = max(1, round(number / divisor)) * divisor
    return Problem(
        f"model.sizes.{name}",
        f"{number} is no multiple of model.sizes.{other}={divisor}",
        f"model.sizes.{name}={whole}",
    )
