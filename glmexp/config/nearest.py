"""Unknown names: the nearest right one, a right leaf in the wrong group, and names that other trainers use."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from functools import cache
from pathlib import Path
from typing import Any

from glmexp.config import registry
from glmexp.config.errors import Problem
from glmexp.config.schema import EvalSection, RunConfig

ELSEWHERE = {
    "learning_rate": "optim.lr",
    "per_device_train_batch_size": "train.micro_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "per_device_eval_batch_size": "eval.batch_size",
    "gradient_accumulation_steps": "train.grad_accum",
    "train_batch_size": "train.batch_size",
    "num_train_epochs": "train.epochs",
    "gradient_clipping": "optim.max_grad_norm",
    "lr_scheduler_type": "optim.schedule",
    "warmup_num_steps": "optim.warmup_steps",
    "lora_rank": "method.rank",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "lora_target": "method.target_modules",
    "pre_seq_len": "method.num_virtual_tokens",
    "model_name_or_path": "model.path",
    "output_dir": "run.dir",
    "logging_steps": "train.log_steps",
    "resume_from_checkpoint": "train.resume",
    "max_source_length": "data.max_length",
    "cutoff_len": "data.max_length",
}
"""Names of the same thing in transformers, DeepSpeed and other fine-tuning projects."""
OPTIONS_ELSEWHERE = {
    "entry": {
        **dict.fromkeys(("chat", "infer", "inference", "predict", "serve"), "generate"),
        **dict.fromkeys(("test", "score"), "evaluate"),
        **dict.fromkeys(("tune", "finetune", "sft"), "train"),
        **dict.fromkeys(("memory", "estimate"), "plan"),
        **dict.fromkeys(("merge", "convert"), "export"),
        "check": "doctor",
    },
    "model": dict.fromkeys(("qwen2_7b", "qwen2_7b_instruct", "qwen_7b"), "qwen2"),
    "method": {**dict.fromkeys(("prefix", "prefix_tuning"), "ptuning"), "sft": "full"},
    "precision": {"half": "fp16"},
    "offload": dict.fromkeys(("cpu", "true"), "optimizer") | {"disk": "nvme", "params": "all", "param": "all"},
    "eval": {"bleu": "rouge", "f1": "cmrc", "accuracy": "generate", "perplexity": "loss"},
    "tracker": {"tb": "tensorboard", "off": "none", "false": "none"},
    "launcher": dict.fromkeys(("torchrun", "deepspeed", "accelerate", "mpi", "mpirun", "srun"), "env"),
    "placement": {"tp": "tensor_parallel", "auto": "layers", "dp": "single"},
    "sweep": {"optuna": "search"},
    "data": {"openai": "messages", "chatml": "messages"},
}
"""Words for an option, lower case and with ``_``, whose letters lead nowhere or to another option."""


def conf_folder() -> Path:
    """Where the YAML files lie: inside an installed wheel, else at the top of the checkout."""
    package = Path(__file__).resolve().parents[1]
    folder = package / "conf"
    if not folder.is_dir():
        folder = package.parent / "conf"
    assert folder.is_dir(), f"no configuration folder beside {package}"
    return folder


@cache
def shipped_options() -> dict[str, tuple[str, ...]]:
    """Group to its shipped options, as the YAML files under conf/ name them."""
    return {
        folder.name: tuple(sorted(path.stem for path in folder.glob("*.yaml")))
        for folder in sorted(conf_folder().iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def choice(group: str) -> str:
    """How a command line and how a file chooses one of a group's options."""
    options = ", ".join(shipped_options()[group])
    return f"{group}=OPTION, or `- override /{group}: OPTION` in a file's defaults list, chooses one of {options}"


def keys() -> dict[str, tuple[str, ...]]:
    """Every dotted key that some configuration has; for keys of some options only, those options (``method=lora``)."""
    found: dict[str, list[str]] = {}
    for section, hint in typing.get_type_hints(RunConfig).items():
        if section in ("method", "tracker", "eval"):
            for name in registry.names(section):
                path = f"eval.{name}" if section == "eval" else section
                for key in _keys_of(registry.option(section, name), path):
                    found.setdefault(key, []).append(f"{section}={name}")
        else:
            found.update((key, []) for key in _keys_of(hint, section))
    found.update((f"eval.{field.name}", []) for field in dataclasses.fields(EvalSection) if field.name != "hooks")
    return {key: tuple(options) for key, options in found.items()}


def _keys_of(cls: Any, path: str) -> list[str]:
    names: list[str] = []
    for name, hint in typing.get_type_hints(cls).items():
        key = f"{path}.{name}"
        names.extend(_keys_of(hint, key) if dataclasses.is_dataclass(hint) else [key])
    return names


def nearest(name: str, candidates: list[str]) -> list[str]:
    """At most three candidates like ``name``, best first; a candidate with the same last part counts as near, and one
    of the same group with nearly the same last part as nearer."""
    group, _, leaf = name.rpartition(".")
    scored = []
    for candidate in candidates:
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        place, _, end = candidate.rpartition(".")
        last = difflib.SequenceMatcher(None, leaf, end).ratio()
        at_home = 0.05 if place == group and last >= 0.85 else 0.0
        scored.append((max(whole, 0.9 * last + 0.1 * whole) + at_home, candidate))
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    return [one for score, one in scored[:3] if score >= 0.65 and score >= scored[0][0] - 0.02]


def unknown_key(key: str, value: Any, origin: str = "") -> Problem:
    """The problem of a key that no section has, with the right name if one is near."""
    known = keys()
    if known.get(key):
        where = " or ".join(known[key])
        group, _, option = known[key][0].partition("=")
        fix = f"add {option} to the list: eval=[...,{option}]" if group == "eval" else where
        return Problem(key, f"belongs to {where}, which is not chosen{origin}", fix)
    leaf = key.rsplit(".", 1)[-1]
    if leaf in ELSEWHERE:
        return Problem(key, f"there is no such key{origin}", f"did you mean {ELSEWHERE[leaf]}?")
    groups = shipped_options()
    guesses = nearest(key, [*known, *(group for group in groups if "." not in key)])
    words = [_as_option(guess, value, groups) for guess in guesses]
    fix = f"did you mean {' or '.join(words)}?" if words else "python -m glmexp --cfg job lists all keys"
    return Problem(key, f"there is no such key{origin}", fix)


def _as_option(key: str, value: Any, groups: dict[str, tuple[str, ...]]) -> str:
    """``zero=stage3`` for the key ``zero.stage`` with the value 3; ``method=lora`` for a group; else the key."""
    group, _, leaf = key.partition(".")
    options = groups.get(group, ())
    if not leaf:
        return f"{group}={value}" if value in options else f"{group}=({'|'.join(options)})"
    for option in (f"{leaf}{value}", str(value)):
        if option in options:
            return f"{group}={option}"
    return key


def unknown_option(group: str, value: Any, options: list[str]) -> Problem:
    """The problem of ``group=value`` where the group has no such option."""
    text = "null" if value is None else str(value)
    plain = text.lower().replace("-", "_")
    near = difflib.get_close_matches(text, options, n=1, cutoff=0.5) or [one for one in options if text and text in one]
    if text == "null" and "none" in options:
        near = ["none"]
    elif OPTIONS_ELSEWHERE.get(group, {}).get(plain) in options:
        near = [OPTIONS_ELSEWHERE[group][plain]]
    hint = f"did you mean {group}={near[0]}? " if near else ""
    if group == "deepspeed" and text.endswith(".json"):
        hint = f"did you mean deepspeed.config_file={text}? "
    return Problem(f"{group}={text}", f"{group} has no option {text!r}", f"{hint}options: {', '.join(options)}")
