"""Packing: several examples in one row of a fixed token budget, none of which sees another.

Which examples share a row is decided once by the seed (first fit, longest first, within windows of shuffled examples);
the order of the rows changes with each epoch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from glmexp.config.schema import Family
from glmexp.data.collate import predictions
from glmexp.data.store import IGNORED, Example

if TYPE_CHECKING:
    import torch

ROUNDING = 128
"""Rows are filled up to a multiple of the budget's 128th: nearly full ones then share a length, and kernels a plan."""
PADDING_PARTS = 32
"""Of a row: see ``segment_ends``."""
WINDOW = 4096
"""Examples that are packed together: enough for full rows, few enough that the order stays random."""


def packs(lengths: np.ndarray, budget: int, seed: int) -> list[list[int]]:
    """Rows of example indices whose tokens fit into ``budget``; every example is in exactly one."""
    assert len(lengths) == 0 or lengths.max() <= budget, "examples are cut to data.max_length before they are packed"
    order = list(range(len(lengths)))
    random.Random(f"packs {seed}").shuffle(order)
    rows: list[list[int]] = []
    for start in range(0, len(order), WINDOW):
        rows += _first_fit(order[start : start + WINDOW], lengths, budget)
    return rows


def _first_fit(window: list[int], lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Each example, longest first, into the fullest row that has room for it (kept in lists by room)."""
    by_room: list[list[list[int]]] = [[] for _ in range(budget + 1)]
    rooms = np.zeros(budget + 1, dtype=bool)
    rows: list[list[int]] = []
    for index in sorted(window, key=lambda one: -int(lengths[one])):
        length = int(lengths[index])
        with_room = np.flatnonzero(rooms[length:])
        if len(with_room):
            room = length + int(with_room[0])
            row = by_room[room].pop()
            rooms[room] = bool(by_room[room])
        else:
            room, row = budget, []
            rows.append(row)
        row.append(index)
        by_room[room - length].append(row)
        rooms[room - length] = True
    return rows


def filled_length(longest: int, budget: int) -> int:
    """What rows of at most ``longest`` tokens are filled up to."""
    assert longest <= budget, f"{longest} tokens in a row of {budget}"
    step = max(1, budget // ROUNDING)
    return min(budget, -(-longest // step) * step)


def collate_packed(
    rows: Sequence[Sequence[Example]], pad_id: int, budget: int, length: int | None = None
) -> dict[str, Any]:
    """input_ids, labels, segments, positions, contexts: int64 (batch, length), as long as asked for, else as the
    longest row needs, at most ``budget``.

    segments: 1, 2, ... for the examples of a row, 0 on padding. positions restart with each example. contexts: 1 on
    the tokens before the answer of the example (what v1 sees in both directions). The first label of each example is
    not learned: nothing of its own stands before it. And what ``predictions`` and
    ``segment_ends`` add.
    """
    import torch

    needed = filled_length(max(sum(len(example.input_ids) for example in row) for row in rows), budget)
    length = needed if length is None else length
    assert needed <= length, f"{needed} tokens in a row of {length}"
    shape = (len(rows), length)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("segments", "positions", "contexts")}
    batch |= {"input_ids": torch.full(shape, pad_id), "labels": torch.full(shape, IGNORED)}
    for number, row in enumerate(rows):
        start = 0
        for segment, example in enumerate(row, start=1):
            count = len(example.input_ids)
            place = slice(start, start + count)
            batch["input_ids"][number, place] = torch.from_numpy(example.input_ids)
            batch["labels"][number, place] = torch.from_numpy(example.labels)
            batch["labels"][number, start] = IGNORED
            batch["segments"][number, place] = segment
            batch["positions"][number, place] = torch.arange(count)
            batch["contexts"][number, start : start + example.prompt_length] = 1
            start += count
    batch["lengths"] = (batch["segments"] != 0).sum(dim=1)
    counts = [[len(example.input_ids) for example in row] for row in rows]
    return batch | predictions(batch["labels"]) | segment_ends(counts, length)


def segment_ends(rows: Sequence[Sequence[int]], length: int) -> dict[str, Any]:
    """cu_seq_lens: int32 (segments + 1,), 0 and the running sum of ``rows``' token counts and of the padding behind
    each row up to ``length``; max_length: the longest, an int. On the CPU: a GPU would have to be waited for.

    Padding is cut into segments no longer than the longest example, so that a short row costs no more than a full one;
    but where that is tiny into PADDING_PARTS of a row: flash attention's backward pass holds 128 tokens' gradients in
    float32 for each segment.
    """
    import torch

    part = max(length // PADDING_PARTS, *(count for row in rows for count in row))
    ends = [0]
    for number, row in enumerate(rows, start=1):
        for count in row:
            ends.append(ends[-1] + count)
        while ends[-1] < number * length:
            ends.append(min(ends[-1] + part, number * length))
    longest = max(end - start for start, end in pairwise(ends))
    return {"cu_seq_lens": torch.tensor(ends, dtype=torch.int32), "max_length": longest}


def visible(segments: torch.Tensor, contexts: torch.Tensor | None) -> torch.Tensor:
    """(batch, 1, length, length), True where a query may look: same example, and before it or in its open context.

    Padding sees itself, so that no row of the softmax is empty.
    """
    import torch

    length = segments.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()[None]
    if contexts is not None:
        earlier = earlier | contexts.bool()[:, None, :]
    same = segments[:, :, None] == segments[:, None, :]
    return (same & earlier)[:, None]


def model_inputs(batch: Mapping[str, Any], family: Family, gmask_id: int | None, attention: str) -> dict[str, Any]:
    """What a network of the family and attention kind gets for a batch of ``collate_packed``, on the batch's device.

    varlen: positions and segments, no mask. Other kinds, ChatGLM2/3: boolean mask, True = visible, and positions.
    ChatGLM (v1): a boolean mask of its own, True = hidden, dense and made once a batch, as its context sees itself in
    both directions; positions are (batch, 2, length) in which what is written stands at its [GMASK]. Qwen2: positions
    alone, from whose restarts transformers makes the mask (masking_utils.find_packed_sequence_indices).
    """
    ids = batch["input_ids"]
    if attention == "varlen":
        assert family != "chatglm", "the rules refuse varlen for ChatGLM-6B"
        inputs = {"input_ids": ids, "position_ids": batch["positions"]}
        for side in ("q", "k"):
            inputs |= {f"cu_seq_lens_{side}": batch["cu_seq_lens"], f"max_length_{side}": batch["max_length"]}
        # A mask by kind of layer is taken as it is: transformers makes none from the positions.
        return inputs | ({"attention_mask": {"full_attention": None}} if family == "qwen2" else {})
    if family == "qwen2":
        return {"input_ids": ids, "position_ids": batch["positions"]}
    if family != "chatglm":
        mask = visible(batch["segments"], None)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": batch["positions"]}
    # sop is the last token that a generation is given; it is written, not part of the context.
    context = batch["contexts"].clone()
    context[:, :-1] &= batch["contexts"][:, 1:]
    context[:, -1] = 0
    return {
        "input_ids": ids,
        "attention_mask": ~visible(batch["segments"], context),
        "position_ids": _two_rows(batch, context, gmask_id),
    }


def _two_rows(batch: Mapping[str, torch.Tensor], context: torch.Tensor, gmask_id: int | None) -> torch.Tensor:
    """ChatGLM's positions (batch, 2, length): see ``glmexp.model.positions.derive_positions``."""
    import torch

    assert gmask_id is not None, "ChatGLM's tokenizer has a [gMASK]"
    positions, segments = batch["positions"], batch["segments"]
    # Position of each example's last [gMASK] in its context: a running maximum that restarts with each example.
    marked = torch.where((batch["input_ids"] == gmask_id) & (context == 1), positions + 1, 0)
    offset = segments * (positions.shape[1] + 1)
    reached = (marked + offset).cummax(dim=1).values - offset
    written = (context == 0) & (segments != 0)
    first = torch.where(written, reached - 1, positions)
    contexts_so_far = torch.where(context == 1, positions + 1, 0)
    context_length = (contexts_so_far + offset).cummax(dim=1).values - offset
    second = torch.where(written, positions - context_length + 1, 0)
    real = (segments != 0).to(first.dtype)
    return torch.stack([first * real, second * real], dim=1)
