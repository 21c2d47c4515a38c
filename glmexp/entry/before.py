"""What is wrong can be told before a run folder is made, though no single value shows it: files of rows and prompts are
looked into, and a hub is asked once whether it is there. Nothing heavy is loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from glmexp.config.data_rules import HUB, SHIPPED_PROMPTS, needs_rows
from glmexp.config.entries import SERVES, TRAINS
from glmexp.config.errors import ConfigError, DataError, Problem, UserError
from glmexp.config.folders import BUILTIN, answering, folder_of, sizes_of, tokens_in
from glmexp.config.schema import ModelSection, RunConfig
from glmexp.data import first_look
from glmexp.data.questions import Question, read_questions
from glmexp.eval import prompts
from glmexp.launcher import hub
from glmexp.plan import shapes

_LOADS = (*TRAINS, *SERVES, "inspect", "export")
"""Entries that read the checkpoint of ``model.path``, its tokenizer at least."""
_ADDRESS = "HF_ENDPOINT=URL names another address of the hub"


def check(trials: Iterable[RunConfig]) -> None:
    """Raise what would end one of these runs before its work begins: ConfigError, DataError."""
    trials = [trial for trial in trials if trial.launcher.name != "slurm"]  # a job's machine may see other things
    silent = cache(hub.silent)  # a hub that does not answer takes its seconds once, not once a trial
    problems = [problem for trial in trials for problem in (*_names(trial), *_cache(trial), *_hub(trial, silent))]
    models = {repr(model): model for trial in trials if trial.entry.name in _LOADS for model in [answering(trial)]}
    problems += [problem for model in models.values() for problem in _ids(model)]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    looks = {repr((look.args, look.keywords)): look for trial in trials for look in _looks(trial)}
    faults = [problem for look in looks.values() for problem in _faults(look)]
    if faults:
        raise DataError(*dict.fromkeys(faults))


def questions(config: RunConfig) -> list[Question]:
    """The rows of generate.prompts_file. Raises DataError."""
    path = config.generate.prompts_file
    assert path is not None, "without a file it is a chat"
    path = str(prompts.location(path)) if path == SHIPPED_PROMPTS else path
    return read_questions(path, config.data.encoding, config.generate.system)


def _names(config: RunConfig) -> Iterator[Problem]:
    """What is to be trained by its name, and is not in the network."""
    method = config.method
    if config.entry.name not in TRAINS or method.name not in ("freeze", "lora") or config.model.trust_remote_code:
        return
    if method.name == "lora":
        if method.modules_to_save:
            yield from _saved(method.modules_to_save, shapes.names_of(config.model))
        return
    names = shapes.names_of(config.model)
    layers = shapes.network_of(config.model).layers
    if method.num_layers is not None and method.num_layers > layers:
        yield Problem("method.num_layers", f"{method.num_layers} of {layers} layers", f"give at most {layers}")
    for pattern in method.patterns or []:
        if not any(re.search(pattern, name) for name in names):
            fix = f"names look like {names[0]}, {names[-1]}"
            yield Problem("method.patterns", f"{pattern!r} matches no parameter", fix)


def _ids(model: ModelSection) -> Iterator[Problem]:
    """A tokenizer with more ids than the network has rows: where its file tells, it is loaded to say how many."""
    sizes = None if model.trust_remote_code else sizes_of(model)
    if sizes is None or sizes.vocab_size is None or tokens_in(model) <= sizes.vocab_size:
        return
    from glmexp.model.build import load_tokenizer

    yield from _faults(partial(load_tokenizer, model))


def _saved(asked: Iterable[str], names: Iterable[str]) -> Iterator[Problem]:
    """Of ``asked`` what is no module, by the names of the network's parameters."""
    modules = {module for name in names for module in accumulate(name.split(".")[:-1], "{}.{}".format)}
    last = {module.rpartition(".")[2] for module in modules}
    there = ", ".join(sorted(one for one in last if not one.isdigit()))
    for saved in asked:
        if not any(module == saved or module.endswith(f".{saved}") for module in modules):
            found = f"{saved!r} matches no module of the model"
            yield Problem("method.modules_to_save", found, f"those with weights are: {there}")


def _cache(config: RunConfig) -> Iterator[Problem]:
    """A folder for prepared rows that cannot be made."""
    named = config.data.cache_dir
    if named is None or not _files(config):
        return
    place = Path(named)
    there = next(one for one in (place, *place.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        found = f"{there} is no folder that can be written to"
        yield Problem("data.cache_dir", found, "another folder; null: rows are prepared anew for each run")


def _hub(config: RunConfig, silent: Callable[[], str | None]) -> Iterator[Problem]:
    """What was not fetched before, where the hub cannot be asked for it."""
    model = answering(config)
    name = model.path
    here = name is None or name.startswith(BUILTIN) or folder_of(model) is not None
    if config.entry.name in _LOADS and model.init == "pretrained" and name is not None and not here:
        ways = (
            "model.path=FOLDER of the checkpoint on this machine, or model.init=random to try the rest out without it"
        )
        subject = f"{name} is no folder here and"
        yield from _unreachable("model.path", name, subject, hub.fetched(name), ways, silent())
    asked = config.generate.prompts_file if config.entry.name == "generate" else None
    for path in [*_files(config), *([asked] if asked is not None else [])]:
        owner_and_name = path.removeprefix(HUB).split(":")[0]
        if path.startswith(HUB) and not Path(owner_and_name).exists():
            there = hub.data_fetched(owner_and_name)
            way = "download it and name its file"
            yield from _unreachable(path, owner_and_name, "it", there, way, silent())


def _unreachable(where: str, name: str, subject: str, there: bool, ways: str, silent: str | None) -> Iterator[Problem]:
    closed = hub.offline()
    if closed and not there:
        found = f"{subject} was not fetched before, and {closed} keeps from asking the hub"
        yield Problem(where, found, f"{ways}; or without {closed}")
    elif silent and not there:
        found = f"{subject} was not fetched before, and the hub ({silent}) does not answer"
        yield Problem(where, found, f"{ways}; {_ADDRESS}")
    elif silent and not closed:
        hub.go_offline()
        print(f"warning: the hub ({silent}) does not answer: {name} is taken as it was fetched before", file=sys.stderr)


def _files(config: RunConfig) -> list[str]:
    """Files of rows that the entry reads, of training or held out."""
    entry, data = config.entry.name, config.data
    if entry in (*TRAINS, "inspect"):
        found = [data.train_file, data.eval_file if entry == "inspect" or needs_rows(config.eval) else None]
    elif entry == "evaluate" and needs_rows(config.eval):
        found = [data.eval_file or data.train_file]
    else:
        found = []
    return [path for path in found if path is not None]


def _looks(config: RunConfig) -> Iterator[partial[Any]]:
    """Each file that is read, as a call that raises what is wrong with it."""
    if config.entry.name == "generate" and config.generate.prompts_file is not None:
        if not config.generate.prompts_file.startswith(HUB):
            yield partial(questions, config)
        return
    for path in _files(config):
        if not path.startswith(HUB):
            yield partial(first_look.look, path, config.data)
    if config.entry.name in (*TRAINS, "evaluate"):
        named = (getattr(hook, "prompts_file", None) for hook in config.eval.hooks.values())
        yield from (partial(prompts.rows_of, path) for path in named if path is not None)


def _faults(look: Callable[[], Any]) -> Iterator[Problem]:
    try:
        look()
    except UserError as error:
        yield from error.problems
