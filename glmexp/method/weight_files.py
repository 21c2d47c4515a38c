"""The model's own weights under their released names, as safetensors: written tensor by tensor, read one at a time."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.schema import Named
from glmexp.method.base import check_keys, check_shapes, own_weights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from glmexp.method.base import Whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000
OUTPUT_LAYERS = ("lm_head.weight", "transformer.output_layer.weight")
"""Written only where they are a tensor of their own: one tied to the embedding is named as that."""
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


class OwnWeights(Named):
    """What methods share that train weights of the model itself and add none."""

    def must_move(self, names: list[str], steps: int) -> list[str]:
        """All that is trained."""
        return names

    def write(self, folder: Path, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Safetensors with the trained tensors under their released names, and config.json."""
        write(folder, model, tensors)
        return tensors

    def merged(self, model: Any) -> Whole:
        """The model's own parameters."""
        return own_weights(model)


def write(folder: Path, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Safetensors (in shards with an index) and config.json."""
    dtype = next(iter(tensors.values())).dtype
    plan = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    stream(folder, plan, ((name, tensor) for name, tensor in tensors.items()), dtype)
    write_config(folder, model.config, tensors, dtype)


def write_config(folder: Path, config: Any, names: Iterable[str], dtype: torch.dtype) -> None:
    """config.json for files with tensors of these names and this dtype."""
    config = copy.deepcopy(config)
    # What from_pretrained loads by default is the dtype that config.json names, not the file's.
    config.dtype = dtype
    # Loading a tied model would put the embedding over an output layer that was trained apart from it.
    if any(name in OUTPUT_LAYERS for name in names):
        config.tie_word_embeddings = False
    config.save_pretrained(folder)


def stream(
    folder: Path,
    plan: Sequence[tuple[str, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``tensors`` as they come, in the order, shapes and dtype that ``plan`` and ``dtype`` say.

    Held at a time is one tensor. Files lie under their names only when they are whole; a tensor larger than
    ``max_shard_bytes`` has a file of its own.
    """
    shards = _shards(plan, dtype.itemsize, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    coming = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        temporary = folder / f".{name}.part"
        with temporary.open("wb") as file:
            file.write(_header(shard, dtype))
            for expected, shape in shard:
                found, tensor = next(coming)
                assert (found, tuple(tensor.shape), tensor.dtype) == (expected, shape, dtype), (
                    f"{found} {tuple(tensor.shape)} {tensor.dtype} came in place of {expected} {shape} {dtype}"
                )
                file.write(_bytes(tensor))
                del tensor
        temporary.replace(folder / name)
    if len(shards) > 1:
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard}
        total = sum(math.prod(shape) for _, shape in plan) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _shards(
    plan: Sequence[tuple[str, tuple[int, ...]]], item_bytes: int, most: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in plan:
        more = math.prod(shape) * item_bytes
        if shards[-1] and size + more > most:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += more
    return shards


def _header(shard: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> bytes:
    """The format's head: its length in 8 bytes, then JSON, filled up to a multiple of 8."""
    (word,) = (word for word, name in _DTYPES.items() if name == str(dtype).removeprefix("torch."))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shard:
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": word, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def lazy(folder: Path) -> dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]:
    """Shape of each tensor of the folder, and what reads it into memory. Raises ArtifactError for a broken file."""
    return {name: slot for file in files(folder) for name, slot in lazy_file(file).items()}


def lazy_file(file: Path) -> dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]:
    """The same for one file. It is read, not mapped: mapped pages stay in the process as long as the file is open."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > size - 8:
                raise ValueError("it is shorter than its head says")
            entries = json.loads(handle.read(length))
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    entries.pop("__metadata__", None)
    start, ends = 8 + length, [entry["data_offsets"][1] for entry in entries.values()]
    if max(ends, default=0) > size - start:
        raise _unreadable(file, ValueError(f"{size} bytes, and its head speaks of {start + max(ends)}"))
    return {
        name: (tuple(entry["shape"]), _reader(file, start + entry["data_offsets"][0], entry))
        for name, entry in entries.items()
    }


def _reader(file: Path, start: int, entry: dict[str, Any]) -> Callable[[], torch.Tensor]:
    def read_one() -> torch.Tensor:
        import torch

        tensor = torch.empty(entry["shape"], dtype=getattr(torch, _DTYPES[entry["dtype"]]))
        if tensor.numel():
            with file.open("rb") as handle:
                handle.seek(start)
                if handle.readinto(_bytes(tensor)) != tensor.nbytes:
                    raise _unreadable(file, ValueError("it ends too early"))
        return tensor

    return read_one


def _unreadable(file: Path, error: Exception) -> ArtifactError:
    return ArtifactError(Problem(str(file), f"cannot be read: {error}", "the file is not whole"))


def files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of its index, else the single one."""
    if not (folder / INDEX).exists():
        return [folder / SINGLE]
    places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / Path(name).name for name in sorted(set(places))]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder. Raises ArtifactError where a file is absent or not whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in files(folder):
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(Problem(str(file), f"cannot be read: {error}", "the artifact is not whole")) from error
    return tensors


def load(folder: Path, model: Any, names: list[str]) -> nn.Module:
    """Put the folder's tensors over those of ``model``: exactly ``names`` of its parameters."""
    tensors = read(folder)
    own = dict(model.named_parameters())
    check_keys(folder, set(tensors), set(names))
    check_shapes(
        folder,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        {name: tuple(own[name].shape) for name in names},
    )
    model.load_state_dict(tensors, strict=False)
    return model
