"""Generated from the schema: hundreds of wrong configurations, each refused with the right key; a hundred right ones.

Every mutation is one that somebody makes by hand. The seeds vary what is hit, not how often it is right.
"""

from __future__ import annotations

import json
import random
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glmexp.config import registry
from glmexp.config.ds_config import TABLE
from glmexp.config.ds_rules import NVME_KEYS, ZERO_STAGES
from glmexp.config.explain import _arms, _bounds, _kinds, hint_of
from glmexp.config.load import flatten
from glmexp.config.nearest import ELSEWHERE, keys, shipped_options
from tests.config.helpers import config, ds_file, rows_file
from tests.config.lab import Composed, Lab, lab
from tests.config.test_typos import misspelt

PER_OPERATOR = 40
CONFIG = config()
SECTIONS = (
    "zero",
    "offload",
    "precision",
    "optim",
    "train",
    "data",
    "model",
    "method",
    "eval",
    "launcher",
    "slurm",
    "run",
)
KEYS = sorted(
    key
    for key, options in keys().items()
    if key.split(".")[0] in SECTIONS and (not options or {"method=lora", "eval=loss", "eval=generate"} & set(options))
)
NUMBERS = [key for key in KEYS if set(_kinds(hint_of(key, CONFIG)[0])) & {int, float}]
SWITCHES = [key for key in KEYS if bool in _kinds(hint_of(key, CONFIG)[0])]
WORDS = [key for key in KEYS if any(typing.get_origin(arm) is typing.Literal for arm in _arms(hint_of(key, CONFIG)[0]))]

Mutant = tuple[tuple[str, ...], dict[str, Any], list[str]]
"""Words that Hydra composes, values on top of them, and parts of the report that must be there."""
Operator = Callable[[random.Random, Path], Mutant]


def misspelt_key(dice: random.Random, folder: Path) -> Mutant:
    while True:
        key = dice.choice(KEYS)
        wrong = misspelt(key, dice.randrange(10_000))
        whole = wrong.count(".") == key.count(".") and wrong.split(".")[0] == key.split(".")[0]
        if wrong not in keys() and whole and key != "zero.stage":  # which is answered with an option: zero=stage2
            # A value that names an option is answered with the option.
            return (), {wrong: 1}, [wrong, "zero=stage1" if key == "zero.stage" else key]


def wrong_group(dice: random.Random, folder: Path) -> Mutant:
    """A key with a name of its own, in a section that has none of that name."""
    leaves = [key.rsplit(".", 1)[-1] for key in keys()]
    while True:
        key = dice.choice(KEYS)
        leaf = key.rsplit(".", 1)[-1]
        wrong = f"{dice.choice(['zero', 'train', 'optim', 'precision', 'offload', 'launcher'])}.{leaf}"
        if leaves.count(leaf) == 1 and wrong not in keys() and key.count(".") == 1 and key != "zero.stage":
            return (), {wrong: 1}, [wrong, key]


def stale_name(dice: random.Random, folder: Path) -> Mutant:
    """What the same thing is called in other trainers and older releases."""
    name, key = dice.choice(sorted(ELSEWHERE.items()))
    wrong = f"{dice.choice(['train', 'optim', 'method', 'data'])}.{name}"
    return (), {wrong: 1}, [wrong, key]


def wrong_type(dice: random.Random, folder: Path) -> Mutant:
    if dice.random() < 0.3:
        key = dice.choice(SWITCHES)
        return (), {key: dice.choice(["yes", 1, "on", [True], 0.5])}, [f"{key}: ", "true or false"]
    if dice.random() < 0.3:
        key = dice.choice(WORDS)
        return (), {key: dice.choice(["nosuchword", 7, ["x"]])}, [f"{key}: ", "one of "]
    key = dice.choice(NUMBERS)
    return (), {key: dice.choice(["many", True, [1], {"a": 1}, "1.2.3", float("nan")])}, [f"{key}: ", "number"]


def wrong_unit(dice: random.Random, folder: Path) -> Mutant:
    """A number with its unit written out, or -1 for off, as elsewhere."""
    key = dice.choice(NUMBERS)
    return (), {key: dice.choice(["200MB", "5e8B", "1k", "10%", "3 steps", "16 GiB", "2h"])}, [f"{key}: ", "number"]


def out_of_range(dice: random.Random, folder: Path) -> Mutant:
    while True:
        key = dice.choice(NUMBERS)
        bounds = [
            bound for bound in _bounds(hint_of(key, CONFIG)[0]) if bound.low is not None or bound.above is not None
        ]
        if bounds:
            lowest = bounds[0].low if bounds[0].low is not None else bounds[0].above
            assert lowest is not None
            return (), {key: lowest - dice.choice([1, 2, 100])}, [f"{key}: ", "number"]


def without_effect(dice: random.Random, folder: Path) -> Mutant:
    """A key of another ZeRO stage, of an offload that is off, of a number format that is not chosen."""
    kind = dice.randrange(3)
    if kind == 0:
        key, stages = dice.choice(sorted(ZERO_STAGES.items()))
        stage = dice.choice([stage for stage in range(4) if stage not in stages])
        if key == "zero_hpz_partition_size":
            value: Any = 2
        else:
            value = (
                ["Block"] if key == "leaf_modules" else True if bool in _kinds(hint_of(f"zero.{key}", CONFIG)[0]) else 9
            )
        return (f"zero=stage{stage}",), {f"zero.{key}": value}, [f"zero.{key}: without effect", f"stage is {stage}"]
    if kind == 1:
        key = dice.choice([*NVME_KEYS, "adam", "pin_memory"])
        text = {"nvme_path": "/disk", "adam": "torch"}
        value = text.get(key, True if bool in _kinds(hint_of(f"offload.{key}", CONFIG)[0]) else 9)
        return ("offload=none",), {f"offload.{key}": value}, [f"offload.{key}: ", "without effect"]
    key = dice.choice(["loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"])
    return (f"precision={dice.choice(['bf16', 'fp32'])}",), {f"precision.{key}": 4}, [f"precision.{key}: only fp16 has"]


def contradicting(dice: random.Random, folder: Path) -> Mutant:
    micro, accum, ranks = dice.choice([2, 3, 5]), dice.choice([2, 4, 7]), 2
    cases: list[Mutant] = [
        (
            (),
            {"train.micro_batch_size": micro, "train.grad_accum": accum, "train.batch_size": micro * accum * ranks + 1},
            ["train.batch_size", f"{micro} x {accum} x {ranks} = {micro * accum * ranks}"],
        ),
        ((), {"optim.warmup_steps": 3, "optim.warmup_ratio": 0.1}, ["optim.warmup_steps: 3", "both say"]),
        ((), {"optim.warmup_steps": micro * 100, "train.max_steps": micro}, [f"train.max_steps={micro}"]),
        (("zero=stage0",), {"offload.optimizer": "cpu"}, ["offload.optimizer", "the stage is 0"]),
        (("zero=stage2",), {"offload.params": "cpu"}, ["offload.params", "needs ZeRO stage 3"]),
        (("zero=stage2",), {"offload.optimizer": "nvme", "offload.nvme_path": "/d"}, ["offload.optimizer", "stage 3"]),
        (("zero=stage3",), {"offload.params": "nvme"}, ["offload.nvme_path", "is null"]),
        (("zero=stage3",), {"zero.zero_hpz_partition_size": 3}, ["zero.zero_hpz_partition_size", "do not divide"]),
        (("method=freeze",), {"method.num_layers": 2, "method.patterns": ["a"]}, ["method.num_layers", "both say"]),
        ((), {"train.epochs": None, "train.max_steps": None}, ["train.epochs", "never end"]),
        ((), {"artifact.path": str(folder)}, ["artifact.path", "starts from the base model"]),
        ((), {"launcher.nproc": 99}, ["launcher.nproc", "99 ranks on 8 GPUs"]),
        (("precision=fp16",), {"precision.loss_scale": 8, "precision.hysteresis": 3}, ["precision.hysteresis"]),
    ]
    return dice.choice(cases)


def misplaced_in_file(dice: random.Random, folder: Path) -> Mutant:
    """A DeepSpeed key one level too high, too low, or in a neighbour."""
    rows = [row.path for row in TABLE]
    leaves = [path.rsplit(".", 1)[-1] for path in rows]
    while True:
        path = dice.choice([*rows, "zero_optimization.stage3_gather_16bit_weights_on_model_save"])
        leaf = path.rsplit(".", 1)[-1]
        place = dice.choice(["", "zero_optimization.", "zero_optimization.offload_param.", "fp16.", "aio."])
        wrong = f"{place}{leaf}"
        if leaves.count(leaf) <= 1 and wrong not in rows and wrong != path and leaf != "enabled":
            return (), {"deepspeed.config_file": _json(folder, {wrong: 1})}, [wrong, "wrong place", path]


def misspelt_in_file(dice: random.Random, folder: Path) -> Mutant:
    rows = [row.path for row in TABLE]
    while True:
        path = dice.choice(rows)
        wrong = misspelt(path, dice.randrange(10_000))
        if wrong not in rows and wrong.count(".") == path.count("."):
            return (), {"deepspeed.config_file": _json(folder, {wrong: 1})}, [f"{wrong}: ", path]


def in_both_places(dice: random.Random, folder: Path) -> Mutant:
    """An option and the file disagree."""
    values = {
        "optim.max_grad_norm": ("gradient_clipping", 0.5, 2.0),
        "train.micro_batch_size": ("train_micro_batch_size_per_gpu", 2, 4),
        "train.grad_accum": ("gradient_accumulation_steps", 2, 4),
        "zero.reduce_bucket_size": ("zero_optimization.reduce_bucket_size", "5e8", 7),
        "zero.allgather_bucket_size": ("zero_optimization.allgather_bucket_size", 5e8, 9),
        "zero.overlap_comm": ("zero_optimization.overlap_comm", False, True),
        "zero.communication_data_type": ("communication_data_type", "fp32", "bf16"),
        "optim.lr": ("optimizer.params.lr", "3e-5", 1e-3),
        "optim.betas": ("optimizer.params.betas", [0.8, 0.9], [0.9, 0.95]),
        "optim.weight_decay": ("optimizer.params.weight_decay", 0.1, 0.0),
        "optim.warmup_steps": ("scheduler.params.warmup_num_steps", 100, 5),
        "train.max_steps": ("scheduler.params.total_num_steps", 50, 500),
        "offload.optimizer": ("zero_optimization.offload_optimizer.device", "none", "cpu"),
    }
    key = dice.choice(sorted(values))
    path, in_file, in_option = values[key]
    file = _json(folder, {path: in_file})
    return (), {key: in_option, "deepspeed.config_file": file}, [f"{key}: ", "contradicts", path]


def silent_in_deepspeed(dice: random.Random, folder: Path) -> Mutant:
    """What DeepSpeed itself accepts without a word."""
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"gradient_cliping": 1.0}, ["gradient_cliping: ", "did you mean gradient_clipping?"]),
        (
            {"stage3_gather_16bit_weights_on_model_save": True},
            ["wrong place", "zero_optimization.stage3_gather_16bit_weights_on_model_save"],
        ),
        ({"gradient_clipping": "auto"}, ["gradient_clipping: 'auto'", "optim.max_grad_norm"]),
        (
            {"zero_optimization.stage": 2, "zero_optimization.offload_param.device": "cpu"},
            ["offload.params", "needs ZeRO stage 3", "zero_optimization.offload_param.device"],
        ),
        (
            {"zero_optimization.offload_params.device": "cpu"},
            ["did you mean zero_optimization.offload_param.device?"],
        ),
        ({"fp16.enabled": True, "bf16.enabled": True}, ["fp16.enabled and bf16.enabled"]),
        (
            {"scheduler.type": "WarmupDecayLR", "scheduler.params.warmup_num_steps": 5},
            ["scheduler.params.total_num_steps", "is missing"],
        ),
    ]
    content, parts = dice.choice(cases)
    return (), {"deepspeed.config_file": _json(folder, content)}, parts


def _json(folder: Path, flat: dict[str, Any]) -> str:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split(".")
        place = tree
        for part in folders:
            place = place.setdefault(part, {})
        place[name] = value
    return ds_file(folder / f"{abs(hash(json.dumps(flat)))}.json", tree)


OPERATORS: tuple[Operator, ...] = (
    misspelt_key,
    wrong_group,
    stale_name,
    wrong_type,
    wrong_unit,
    out_of_range,
    without_effect,
    contradicting,
    misplaced_in_file,
    misspelt_in_file,
    in_both_places,
    silent_in_deepspeed,
)


@pytest.fixture(scope="module")
def here() -> Iterator[Lab]:
    with lab() as one:
        yield one


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_a_mutated_configuration_is_refused_with_the_right_key(operator: Operator, here: Lab, tmp_path: Path) -> None:
    seen = set()
    for seed in range(PER_OPERATOR):
        words, values, parts = operator(random.Random(f"{operator.__name__} {seed}"), tmp_path)
        report = here.composed(*words).report(values)
        assert report, f"seed {seed}: {words} {values} was not refused"
        for part in parts:
            assert part in report, f"seed {seed}: {words} {values}\n{report}"
        seen.add((words, str(values)))
    assert len(seen) >= 5, "the seeds vary what is mutated"


def test_there_are_enough_mutants() -> None:
    assert len(OPERATORS) >= 8
    assert len(OPERATORS) * PER_OPERATOR >= 300


GROUPS = [group for group in shipped_options() if group != "experiments"]
EXTRA = {
    "entry=export": {"artifact.path": "{folder}"},
    "entry=doctor": {"doctor.explain": "zero.stage"},
    "launcher=slurm": {"slurm.gpus_per_node": "8"},  # fp16 asks for a GPU
    "entry=generate": {"generate.prompts_file": "builtin:prompts.jsonl"},
    "launcher=env": {"launcher.name": "local"},  # an outside launcher's world has a test of its own
    "entry=evaluate": {"data.eval_file": "{folder}/rows.jsonl"},
    "offload=nvme": {"offload.nvme_path": "{folder}"},
}
VALUES: dict[str, tuple[Any, ...]] = {
    "zero.reduce_bucket_size": (1000, "5e8", 5e7),
    "zero.overlap_comm": (True, False),
    "zero.communication_data_type": (None, "fp32"),
    "optim.lr": (1e-3, "1e-5"),
    "optim.weight_decay": (0, 0.1),
    "optim.schedule": ("cosine", "linear", "constant"),
    "optim.max_grad_norm": (None, 1, "0.5"),
    "train.micro_batch_size": (None, 1, 4),
    "train.grad_accum": (None, 2),
    "train.max_steps": (8, "100"),
    "train.seed": (0, 7),
    "train.save_steps": (None, 2),
    "run.name": ("a", "测试-1"),
    "eval.batch_size": (1, 32),
}
TREES, PER_TREE = 10, 10
OFFLOADS = ("none", "none", "optimizer", "all", "none", "optimizer", "none", "nvme", "none", "none")
"""Beside the stages 0, 1, 2, 3, 0, ...: an offload that the stage can do."""

PLACEMENTS = {"evaluate": "tensor_parallel", "bench": "layers"}
"""Of entries that ask a model; layers have one rank."""


def _words(number: int) -> tuple[str, ...]:
    """The ``number``-th option of every group, made to fit one another."""
    options = shipped_options()
    chosen = {group: options[group][number % len(options[group])] for group in GROUPS}
    chosen["offload"] = OFFLOADS[number]
    if chosen["method"] == "ptuning" and chosen["gather"] == "full16":
        chosen["gather"] = "trainable"
    if chosen["entry"] == "evaluate" and chosen["eval"] == "none":
        chosen["eval"] = "loss"
    if chosen["entry"] == "export" and chosen["method"] == "ptuning":
        chosen["method"] = "lora"
    if chosen["launcher"] == "slurm" and chosen["precision"] == "fp16":  # a job that asks for no GPU
        chosen["precision"] = "fp32"
    chosen["placement"] = PLACEMENTS.get(chosen["entry"], "single")
    return tuple(f"{group}={option}" for group, option in chosen.items())


def test_no_valid_configuration_from_every_group_is_refused(here: Lab, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl")
    (tmp_path / "latest").touch()  # artifact.path: of a DeepSpeed checkpoint
    used = set()
    for number in range(TREES):
        words = _words(number)
        used.update(words)
        extra = {key: value.format(folder=tmp_path) for word in words for key, value in EXTRA.get(word, {}).items()}
        tree: Composed = here.composed(*words)
        for seed in range(PER_TREE):
            dice = random.Random(f"{number} {seed}")
            drawn = {key: dice.choice(VALUES[key]) for key in dice.sample(sorted(VALUES), 5)}
            if "zero=stage0" in words:
                drawn.pop("zero.reduce_bucket_size", None)
                drawn.pop("zero.overlap_comm", None)
            ranks = 1 if {"launcher=inprocess", "placement=layers"} & set(words) else 2
            report = tree.report({"data.train_file": rows, **extra, **drawn}, ranks=ranks)
            assert report == "", f"{words} {drawn}"
    for group in GROUPS:
        missing = [option for option in shipped_options()[group] if f"{group}={option}" not in used]
        assert not missing or len(shipped_options()[group]) > TREES, f"{group}: {missing} never drawn"


def test_every_option_of_the_schema_is_among_what_is_mutated() -> None:
    """The generators read the schema: a section that is added shows here."""
    assert {key.split(".")[0] for key in KEYS} == set(SECTIONS)
    assert set(SECTIONS) <= set(flatten(dict.fromkeys(typing.get_type_hints(type(CONFIG)), 1)))
    assert len(NUMBERS) > 40
    assert registry.names("method")
