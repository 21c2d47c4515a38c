"""The user's own DeepSpeed JSON: every key is mapped to an option, or refused by name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glmexp.config.ds_config import OPTIMIZER, PARAMS, TABLE, ZERO
from glmexp.config.ds_rules import SCALE_KEYS
from glmexp.config.errors import ConfigError, Problem
from glmexp.config.hydra_tree import COMMAND_LINE, Origin, Tree
from glmexp.config.load import flatten, shown
from glmexp.config.nearest import nearest

ADAMW = "optimizer.params"
WARMUP = "scheduler.params"
MORE_ROWS = {
    f"{ADAMW}.lr": "optim.lr",
    f"{ADAMW}.betas": "optim.betas",
    f"{ADAMW}.eps": "optim.eps",
    f"{ADAMW}.weight_decay": "optim.weight_decay",
    f"{WARMUP}.warmup_max_lr": "optim.lr",
    f"{WARMUP}.warmup_num_steps": "optim.warmup_steps",
    f"{WARMUP}.total_num_steps": "train.max_steps",
}
"""Keys that are read and never written: the engine hands its own optimizer and schedule to DeepSpeed."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
OTHERS: dict[str, tuple[Any, ...]] = {
    "optimizer.params.torch_adam": (True, False),
    "optimizer.params.adam_w_mode": (True,),
    "optimizer.params.bias_correction": (True,),
    "optimizer.params.amsgrad": (False,),
    f"{WARMUP}.warmup_min_lr": (0,),
    f"{WARMUP}.warmup_type": ("linear",),
    f"{WARMUP}.warmup_min_ratio": (0,),
    f"{WARMUP}.cos_min_ratio": (0,),
    f"{ZERO}.allgather_partitions": (True,),
    f"{ZERO}.ignore_unused_parameters": (True,),
    f"{ZERO}.load_from_fp32_weights": (True,),
    f"{ZERO}.elastic_checkpoint": (False,),
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": (True, False),
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": (True, False),
    f"{ZERO}.zero_quantized_nontrainable_weights": (False,),
    f"{ZERO}.parameter_alignment": (False,),
    f"{ZERO}.compute_grad_norm": (True,),
    f"{OPTIMIZER}.fast_init": (False,),
    f"{OPTIMIZER}.ratio": (1,),
    "aio.use_gds": (False,),
    f"{OPTIMIZER}.buffer_count": (4,),
    "fp16.auto_cast": (False,),
    "fp16.consecutive_hysteresis": (False,),
    "amp.enabled": (False,),
    "prescale_gradients": (False,),
    "sparse_gradients": (False,),
    "memory_breakdown": (True, False),
    "dump_state": (True, False),
    "wall_clock_breakdown": (True, False),
    "timers.throughput.enabled": (True, False),
    "timers.throughput.synchronized": (True, False),
    "zero_allow_untested_optimizer": (True, False),
    "zero_force_ds_cpu_optimizer": (True, False),
    "flops_profiler.enabled": (False,),
    "comms_logger.enabled": (False,),
    "tensorboard.enabled": (False,),
    "wandb.enabled": (False,),
    "csv_monitor.enabled": (False,),
}
"""Keys without an option, and the values under which that makes no difference."""
ANY_VALUE = ("steps_per_print",)
BETTER = {
    "bfloat16.enabled": "bf16.enabled",
    f"{ZERO}.cpu_offload": f"{OPTIMIZER}.device",
    f"{ZERO}.cpu_offload_param": f"{PARAMS}.device",
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": "gather=full16",
}
NO_AUTO = {"gradient_clipping": "optim.max_grad_norm"}
"""Keys that DeepSpeed reads without a check: where nobody fills "auto" in, it goes on with the word."""
_AUTO = "auto"


@dataclass
class Raised:
    """A DeepSpeed JSON in terms of options."""

    file: str
    values: dict[str, Any] = field(default_factory=dict)
    """Option key to value, as the file has it; conversion comes with all other values."""
    paths: dict[str, str] = field(default_factory=dict)
    """Option key to the DeepSpeed path."""
    not_dtypes: dict[str, str] = field(default_factory=dict)
    """dtype that the file switches off, to the path that says so."""
    both_16bit: bool = False
    """fp16 and bf16 are both on."""
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def refuse(self, path: str, message: str, fix: str = "") -> None:
        """Note a problem at a DeepSpeed path of this file."""
        self.problems.append(Problem(f"{self.file}: {path}", message, fix))

    def put(self, key: str, value: Any, path: str) -> None:
        """Set an option's value; two paths of one option must agree."""
        if key in self.values and self.values[key] != value:
            self.refuse(
                path,
                f"{shown(value)} contradicts {self.paths[key]}: {shown(self.values[key])}; both are {key}",
                "give one of them",
            )
            return
        self.values[key] = value
        self.paths[key] = path

    def options(self, tree: Tree) -> list[str]:
        """Options that follow from the file where ``tree`` holds defaults: ``zero=stage3``, ``precision=fp16``."""
        chosen = []
        stage = self.values.get("zero.stage")
        if str(stage) in ("0", "1", "2", "3"):
            chosen.append(f"zero=stage{stage}")
        if "precision.dtype" in self.values:
            chosen.append(f"precision={self.values['precision.dtype']}")
        elif tree.values.get("precision", {}).get("dtype") in self.not_dtypes:
            chosen.append("precision=fp32")
        return chosen


def raise_file(path: Path) -> Raised:
    """Read a DeepSpeed JSON into options. Raises ConfigError where the file cannot be read as JSON at all."""
    raised = Raised(str(path))
    leaves = flatten(_read(path, raised))
    switches = {name: leaves.pop(f"{name}.enabled", None) for name in ("fp16", "bf16")}
    _raise_precision(raised, switches)
    _raise_optimizer_type(raised, leaves.pop("optimizer.type", None))
    _raise_schedule(raised, leaves)
    direct = {row.path: row.key for row in TABLE} | MORE_ROWS
    for ds_path, value in leaves.items():
        if ds_path in ("fp16", "bf16", "optimizer", "scheduler", ZERO, OPTIMIZER, PARAMS) and value in ({}, None):
            continue
        if ds_path in NO_AUTO and value == _AUTO:
            raised.refuse(
                ds_path,
                "'auto' is no number, and DeepSpeed would take it without a word",
                f"leave it out: {NO_AUTO[ds_path]} decides; or write the number",
            )
        elif ds_path in direct:
            if value is not None and value != _AUTO:
                _raise_value(raised, ds_path, direct[ds_path], value)
        else:
            _without_option(raised, ds_path, value, list(direct))
    return raised


def _read(path: Path, raised: Raised) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in sorted({name for name in names if names.count(name) > 1}):
            raised.refuse(name, "stands twice in the file", "leave one")
        return dict(pairs)

    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except OSError as error:
        raise ConfigError(
            Problem("deepspeed.config_file", f"cannot read {path}: {error.strerror}", "check the path")
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            Problem(f"{path}:{error.lineno}", f"is no valid JSON: {error.msg} at column {error.colno}", "correct it")
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(str(path), "is not UTF-8", "save it as UTF-8")) from error
    if not isinstance(tree, dict):
        raise ConfigError(Problem(str(path), "is no JSON object", "DeepSpeed's configuration is one object"))
    return tree


def _raise_precision(raised: Raised, switches: Mapping[str, Any]) -> None:
    on = [name for name, value in switches.items() if value in (True, "true")]
    off = [name for name, value in switches.items() if value in (False, "false")]
    for name, value in switches.items():
        if value not in (None, True, False, "true", "false", _AUTO):
            raised.refuse(f"{name}.enabled", f"{shown(value)} is not true, false or auto")
    raised.both_16bit = len(on) == 2
    if len(on) == 1:
        raised.put("precision.dtype", on[0], f"{on[0]}.enabled")
    elif len(off) == 2:
        raised.put("precision.dtype", "fp32", "bf16.enabled")
    raised.not_dtypes = {name: f"{name}.enabled" for name in off} if not on else {}


def _raise_optimizer_type(raised: Raised, kind: Any) -> None:
    if kind not in (None, _AUTO, "AdamW", "Adam"):
        raised.refuse("optimizer.type", f"{shown(kind)} is not there: glmexp trains with AdamW", "AdamW")


def _raise_schedule(raised: Raised, leaves: dict[str, Any]) -> None:
    kind = leaves.pop("scheduler.type", None)
    if kind in (None, _AUTO):
        return
    if kind not in SCHEDULES:
        raised.refuse("scheduler.type", f"{shown(kind)} is not there", f"one of {', '.join(SCHEDULES)}")
        return
    if kind != "WarmupLR" and f"{WARMUP}.total_num_steps" not in leaves:
        raised.refuse(
            f"{WARMUP}.total_num_steps",
            f"is missing, and {kind} decays until then",
            'the number of steps, or "auto": as many as the run has',
        )
    raised.put("optim.schedule", SCHEDULES[kind], "scheduler.type")
    raised.warnings.append(
        f"{raised.file}: scheduler.type={kind} became optim.schedule={SCHEDULES[kind]}: linear warm-up from 0, "
        "and down to 0 where it decays"
    )


def _raise_value(raised: Raised, path: str, key: str, value: Any) -> None:
    if path.endswith(".device"):
        if value not in ("cpu", "nvme", "none"):
            raised.refuse(path, f"{shown(value)} is not there", "cpu, nvme or none")
            return
        value = None if value == "none" else value
    if path == "gradient_clipping" and value in (0, "0"):
        value = None
    raised.put(key, value, path)


def _without_option(raised: Raised, path: str, value: Any, known: list[str]) -> None:
    if path in ANY_VALUE or (path in OTHERS and (value == _AUTO or value in OTHERS[path])):
        note = "glmexp has no option for it and goes on without"
        if path in BETTER:
            note = f"without effect: {BETTER[path]} decides"
        raised.warnings.append(f"{raised.file}: {path}: {note}")
        return
    if path in OTHERS:
        allowed = " or ".join(shown(one) for one in OTHERS[path])
        raised.refuse(path, f"{shown(value)} has no option here", f"leave it out, or {allowed}")
        return
    if path in BETTER:
        raised.refuse(path, "is an old name", f"did you mean {BETTER[path]}?")
        return
    guesses = nearest(path, [*known, *OTHERS, *ANY_VALUE, "fp16.enabled", "bf16.enabled", "optimizer.type"])
    leaf = path.rsplit(".", 1)[-1]
    misplaced = [guess for guess in guesses if guess.rsplit(".", 1)[-1] == leaf]
    alike = max(misplaced, key=lambda one: difflib.SequenceMatcher(None, path, one).ratio(), default="")
    if alike.count(".") == path.count(".") and difflib.SequenceMatcher(None, path, alike).ratio() > 0.9:
        raised.refuse(path, "is no key that glmexp maps to an option", f"did you mean {alike}?")
    elif misplaced:
        raised.refuse(path, "stands in the wrong place", f"it belongs to {' or '.join(misplaced)}")
    elif guesses:
        raised.refuse(path, "is no key that glmexp maps to an option", f"did you mean {' or '.join(guesses)}?")
    else:
        raised.refuse(path, "is no key that glmexp maps to an option", "leave it out")


def lay_over(tree: Tree, raised: Raised, explicit: Collection[str], chosen: Mapping[str, str]) -> list[Problem]:
    """Put the file's values into ``tree``: over defaults; where the user set the key too, they must be equal."""
    problems = [*_both_16bit(tree, raised, explicit, chosen)]
    loss_scale = tree.values.get("precision", {}).get("dtype") == "fp16"
    same: Callable[[Any, Any], bool] = lambda one, other: _number(one) == _number(other)  # noqa: E731
    for key, value in raised.values.items():
        section, name = key.split(".")
        values = tree.values.get(section)
        if not isinstance(values, dict) or name not in values:
            continue  # the walk reports what is missing
        if section == "precision" and name in SCALE_KEYS and not loss_scale:
            raised.warnings.append(f"{raised.file}: {raised.paths[key]}: without effect, the run is not in fp16")
            continue
        where = _where(key, tree, explicit, chosen)
        if where is not None and values[name] is not None and not same(values[name], value):
            problems.append(_contradiction(key, values[name], where, value, raised))
        elif where is None or values[name] is None:
            values[name] = value
            tree.interpolated.pop(key, None)
            tree.origins[key] = Origin(f"{raised.file}: {raised.paths[key]}", default=False)
    problems.extend(_switched_off(tree, raised, explicit, chosen))
    return problems


def _both_16bit(tree: Tree, raised: Raised, explicit: Collection[str], chosen: Mapping[str, str]) -> Iterator[Problem]:
    if raised.both_16bit:
        where = _where("precision.dtype", tree, explicit, chosen)
        preset = f", and {where} chooses one too" if where is not None else ""
        yield Problem(
            f"{raised.file}: fp16.enabled and bf16.enabled",
            f"both are true in this file{preset}: a run has one number format",
            "switch one off in the file, and say the same with precision=fp16 or precision=bf16",
        )


def _number(value: Any) -> Any:
    """Numbers in quotes and lists of them, as numbers."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _where(key: str, tree: Tree, explicit: Collection[str], chosen: Mapping[str, str]) -> str | None:
    """Where the user set the key; None: they did not."""
    if key in explicit:
        return tree.origins[key].words if not tree.origins[key].default else COMMAND_LINE
    return chosen.get(key.split(".")[0])


def _contradiction(key: str, value: Any, where: str, other: Any, raised: Raised) -> Problem:
    return Problem(
        key,
        f"{shown(value)} (from {where}) contradicts {shown(other)} (from {raised.file}: {raised.paths[key]})",
        "give it in one place, or the same value in both",
    )


def _switched_off(tree: Tree, raised: Raised, explicit: Collection[str], chosen: Mapping[str, str]) -> list[Problem]:
    section = tree.values.get("precision")
    if not isinstance(section, dict):
        return []
    dtype = section.get("dtype")
    if dtype not in raised.not_dtypes:
        return []
    where = _where("precision.dtype", tree, explicit, chosen) or "this project's default"
    return [
        Problem(
            "precision.dtype",
            f"{shown(dtype)} (from {where}) contradicts false (from {raised.file}: {raised.not_dtypes[dtype]})",
            "choose precision=... as the file says, or take the switch out of it",
        )
    ]
