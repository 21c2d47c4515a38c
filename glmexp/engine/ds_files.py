"""Weights out of a DeepSpeed checkpoint, whoever wrote it, one tensor at a time and without running what it holds.

The files are pickles. They are read with ``weights_only``, and the four harmless classes that DeepSpeed puts into them
are replaced by stand-ins without code; another class in them is refused. Tensors are mapped, not read: a tensor costs
memory when it is asked for. The layout is that of DeepSpeed's own ``zero_to_fp32.py``.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glmexp.config.artifact_rules import LATEST, STATES
from glmexp.config.errors import ArtifactError, Problem, first_line

Lazy = dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]
"""Name to the shape and to what reads the tensor."""
_OPTIM_FILES = "*_optim_states.pt"


class _Inert:
    """Stands for an object of DeepSpeed's: holds its fields, does nothing."""


_STAND_INS: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def load_pickle(file: Path, stand_ins: list[Any] | None = None) -> Any:
    """A ``.pt`` or ``.bin`` file without running anything in it. Raises ArtifactError that names what was refused."""
    try:
        with torch.serialization.safe_globals(stand_ins or []):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's own message tells how to switch the guard off: not to be passed on.
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"holds {found[1]}, which is no tensor" if found else "holds more than tensors"
        raise ArtifactError(
            Problem(str(file), f"is a pickle that {what}; it was not loaded", "safetensors is wanted")
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ArtifactError(
            Problem(str(file), f"cannot be read: {first_line(error)}", "the file is not whole")
        ) from error


def find(path: Path) -> Path | None:
    """The folder with the ``.pt`` files that ``path`` means: itself, the one that ``latest`` names, or the newest
    ``global_step<N>``; None where there is none."""
    if any(path.glob(STATES)):
        return path
    if (path / LATEST).is_file():
        named = path / Path((path / LATEST).read_text(encoding="utf-8").strip()).name
        if any(named.glob(STATES)):
            return named
    steps = [folder for folder in path.glob("global_step*") if any(folder.glob(STATES))]
    return max(steps, key=lambda folder: _number(folder.name), default=None)


def _number(name: str) -> int:
    return int("".join(re.findall(r"\d+", name)) or 0)


def read(folder: Path) -> tuple[Lazy, str]:
    """The tensors of a checkpoint by the names of the live parameters, and in words what they are.

    float32 masters where the optimizer's files hold them, else what the module held. Raises ArtifactError.
    """
    foreign = [file.name for file in folder.glob("*mp_rank_*") if "mp_rank_00" not in file.name]
    if foreign:
        raise ArtifactError(
            Problem(str(folder), f"is split over tensor-parallel ranks ({foreign[0]})", "join them first")
        )
    models = [_checked_model(file) for file in _ordered(folder, STATES)]
    optims = [
        load_pickle(file, _STAND_INS)["optimizer_state_dict"] for file in _ordered(folder, _OPTIM_FILES)
    ]  # mapped: optimizer states cost nothing until they are touched
    if not optims:
        return _module(models[0]), "as the module held them (stage 0, or no optimizer files)"
    first = optims[0]
    stage = int(first.get("zero_stage", 2))
    ranks = first["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    if ranks != len(optims):
        raise ArtifactError(
            Problem(str(folder), f"holds {len(optims)} of {ranks} ranks' optimizer files", "copy the whole folder")
        )
    lazy = _stage3(folder, models, optims) if stage == 3 else _stage12(folder, models[0], optims)
    for name, same in models[0]["shared_params"].items():
        if same in lazy:
            lazy[name] = lazy[same]
    return lazy, f"float32 masters of {ranks} rank{'s' if ranks > 1 else ''} at stage {stage}"


def _ordered(folder: Path, pattern: str) -> list[Path]:
    """Files by the number of their rank: as words, rank 10 comes before rank 2."""
    return sorted(folder.glob(pattern), key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])


def _checked_model(file: Path) -> dict[str, Any]:
    state = load_pickle(file, _STAND_INS)
    if not isinstance(state, dict) or "module" not in state or "param_shapes" not in state:
        raise ArtifactError(Problem(str(file), "is no model file of DeepSpeed", "name a DeepSpeed checkpoint folder"))
    return state


def held(tensor: Tensor) -> tuple[tuple[int, ...], Callable[[], Tensor]]:
    """A tensor that is there (mapped, mostly) as ``Lazy`` wants it."""
    return tuple(tensor.shape), lambda: tensor


def _module(model: dict[str, Any]) -> Lazy:
    return {name: held(tensor) for name, tensor in (model["module"] or {}).items() if isinstance(tensor, Tensor)}


def _shapes(model: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Parameter shapes by optimizer group, in the order in which they lie in the flat vectors."""
    return [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]


def _stage12(folder: Path, model: dict[str, Any], optims: list[dict[str, Any]]) -> Lazy:
    """Each group is one flat vector cut into as many parts as there are ranks."""
    lazy = _module(model)
    for name, fragment in (model["frozen_param_fragments"] or {}).items():
        lazy[name] = held(fragment)
    groups = _shapes(model)
    paddings = optims[0].get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    for number, group in enumerate(groups):
        parts = [optim["single_partition_of_fp32_groups"][number] for optim in optims]
        offset = 0
        for (name, shape), padding in zip(group.items(), paddings[number], strict=True):
            lazy[name] = (shape, _reader(parts, offset, shape))
            offset += math.prod(shape) + padding
        # Parts are aligned to twice the number of ranks, with or without what fills them up.
        align, size = 2 * len(optims), sum(part.numel() for part in parts)
        if -(-offset // align) != -(-size // align):
            raise _torn(folder, offset, size)
    return lazy


def _reader(parts: list[Tensor], start: int, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    def read_one() -> Tensor:
        return torch.cat(list(_cut(parts, start, math.prod(shape)))).view(shape)

    return read_one


def _cut(parts: list[Tensor], start: int, length: int) -> Iterator[Tensor]:
    """Elements ``start`` to ``start + length`` of what the parts are one after another."""
    end = start + length
    for part in parts:
        size = part.numel()
        if start < size and end > 0:
            yield part[max(0, start) : min(size, end)]
        start, end = start - size, end - size


def _stage3(folder: Path, models: list[dict[str, Any]], optims: list[dict[str, Any]]) -> Lazy:
    """Each parameter is cut into as many parts as there are ranks; a rank's parts lie end to end in its groups."""
    if any("ds_zero_partition_groups" in optim and optim["ds_zero_partition_groups"] for optim in optims):
        raise ArtifactError(Problem(str(folder), "its parameters are partitioned over groups of ranks"))
    lazy: Lazy = {}
    buffers = set(models[0]["buffer_names"])
    lazy |= {name: slot for name, slot in _module(models[0]).items() if name in buffers}
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        fragments = [model["frozen_param_fragments"][name] for model in models]
        lazy[name] = (tuple(shape), _reader(fragments, 0, tuple(shape)))
    flat = [list(optim["fp32_flat_groups"]) for optim in optims]
    ranks, offset = len(optims), 0
    for group in _shapes(models[0]):
        for name, shape in group.items():
            length = -(-math.prod(shape) // ranks)
            lazy[name] = (shape, _joiner(flat, offset, length, shape))
            offset += length
    size = sum(part.numel() for part in flat[0])
    if offset != size:
        raise _torn(folder, offset, size)
    return lazy


def _joiner(flat: list[list[Tensor]], offset: int, length: int, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    def read_one() -> Tensor:
        pieces = [piece for groups in flat for piece in _cut(groups, offset, length)]
        return torch.cat(pieces)[: math.prod(shape)].view(shape)

    return read_one


def _torn(folder: Path, needed: int, size: int) -> ArtifactError:
    return ArtifactError(
        Problem(
            str(folder),
            f"its parameters take {needed} elements and its optimizer files hold {size}",
            "the folder is not whole, or another DeepSpeed wrote it",
        )
    )
