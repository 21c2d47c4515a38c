"""A checkpoint is the whole state in words that no stage, rank count or offload appears in: what one arrangement wrote
another takes up, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import keeping
from tests.ranks import run_on_ranks

FULL = ["method=full", "model=tiny", "optim.lr=1e-3", "data.max_length=48"]
LORA = ["method=lora", "method.dropout=0.1", "data.max_length=48"]
ARRANGEMENTS = [
    ["zero=stage0"],
    ["zero=stage1"],
    ["zero=stage2"],
    ["zero=stage3"],
    ["zero=stage2", "offload=optimizer", "offload.adam=torch"],
    ["zero=stage3", "offload=all", "offload.adam=torch"],
    ["zero=stage2", "offload=optimizer", "offload.adam=gpu"],
]
BATCH = {1: ["train.micro_batch_size=2", "train.grad_accum=4"], 2: ["train.micro_batch_size=2", "train.grad_accum=2"]}


def test_every_arrangement_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    """Two ranks, dropout, accumulation: the same losses and the same bits as without the cut."""
    words = [
        [*LORA, "zero=stage3", *BATCH[2]],
        [*LORA, "zero=stage0", "precision=bf16", *BATCH[2]],
        [*FULL, "zero=stage2", "precision=bf16", *BATCH[2]],
    ]
    born = run_on_ranks(keeping.lives, words, str(tmp_path), folder=tmp_path)
    pairs = [(one, f"{tmp_path}/{number}") for number, one in enumerate(words)]
    reborn = run_on_ranks(keeping.reborn_from, pairs, folder=tmp_path)
    for number, one in enumerate(words):
        before, after = born[0][number], reborn[0][number]
        assert after.at_cut == before.at_cut, one
        assert after.losses == before.losses, one
        assert after.at_end == before.at_end, one
    assert keeping.files_of(tmp_path / "0") == ["rank-0.safetensors", "rank-1.safetensors", "state.json"]


@pytest.mark.parametrize(
    ("after", "written", "read"),
    [
        (2, (0, 1, 2, 3, 4, 5, 6), {1: (0, 1, 2, 3, 4, 5, 6), 2: (5,)}),
        (20, (2, 4), {1: (2, 4)}),
        pytest.param(20, (0, 1, 2, 3, 4, 5), {1: (0, 1, 2, 3, 4, 5), 2: (5,)}, marks=pytest.mark.kill),
    ],
    ids=["two steps", "twenty steps", "twenty steps of all"],
)
def test_another_stage_rank_count_or_offload_loads_the_same_bits(
    after: int, written: tuple[int, ...], read: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    """fp32, the same global batch: masters and moments bit-equal on load, losses after it to 1e-5.

    Lives go on with a group of the optimizer for every few matrices, as large networks have: that changes nothing.
    """
    words = [[*FULL, *ARRANGEMENTS[number], *BATCH[2]] for number in written]
    lives = run_on_ranks(keeping.lives, words, str(tmp_path), after, folder=tmp_path)[0]
    born, places = dict(zip(written, lives, strict=True)), {number: place for place, number in enumerate(written)}
    for ranks, taken in read.items():
        pairs = []
        for number in taken:
            other = ARRANGEMENTS[(number + ranks) % len(ARRANGEMENTS)]
            pairs.append(([*FULL, *other, *BATCH[ranks]], f"{tmp_path}/{places[number]}"))
        reborn = run_on_ranks(keeping.reborn_from, pairs, 40_000, after, folder=tmp_path, ranks=ranks)[0]
        for number, (other, _), life in zip(taken, pairs, reborn, strict=True):
            assert life.at_cut == born[number].at_cut, (ARRANGEMENTS[number], other)
            assert life.losses == pytest.approx(born[number].losses, abs=1e-5), (ARRANGEMENTS[number], other)
            assert len(life.losses) == after
            worst = max(abs(one - two) for one, two in zip(life.losses, born[number].losses, strict=True))
            print(f"{after} steps, {ARRANGEMENTS[number]} -> {other[len(FULL) :]} on {ranks}: {worst:.1e} at most")


def test_all_random_numbers_come_back() -> None:
    first, again = keeping.random_numbers("")
    assert first == again
