"""From the command line to checked configurations: one, or the grid of a sweep. All problems at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.types import RunMode

from glmexp.config import derived, ds_file, hydra_tree, inference_rules, inherit, launch_rules, registry, rules, sweep
from glmexp.config.arguments import Arguments, Given, parse, understand
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.hydra_tree import Groups, Origin, Tree
from glmexp.config.load import Source, examine, examine_section, flatten
from glmexp.config.schema import RunConfig, SweepSection
from glmexp.config.sweep import Axis, Swept

ALTERNATIVES = (
    ("data.train_file", "data.eval_file"),
    ("data.holdout", "data.eval_file"),
    ("optim.warmup_steps", "optim.warmup_ratio"),
    ("method.patterns", "method.num_layers"),
)
"""Where the user sets the first, this project's default of the second is dropped."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where the run will be: ``world_size`` is set by an outside launcher such as torchrun."""

    gpus: int = 0
    world_size: int | None = None
    cores: int | None = None
    """Cores that the slots of a sweep share where there is no GPU. None: not asked."""

    def gpus_of(self, config: RunConfig) -> int:
        """GPUs of the machine that will run: those that a job asks for, where another one does."""
        return (config.slurm.gpus_per_node or 0) if config.launcher.name == "slurm" else self.gpus

    def ranks(self, config: RunConfig) -> int:
        """Ranks that the run will have, on all machines together.

        ``request`` writes those of one machine into launcher.nproc, the one place to read them.
        """
        alone = config.launcher.name == "inprocess" or inference_rules.one_rank(config)
        slots = 1 if config.launcher.name == "slurm" else config.launcher.slots or 1
        gpus = self.gpus_of(config) // slots
        each = config.launcher.nproc or (1 if alone else gpus) or 1
        return self.world_size or each * config.launcher.nnodes


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asks to run."""

    trials: list[RunConfig]
    """Checked and derived; exactly one without ``-m``. A search composes its own as it goes: here are those at the ends
    of its space, so that what is wrong with them is found before the first starts."""
    sweep: Swept | None
    """With ``-m``: how trials are chosen and where they lie."""
    warnings: list[str]
    origins: dict[str, str] = dataclasses.field(default_factory=dict)
    """Dotted key to the file or override that set it, of a single run."""


def run_config(overrides: Sequence[str], ranks: int = 1, gpus: int = 0) -> RunConfig:
    """The checked and derived configuration of one run, as the command line would give it. Raises ConfigError."""
    return request(parse(overrides), Machine(gpus, ranks), outside=False).trials[0]


def request(arguments: Arguments, machine: Machine, outside: bool | None = None) -> Request:
    """Compose, load, check and derive everything that is asked for. Raises ConfigError with all problems.

    ``outside``: started by an outside launcher; by default where the machine has a world size.
    """
    outside = machine.world_size is not None if outside is None else outside
    with hydra_tree.hydra_for(arguments) as hydra:
        composer = _Composer(hydra, machine, outside)
        try:
            if arguments.multirun:
                return composer.sweep(arguments.overrides)
            config = composer.single(arguments.overrides)
            composer.stop_on_problems()
        except ConfigError as error:  # what ends composing early must not hide what was found before
            raise ConfigError(*dict.fromkeys([*composer.problems, *error.problems])) from error
        return Request([config], None, composer.warnings, origins=composer.origins)


def trial_of_search(arguments: Arguments, machine: Machine, values: Mapping[str, str]) -> RunConfig:
    """The checked configuration of the trial with these values, as texts. Raises ConfigError where they do not fit."""
    with hydra_tree.hydra_for(arguments) as hydra:
        composer = _Composer(hydra, machine, outside=False)
        master, axes = composer.master(arguments.overrides)
        config = composer.single_trial(sweep.chosen(axes, values), master)
        composer.stop_on_problems()
        return config


class _Composer:
    def __init__(self, hydra: Hydra, machine: Machine, outside: bool) -> None:
        self.hydra = hydra
        self.machine = machine
        self.outside = outside
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.origins: dict[str, str] = {}

    def stop_on_problems(self) -> None:
        """Raise what was found, each problem once."""
        if self.problems:
            raise ConfigError(*dict.fromkeys(self.problems))

    def understood(self, overrides: Iterable[str], multirun: bool) -> tuple[list[Given], Groups]:
        """Parsed overrides and the groups on the search path; what is wrong with them is noted."""
        given, problems = understand(overrides, self.hydra.config_loader, multirun)
        self.problems.extend(problems)
        places = [one for one in given if one.key == "hydra.searchpath"]
        missing = list(hydra_tree.missing_folders(places))
        self.problems.extend(missing)
        paths = [] if missing else [one.text for one in places]
        loader = self.hydra.config_loader
        assert isinstance(loader, hydra_tree.RecordingLoader)
        return given, loader.groups(paths)

    def single(self, overrides: Iterable[str]) -> RunConfig:
        """One run. Problems are noted; the returned configuration is whole only if there are none."""
        given, groups = self.understood(overrides, multirun=False)
        handed, problems = hydra_tree.canonical(given, groups)
        self.problems.extend(problems)
        if problems:
            given, handed = self.without_wrong_options(given, groups)
        self.problems.extend(
            Problem(one.key, "without effect in a single run", "add -m, or run.dir=FOLDER for one run")
            for one in given
            if one.key == "hydra.sweep.dir"
        )
        self.problems.extend(
            Problem(one.key, "without effect in a single run", "add -m")
            for one in given
            if sweep.of_sweep(one.key) or one.key == "launcher.slots"
        )
        tree = hydra_tree.compose(self.hydra, handed, given, RunMode.RUN)
        if tree.params:
            names = ", ".join(tree.params)
            self.problems.append(Problem("hydra.sweeper.params", f"holds a grid over {names}", "add -m to run it"))
        return self.checked(tree, given, groups)

    def without_wrong_options(self, given: list[Given], groups: Groups) -> tuple[list[Given], list[str]]:
        """The overrides that Hydra can compose, so that the rest is checked as well."""
        right = [one for one in given if not hydra_tree.canonical([one], groups)[1]]
        return right, hydra_tree.canonical(right, groups)[0]

    def checked(self, tree: Tree, given: list[Given], groups: Groups) -> RunConfig:
        """Load, check and derive one tree; problems are noted."""
        tree, noted = self.with_deepspeed_file(tree, given, groups)
        _drop_alternatives(tree)
        saved = inherit.saved_by(tree.values)
        if saved is not None:
            noted += inherit.inherit(tree, saved, _explicit(tree), _chosen(tree, given, groups))
        unchosen = list(_unchosen_hooks(tree))
        origins = {key: origin.words for key, origin in tree.origins.items()}
        self.origins = {key: f"{words}{_through(key, tree)}" for key, words in origins.items()}
        texts = {one.key: one.value_text for one in given if not one.sweeps and one.value_text[:1] not in "'\"[{"}
        config, problems = examine(tree.values, Source(origins, texts))
        wrong = {problem.where for problem in problems}
        self.problems.extend([*_caused_here(tree, wrong), *noted, *unchosen, *_without_echoes(problems, tree)])
        explicit = _explicit(tree)
        try:
            ranks, gpus = self.machine.ranks(config), self.machine.gpus_of(config)
            if self.outside:
                config = self.under_outside_launcher(config, ranks, explicit)
        except rules.UnusableValueError:
            ranks, gpus = 1, self.machine.gpus
        if saved is not None and "train" in saved.sections and not problems:
            config = dataclasses.replace(config, train=inherit.refitted(config.train, saved, ranks, explicit))
        contradictions = rules.check(config, ranks, gpus, explicit, self.machine.cores)
        self.problems.extend(_told([one for one in contradictions if one.where not in wrong], tree))
        if self.problems:
            return config
        if not self.outside and config.launcher.name == "env":
            way = "torchrun ..., or launcher=local"
            self.problems.append(Problem("launcher.name", "env: no outside launcher started this process", way))
            return config
        if not self.outside:
            launcher = dataclasses.replace(config.launcher, nproc=ranks // config.launcher.nnodes)
            config = dataclasses.replace(config, launcher=launcher)
        config = derived.derive(config, ranks)
        self.warnings.extend(one for one in rules.warnings(config, explicit) if one not in self.warnings)
        return config

    def under_outside_launcher(self, config: RunConfig, ranks: int, explicit: frozenset[str]) -> RunConfig:
        """The outside launcher says how many ranks there are and where; what the user set of that has no effect."""
        launcher = config.launcher
        if {"launcher.nproc", "launcher.nnodes"} & explicit and launcher.nnodes * (launcher.nproc or 1) != ranks:
            self.warnings.append(f"launcher.nproc: without effect, the outside launcher started {ranks} ranks")
        none: dict[str, Any] = {"nproc": None, "nnodes": 1, "node_rank": None, "master_addr": None, "master_port": None}
        return dataclasses.replace(config, launcher=dataclasses.replace(launcher, name="env", **none))

    def with_deepspeed_file(self, tree: Tree, given: list[Given], groups: Groups) -> tuple[Tree, list[Problem]]:
        """Lay the values of ``deepspeed.config_file`` over the defaults; they must agree with what the user set."""
        section = tree.values.get("deepspeed")
        file = section.get("config_file") if isinstance(section, dict) else None
        if not isinstance(file, str):
            return tree, []
        try:
            raised = ds_file.raise_file(Path(file).expanduser())
        except ConfigError as error:
            return tree, list(error.problems)
        user_set = _chosen(tree, given, groups)
        more = [text for text in raised.options(tree) if text.partition("=")[0] not in user_set]
        if more:
            chosen, _ = understand(more, self.hydra.config_loader, multirun=False)
            handed = hydra_tree.canonical([*given, *chosen], groups)[0]
            tree = hydra_tree.compose(self.hydra, handed, given, RunMode.RUN)
        own = _explicit(tree)
        problems = [*raised.problems, *ds_file.lay_over(tree, raised, own | _echoes(tree, own), user_set)]
        self.warnings.extend(one for one in raised.warnings if one not in self.warnings)
        return tree, problems

    def master(self, overrides: Iterable[str]) -> tuple[Tree, list[Axis]]:
        """The tree with the sweep's own settings in it, and everything else that was given."""
        given, groups = self.understood(overrides, multirun=True)
        handed, problems = hydra_tree.canonical(given, groups)
        self.problems.extend(problems)
        if problems:
            given, handed = self.without_wrong_options(given, groups)
        own = [one for one in given if sweep.of_sweep(one.key) or one.key == "launcher.slots"]
        self.problems.extend(Problem(one.key, "cannot be swept over", "give one value") for one in own if one.sweeps)
        tree = hydra_tree.compose(self.hydra, handed, given, RunMode.MULTIRUN)
        lines = [f"{key}={_param(value)}" for key, value in tree.params.items()]
        params, problems = understand(lines, self.hydra.config_loader, multirun=True)
        self.problems.extend(problems)
        return tree, sweep.axes(given, params)

    def sweep(self, overrides: Iterable[str]) -> Request:
        """Every trial of the grid, or the corners of a search's space, all checked before the first starts."""
        master, axes = self.master(overrides)
        folder = self.sweep_folder(master)
        settings = self.sweep_settings(master)
        search = settings is not None and settings.name == "search"
        space, problems = sweep.space(axes) if search else ({}, list(sweep.endless(axes)))
        self.problems.extend(problems)
        ends = {one.where for one in problems}
        axes = [axis for axis in axes if axis.key not in ends]
        asked = [(sweep.chosen(axes, one), one) for one in sweep.corners(axes, space)] if search else sweep.grid(axes)
        trials: list[RunConfig] = []
        values: list[dict[str, str]] = []
        slots = None
        for lines, swept in asked:
            config = self.single_trial(lines, master)
            if not self.problems:
                assert settings is not None
                self.problems.extend(filter(None, [sweep.metric_problem(settings, config)]))
                slots = config.launcher.slots
                trials.append(sweep.in_sweep(config, folder, sweep.folder_name(len(trials), swept)))
                values.append(swept)
        self.stop_on_problems()
        assert settings is not None
        named = "hydra.sweep.dir" in master.origins
        swept_all = Swept(settings, folder, named, slots, [] if search else values, space)
        return Request(trials, swept_all, self.warnings)

    def sweep_settings(self, master: Tree) -> SweepSection | None:
        """The section ``sweep``; None where it holds a mistake, which is noted."""
        origins = {key: origin.words for key, origin in master.origins.items()}
        settings, problems = examine_section("sweep", SweepSection, master.values["sweep"], Source(origins))
        self.problems.extend(problems or sweep.settings_problems(settings))
        return None if problems else settings

    def sweep_folder(self, master: Tree) -> str:
        try:
            with hydra_tree.hydra_mistakes():
                folder = Path(master.sweep.dir).expanduser()
        except ConfigError as error:
            text = error.problems[0].message.splitlines()[0]
            self.problems.append(Problem("hydra.sweep.dir", text, "hydra.sweep.dir=FOLDER"))
            return ""
        taken = "is a file" if folder.is_file() else "holds a run" if (folder / "config.yaml").is_file() else None
        if taken is not None:
            self.problems.append(Problem("hydra.sweep.dir", f"{folder} {taken}", "another folder: trials lie below it"))
        return str(folder)

    def single_trial(self, texts: list[str], master: Tree) -> RunConfig:
        """One trial: the overrides of the command line and of the grid as one line."""
        given, groups = self.understood(texts, multirun=False)
        handed, problems = hydra_tree.canonical(given, groups)
        self.problems.extend(problems)
        if problems:
            given, handed = self.without_wrong_options(given, groups)
        tree = hydra_tree.compose(self.hydra, handed, given, RunMode.RUN)
        tree.values["sweep"] = sweep.default_settings()  # what chose the trial is no part of it
        if tree.params != master.params:
            self.problems.append(
                Problem("hydra.sweeper.params", "a swept option brings a grid of its own", "sweep one study at a time")
            )
        if isinstance(tree.values.get("train"), dict) and tree.values["train"].get("resume") is not None:
            self.problems.append(
                Problem(
                    "train.resume", "every trial would go on in one folder", "hydra.sweep.dir=FOLDER takes up a sweep"
                )
            )
        if tree.origins["run.dir"].default is False:
            self.problems.append(Problem("run.dir", "every trial would share it", "hydra.sweep.dir=FOLDER"))
        config = self.checked(tree, given, groups)
        if not self.problems and launch_rules.talks(config):
            way = "generate.prompts_file=FILE"
            self.problems.append(
                Problem("generate.prompts_file", "is null, and trials share no terminal to chat at", way)
            )
        return config


def _param(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _drop_alternatives(tree: Tree) -> None:
    for given, default in ALTERNATIVES:
        section, name = given.split(".")
        values = tree.values.get(section)
        if not isinstance(values, dict) or values.get(name) is None or default.split(".")[1] not in values:
            continue
        first, second = tree.origins.get(given), tree.origins.get(default)
        if first is not None and second is not None and not first.default and second.default:
            values[default.split(".")[1]] = None


def _through(key: str, tree: Tree) -> str:
    """``: ${method.lr}, set by conf/method/lora.yaml`` for a key that repeats another one's value."""
    target = re.fullmatch(r"\$\{([\w.]+)\}", tree.interpolated.get(key, ""))
    if target is None or target[1] not in tree.origins:
        return ""
    return f": {target[0]}, set by {tree.origins[target[1]].words}{_through(target[1], tree)}"


def _unchosen_hooks(tree: Tree) -> Iterator[Problem]:
    """Keys of an eval hook that no option file brought: its other keys are missing, which would say the wrong thing."""
    hooks = tree.values.get("eval")
    if not isinstance(hooks, dict):
        return
    for name in [name for name, settings in hooks.items() if isinstance(settings, dict)]:
        leaves = flatten({name: hooks[name]}, "eval")
        if registry.known("eval", name) and not tree.in_files.intersection(leaves):
            others = ",".join([*(other for other in hooks if other not in (name, "batch_size")), name])
            del hooks[name]
            yield Problem(next(iter(leaves)), f"the hook {name} is not chosen", f"eval=[{others}]")


def _without_echoes(problems: Iterable[Problem], tree: Tree) -> Iterator[Problem]:
    """Leave out problems of a key that only repeats another key's value (``${method.lr}``)."""
    problems = list(problems)
    wrong = {problem.where for problem in problems}
    for problem in problems:
        target = re.fullmatch(r"\$\{([\w.]+)\}", tree.interpolated.get(problem.where, ""))
        if target is None or target[1] not in wrong:
            yield problem


def _caused_here(tree: Tree, wrong: set[str]) -> Iterator[Problem]:
    """Leave out what cannot be resolved only since the section that it reads is no section, or has no name."""
    for problem in tree.problems:
        read = re.findall(r"\$\{(\w+)\.", tree.interpolated.get(problem.where, ""))
        if not any(section in wrong or f"{section}.name" in wrong for section in read):
            yield problem


def _chosen(tree: Tree, given: list[Given], groups: Groups) -> dict[str, str]:
    """Groups whose option the user chose, with where: by name, or through a file of theirs."""
    named = {one.key: f"{one.key}={one.value_text} on the command line" for one in given if groups.exists(one.key)}
    other = {
        group: f"{group}={option}"
        for group, option in tree.choices.items()
        if group in groups.defaults and option != groups.defaults[group] and group not in named
    }
    return {**other, **named}


def _explicit(tree: Tree) -> frozenset[str]:
    """Keys whose values the user set by themselves, not through the choice of an option."""
    return frozenset(key for key, origin in tree.origins.items() if not origin.default)


def _echoes(tree: Tree, keys: frozenset[str]) -> frozenset[str]:
    """Keys that repeat one of ``keys`` (``${method.lr}``)."""
    found = ((key, re.fullmatch(r"\$\{([\w.]+)\}", text)) for key, text in tree.interpolated.items())
    return frozenset(key for key, match in found if match is not None and match[1] in keys)


def _told(problems: Iterable[Problem], tree: Tree) -> Iterator[Problem]:
    """Rules know only values: add where the value came from, where the user set it."""
    for problem in problems:
        origin: Origin | None = tree.origins.get(problem.where)
        if origin is None or (origin.default and origin.words.startswith("conf/")):
            yield problem
        else:
            yield dataclasses.replace(problem, message=f"{problem.message} (from {origin.words})")
