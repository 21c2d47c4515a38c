"""Rules of the generate section: what is answered and where that goes, keys without effect, and a chat's terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from glmexp.config import inference_rules
from glmexp.config.data_rules import BUILTIN, HUB
from glmexp.config.entries import SERVES, TRAINING
from glmexp.config.errors import Problem
from glmexp.config.facts import Facts
from glmexp.config.launch_rules import talks
from glmexp.config.schema import RunConfig

_UNREAD = (*TRAINING, "data", "eval", "tracker")
"""Sections that entry=generate does not read."""
_HARMLESS = ("data", "eval", "tracker")
"""Groups whose mere choice is no wish: eval=none, tracker=none."""


def check(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """All of them."""
    if config.entry.name != "generate":
        return
    yield from _files(config)
    yield from _lengths(config)
    yield from _choosing(config, facts.explicit)
    if talks(config):
        yield from _chat(config, facts)


def _files(config: RunConfig) -> Iterator[Problem]:
    generate = config.generate
    path = generate.prompts_file
    if path is not None and not path.startswith((BUILTIN, HUB)) and not Path(path).expanduser().is_file():
        yield Problem("generate.prompts_file", f"{path} is no file", "name a file of prompts, or builtin:prompts.jsonl")
    if generate.output is None:
        return
    output = Path(generate.output).expanduser()
    if output.exists():
        yield Problem("generate.output", f"{output} is there already", "another name; null: in the run folder")
    elif not output.absolute().parent.is_dir():
        yield Problem("generate.output", f"{output.absolute().parent} is no folder", "a file in a folder that is there")


def _lengths(config: RunConfig) -> Iterator[Problem]:
    generate = config.generate
    if generate.max_new_tokens >= generate.max_length:
        yield Problem(
            "generate.max_new_tokens",
            f"{generate.max_new_tokens} tokens of an answer leave no room for a prompt in "
            f"generate.max_length={generate.max_length}",
            f"generate.max_new_tokens={max(1, generate.max_length // 2)}, or a larger generate.max_length",
        )
    most = inference_rules.positions(config)
    if most is not None and generate.max_length > most:
        yield Problem(
            "generate.max_length",
            f"{generate.max_length} tokens, and the network was made for {most}",
            f"generate.max_length={most}",
        )


def _choosing(config: RunConfig, explicit: Collection[str]) -> Iterator[Problem]:
    if config.generate.temperature is not None:
        return
    for name in ("top_p", "top_k", "seed"):
        if f"generate.{name}" in explicit and getattr(config.generate, name) is not None:
            yield Problem(
                f"generate.{name}",
                "without effect: generate.temperature is null, so the likeliest token is taken",
                "generate.temperature=0.8 draws",
            )


def _chat(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    way = "generate.prompts_file=FILE"
    if config.generate.batch_size != 1:
        yield Problem("generate.batch_size", f"{config.generate.batch_size} without effect in a chat", way)
    if config.launcher.name == "slurm":
        yield Problem(
            "launcher.name", "slurm: a chat needs a terminal, and a job has none", f"launcher=local, or {way}"
        )
    elif facts.ranks > 1 and config.placement.name == "single":
        yield Problem("launcher.nproc", f"a chat is one process, not {facts.ranks}", f"leave it out, or {way}")
    if config.placement.name == "tensor_parallel":
        yield Problem("placement.name", "tensor_parallel: a chat is one process", f"single or layers, or {way}")


def without_effect(config: RunConfig, explicit: Collection[str]) -> list[str]:
    """Warnings: what was given for training, where a model only answers."""
    entry = config.entry.name
    if entry not in SERVES:
        return []
    found = []
    if entry == "generate":  # the others': see rules.warnings
        # Random weights have train.seed as the default of their own seed.
        read = ("data.encoding", *_HARMLESS, *(["train.seed"] if config.model.init == "random" else []))
        unused = [key for key in sorted(explicit) if key.split(".")[0] in _UNREAD and key not in read]
        if unused:
            found.append(f"{', '.join(unused)}: without effect under entry={entry}")
    method = [key for key in sorted(explicit) if key.split(".")[0] == "method"]
    if method and config.artifact.path is None:
        found.append(f"{', '.join(method)}: without effect: without artifact.path the base alone answers")
    return found
