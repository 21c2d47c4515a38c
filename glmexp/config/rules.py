"""What single values cannot show: contradictions across groups and keys without effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from glmexp.config import (
    artifact_rules,
    data_rules,
    ds_rules,
    export_rules,
    generate_rules,
    inference_rules,
    launch_rules,
    model_rules,
    sweep,
    trainer_rules,
)
from glmexp.config.derived import batch_numbers
from glmexp.config.ds_config import cuts_blocks
from glmexp.config.entries import GOES_ON, OWN, PLANS, TRAINS, readers, reads
from glmexp.config.errors import Problem
from glmexp.config.facts import Facts as Facts
from glmexp.config.families import FAMILIES
from glmexp.config.inherit import AUTO, best_trial
from glmexp.config.load import UnusableValueError
from glmexp.config.quoting import typed
from glmexp.config.schema import RunConfig

Rule = Callable[[RunConfig, Facts], Iterator[Problem]]


def check(
    config: RunConfig, ranks: int, gpus: int, explicit: Collection[str] = (), cores: int | None = None
) -> list[Problem]:
    """Every contradiction in ``config`` for that many ranks on a machine with that many GPUs and cores."""
    facts = Facts(ranks, gpus, frozenset(explicit), cores)
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems.extend(rule(config, facts))
        except UnusableValueError:  # a value that the rule needs is a problem of its own and reported as such
            continue
    return problems


def warnings(config: RunConfig, explicit: Collection[str] = ()) -> list[str]:
    """What is allowed and may still surprise, each with the key in question."""
    found = []
    if config.entry.name in PLANS:
        if config.eval.hooks and config.data.eval_file is None and config.data.holdout is None:
            hooks = ", ".join(config.eval.hooks)
            found.append(f"eval: no held-out rows, so {hooks} will not run; data.eval_file=FILE or data.holdout=ROWS")
        save, last = config.train.save_steps, config.train.max_steps
        if last is not None and config.train.epochs is not None and "train.epochs" in explicit:
            found.append(f"train.epochs: without effect, train.max_steps={last} decides")
        if save is not None and last is not None and save > last:
            found.append(f"train.save_steps: {save} is never reached in {last} steps; no checkpoint will be written")
        found += ds_rules.fetching(config, explicit) + ds_rules.gathering(config, explicit)
    elif config.entry.name not in ("doctor", "generate"):  # the first only tells about them
        unused = sorted(key for key in explicit if not reads(config.entry.name, key))
        if unused:
            found.append(f"{', '.join(unused)}: without effect under entry={config.entry.name}")
    return found + generate_rules.without_effect(config, explicit)


def _batches(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    if config.entry.name in PLANS:
        numbers = batch_numbers(config, facts.ranks)
        if isinstance(numbers, Problem):
            yield numbers


def _method(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    rule = {"lora": _lora, "freeze": _freeze, "ptuning": _ptuning}.get(config.method.name)
    if rule is not None:
        yield from rule(config, facts)


def _lora(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    targets = config.method.target_modules
    if targets is None:
        return
    names = FAMILIES[config.model.family].linear_modules
    unmatched = [target for target in targets if target.rsplit(".", 1)[-1] not in names]
    if unmatched or not targets:
        what = f"{', '.join(unmatched)} matches no linear layer of {config.model.family}" if unmatched else "is empty"
        yield Problem("method.target_modules", what, f"names that exist: {', '.join(names)}")


def _freeze(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    layers, patterns = config.method.num_layers, config.method.patterns
    if layers is not None and patterns is not None:
        yield Problem(
            "method.num_layers",
            f"{layers} and patterns={patterns} both say what is trained",
            "give one of them; method.num_layers=null or method.patterns=null",
        )
    if layers is None and not patterns:
        yield Problem("method.num_layers", "nothing is trained", "method.num_layers=1 or method.patterns=[...]")
    for pattern in patterns or []:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem("method.patterns", f"{pattern!r} is no regular expression: {error}")


def _ptuning(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    family = config.model.family
    if FAMILIES[family].native_prefix:
        return
    if config.train.gradient_checkpointing:
        yield Problem(
            "train.gradient_checkpointing",
            f"method=ptuning on {family} needs the key-value cache for its prefix, and transformers drops the cache "
            "under gradient checkpointing",
            "train.gradient_checkpointing=false, or method=lora",
        )
    if config.gather.name == "full16":
        yield Problem(
            "gather.name",
            f"full16 has nothing to write with method=ptuning on {family}: a prefix cannot be merged into the weights",
            "gather=trainable",
        )


def _compiled_blocks(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    leaves = config.zero.leaf_modules and config.zero.memory_efficient_linear is False
    if config.train.compile and cuts_blocks(config) and not leaves:
        yield Problem(
            "train.compile",
            "true, but with these keys zero=stage3 fetches weights in hooks on every module, or linear layers are "
            "DeepSpeed's: both cut each block's graph into pieces",
            "train.compile=null, or blocks as one piece (zero.whole_blocks=true, no other way to fetch them, "
            "zero.memory_efficient_linear=null), or zero.leaf_modules=[the class of a block] with "
            "zero.memory_efficient_linear=false",
        )


def _betas(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    optim = config.optim
    if len(optim.betas) != 2:
        yield Problem("optim.betas", f"{optim.betas} is not two numbers", "optim.betas=[0.9,0.999]")


def _warmup(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    optim, train = config.optim, config.train
    if optim.warmup_steps is not None and optim.warmup_ratio is not None:
        yield Problem(
            "optim.warmup_steps",
            f"{optim.warmup_steps} and warmup_ratio={optim.warmup_ratio:g} both say how long the warm-up is",
            "give one of them; the other one null",
        )
    if train.max_steps is not None and optim.warmup_steps is not None and optim.warmup_steps > train.max_steps:
        yield Problem(
            "optim.warmup_steps",
            f"{optim.warmup_steps} steps of warm-up in a run of train.max_steps={train.max_steps}",
            f"optim.warmup_steps={train.max_steps // 10} or a longer run",
        )


def _length(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    train = config.train
    if train.epochs is None and train.max_steps is None:
        yield Problem("train.epochs", "epochs and max_steps are both null: training would never end", "give one")
    if train.save_steps is None and "train.keep_checkpoints" in facts.explicit:
        yield Problem("train.keep_checkpoints", "without effect: train.save_steps is null", "train.save_steps=100")
    yield from _keep_best(config, facts)
    if train.stop_after is not None and train.max_steps is not None and train.stop_after > train.max_steps:
        yield Problem(
            "train.stop_after",
            f"step {train.stop_after} is never reached: the run ends at train.max_steps={train.max_steps}",
            "leave it out, or a smaller one",
        )


def _keep_best(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """A best checkpoint needs a metric that is measured where checkpoints are written."""
    train, metric = config.train, config.train.keep_best
    if metric is None:
        if "train.keep_best_mode" in facts.explicit:
            yield Problem("train.keep_best_mode", "without effect: train.keep_best is null", "train.keep_best=METRIC")
        return
    if train.save_steps is None:
        yield Problem("train.keep_best", "without effect: train.save_steps is null", "train.save_steps=100")
        return
    _, _, rest = metric.partition("eval/")
    hook = config.eval.hooks.get(rest.partition("/")[0])
    if not metric.startswith("eval/") or hook is None:
        names = ", ".join(f"eval/{name}/..." for name in config.eval.hooks) or "none, eval=[loss] has eval/loss/loss"
        yield Problem("train.keep_best", f"{metric!r} is no metric of a chosen hook", f"metrics: {names}")
    elif hook.every is None or (hook.every % train.save_steps and train.save_steps % hook.every):
        name = rest.partition("/")[0]
        yield Problem(
            "train.keep_best",
            f"{metric} is measured every {hook.every or 'no'} steps, checkpoints are written every {train.save_steps}: "
            "they need steps in common",
            f"eval.{name}.every={train.save_steps}",
        )


def _model(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    yield from model_rules.path(config.model)
    yield from model_rules.folder(config)
    yield from model_rules.length(config)
    yield from model_rules.pad_token(config.model)
    yield from model_rules.without_effect(config.model, facts.explicit)
    yield from model_rules.sizes(config.model, config.data.max_length)
    yield from model_rules.attention(config, facts.explicit)


def _run(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    run, resume = config.run, config.train.resume
    if not run.name or run.name in (".", "..") or re.search(r'[/\\:*?"<>|\x00-\x1f]', run.name) or len(run.name) > 150:
        yield Problem("run.name", f"{run.name!r} is no plain folder name", "letters, digits, - _ . and no slash")
    if run.dir is not None and resume not in (None, AUTO):
        yield Problem("run.dir", "train.resume goes on in the resumed run's own folder", "leave out run.dir")
    elif resume == AUTO and run.overwrite:
        yield Problem(
            "run.overwrite", "train.resume=auto goes on with what lies in the folder", "leave one of them out"
        )
    elif run.dir is not None:
        folder = Path(run.dir).expanduser()
        if folder.exists() and not folder.is_dir():
            yield Problem("run.dir", f"{run.dir} is a file", "name a folder")
        elif (folder / "sweep.json").exists():
            yield Problem("run.dir", f"{run.dir} holds a sweep", "another folder: a run in it would hide the sweep")
        elif (folder / "config.yaml").exists() and not run.overwrite and resume != AUTO:
            yield Problem(
                "run.dir",
                f"{run.dir} already holds a run",
                "another folder, run.overwrite=true to replace it, or "
                f"{typed('train.resume', run.dir)} to go on with it",
            )
    elif run.overwrite:
        yield Problem("run.overwrite", "without effect: without run.dir each run has a new folder", "run.dir=FOLDER")


def _entry(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    entry, artifact, resume = config.entry.name, config.artifact.path, config.train.resume
    if entry in TRAINS and artifact is not None:
        yield Problem(
            "artifact.path",
            f"entry={entry} starts from the base model, not from an artifact",
            "entry=evaluate to measure it, or train.resume=RUN to go on with a run",
        )
    elif artifact is not None and not Path(artifact).expanduser().is_dir():
        yield Problem("artifact.path", f"{artifact} is no folder", "name a run folder or its artifact/")
    elif artifact is not None and (best := best_trial(Path(artifact))) is not None:
        yield Problem("artifact.path", f"{artifact} is a sweep, not a run", f"one of its trials, the best: {best}")
    for key in sorted(key for key in facts.explicit if "." in key and key.split(".")[0] in OWN):
        if not reads(entry, key):
            ways = ", ".join(f"entry={name}" for name in readers(key) or ())
            yield Problem(key, f"without effect under entry={entry}", f"leave it out, or {ways}")
    if entry == "evaluate" and not config.eval.hooks:
        yield Problem("eval", "no hook is chosen, and entry=evaluate runs nothing else", "eval=[loss,generate]")
    if resume is not None and entry not in GOES_ON:
        yield Problem("train.resume", f"without effect under entry={entry}", "leave it out, or entry=train")
    elif resume not in (None, AUTO) and not Path(str(resume)).expanduser().is_dir():
        yield Problem("train.resume", f"{resume} is no folder", "name a run folder or a checkpoint in it, or auto")
    elif resume not in (None, AUTO) and entry == "train":
        yield from _checkpoints(Path(str(resume)).expanduser().absolute(), config.train.max_steps)


def _checkpoints(start: Path, last: int | None) -> Iterator[Problem]:
    """A run folder that has nothing to go on from, or has gone beyond the run's ``last`` step. Whether a checkpoint is
    whole is seen when it is read."""
    for folder in (start, *start.parents):
        if (folder / "config.yaml").is_file():
            named = [start] if start.parent == folder / "checkpoints" else (folder / "checkpoints").glob("step-*")
            steps = [int(one.name[5:]) for one in named if one.name[5:].isdecimal()]
            if steps and last is not None and max(steps) > last:
                yield Problem(
                    "train.max_steps",
                    f"{last}, and the newest checkpoint to go on from has {max(steps)} steps behind it",
                    f"{max(steps)} or more, or train.resume=FOLDER/checkpoints/step-<n> of an earlier one",
                )
            if not any((folder / "checkpoints").glob("step-*")):
                yield Problem(
                    "train.resume",
                    f"{folder} holds no checkpoint: there is no checkpoints/step-<n> in it",
                    "runs write them with train.save_steps=N; a run that has none begins anew",
                )
            return


RULES: tuple[Rule, ...] = (
    _batches,
    ds_rules.fp16,
    ds_rules.fp8,
    ds_rules.offload,
    ds_rules.nvme,
    ds_rules.zero,
    ds_rules.zero_pairs,
    ds_rules.whole_blocks,
    ds_rules.zero_plus_plus,
    _method,
    _compiled_blocks,
    _betas,
    _warmup,
    _length,
    launch_rules.ranks,
    launch_rules.nodes,
    launch_rules.slurm,
    sweep.slots,
    data_rules.files,
    data_rules.without_effect,
    data_rules.prompts,
    _model,
    _run,
    _entry,
    artifact_rules.check,
    export_rules.check,
    generate_rules.check,
    inference_rules.check,
    trainer_rules.check,
)
