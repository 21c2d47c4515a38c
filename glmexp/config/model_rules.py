"""Rules of the model section: what a random network needs, and keys without effect."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator
from pathlib import Path

from glmexp.config.entries import PLANS
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.families import FAMILIES, chatglm_release
from glmexp.config.schema import AttentionKind, ModelSection, RunConfig

BUILTIN = "builtin:"


def path(model: ModelSection) -> Iterator[Problem]:
    """A path must be a folder where it cannot be a hub name, and something must be named."""
    named = model.path
    if named is None and model.init == "pretrained":
        yield Problem("model.path", "is null: there are no weights to start from", "model.path=FOLDER")
    elif named is not None and named.startswith(("/", "./", "../", "~")) and not Path(named).expanduser().is_dir():
        yield Problem("model.path", f"{named} is no folder", "name the folder with the model's config.json")
    elif named is not None and model.init == "pretrained":
        yield from _of_another_family(model, Path(named).expanduser() / "config.json")


def _of_another_family(model: ModelSection, file: Path) -> Iterator[Problem]:
    """Its tokenizer comes before its weights, and would fail in words of its own."""
    if not file.is_file():
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Problem("model.path", f"{file} is no JSON: {error}", "the file as it was released")
        return
    kind = content["model_type"] if isinstance(content, dict) and "model_type" in content else None
    try:
        found = chatglm_release(content, None) if kind == "chatglm" else kind
    except ConfigError as error:
        yield from error.problems
        return
    if found in FAMILIES and found != model.family:
        yield other_family(model, found)


def other_family(model: ModelSection, found: str) -> Problem:
    """A checkpoint of one family under the option of another."""
    return Problem(
        "model.path",
        f"{model.path} holds a {found} model, model={model.name} is for {model.family}",
        "choose the model option of that family",
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
    if named is not None and not named.startswith(BUILTIN) and not Path(named).expanduser().is_dir():
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
