"""``gather=sharded``: what was trained stays in the ranks' partitions until somebody assembles it.

The files are those of a checkpoint without moments: safetensors and JSON, a file a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from glmexp.config.errors import ArtifactError, Problem
from glmexp.engine import checkpoint_files as files
from glmexp.engine import distributed, states
from glmexp.engine.ds_files import Lazy

FOLDER = "partitions"
_BLOCK = 1 << 26
"""Elements that are on the host at a time."""


def write(engine: Any, artifact: Path) -> None:
    """Each rank writes the float32 masters of its own part, nothing is gathered. Collective."""
    folder, rank = artifact / FOLDER, distributed.rank()
    if rank == 0:
        folder.mkdir(exist_ok=True)
    distributed.barrier()
    entries = [
        files.Entry(f"{states.MASTER}:{piece.name}@{piece.offset}", "F32", piece.length)
        for piece in states.pieces(engine)
    ]
    written = files.write_tensors(folder / files.rank_file(rank), entries, {"format": "pt"}, _bytes(engine))
    found = distributed.gather_to_first((written.bytes, written.crc32))
    if found is not None:
        state = {
            "layout": files.LAYOUT,
            "shapes": states.shapes(engine),
            "files": {files.rank_file(one): {"bytes": size, "crc32": crc} for one, (size, crc) in enumerate(found)},
        }
        files.write_json(folder / files.STATE, state)


def _bytes(engine: Any) -> Iterator[memoryview]:
    """The pieces once more: on nvme they are in memory only while it is their turn."""
    for piece in states.pieces(engine):
        for block in piece.tensors[states.MASTER].split(_BLOCK):
            yield block.contiguous().view(torch.uint8).cpu().numpy().data


def lazy(artifact: Path, names: list[str]) -> Lazy:
    """The trained tensors, in float32, by the names of the live parameters.

    Sizes of the files are looked at here; what is in them is held against the card by whoever loads them. Raises
    ArtifactError where a file is not as it was written or a trained tensor is absent.
    """
    folder = artifact / FOLDER
    broken = files.faults(folder, share=None)
    if broken:
        raise ArtifactError(*(Problem(str(folder), fault, "copy the whole folder, or train again") for fault in broken))
    found = files.masters(folder)
    absent = [name for name in names if name not in found]
    if absent:
        raise ArtifactError(
            Problem(
                str(folder), f"lacks {len(absent)} of {len(names)} trained tensors ({absent[0]}, ...)", "train again"
            )
        )
    return {name: found[name] for name in names}
