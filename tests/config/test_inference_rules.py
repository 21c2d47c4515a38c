"""Placement, decoding and bench: who reads them, how many ranks there are, what cannot be divided."""

from __future__ import annotations

import pytest

from tests.config.helpers import config, refusal


def test_one_rank_where_more_would_do_the_same() -> None:
    assert config("entry=evaluate", "placement=layers", gpus=4).launcher.nproc == 1
    assert config("entry=bench", gpus=4).launcher.nproc == 1
    assert config("entry=bench", "placement=tensor_parallel", "launcher.nproc=2", gpus=4).launcher.nproc == 2
    assert config("entry=evaluate", gpus=4).launcher.nproc == 4


def test_ranks_sum_through_each_others_memory_unless_that_is_switched_off() -> None:
    words = ("entry=evaluate", "placement=tensor_parallel", "launcher.nproc=2")
    assert config(*words).placement.peer_sums
    assert not config(*words, "placement.peer_sums=false").placement.peer_sums


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("bench.runs=3",), "bench.runs: without effect under entry=train"),
        (("placement=layers",), "placement.name: layers without effect under entry=train"),
        (("decoding.way=plain",), "decoding.way: without effect under entry=train"),
        (("entry=evaluate", "placement.gpu_bytes=9"), "placement.gpu_bytes: without effect with placement=single"),
        (("entry=evaluate", "placement.peer_sums=true"), "placement.peer_sums: without effect with placement=single"),
        (("entry=evaluate", "placement=layers", "placement.gpu_bytes=9"), "without effect: there is no GPU"),
        (("entry=evaluate", "placement=layers", "launcher.nproc=2"), "placement=layers is one that sees all GPUs"),
        (("entry=evaluate", "placement=tensor_parallel"), "tensor_parallel with 1 rank shares nothing"),
        (("entry=evaluate", "decoding.way=graph"), "decoding.way: graph needs a GPU"),
        (("entry=evaluate", "placement=layers", "decoding.way=static"), "decoding.way=plain"),
        (
            ("entry=generate", "placement=tensor_parallel", "launcher.nproc=2"),
            "placement.name: tensor_parallel: a chat is one process",
        ),
        (("entry=bench", "bench.prompt_lengths=[]"), "bench.prompt_lengths: is empty"),
        (("entry=bench", "bench.plain=true", "decoding.way=plain"), "is what it would compare with"),
        (("entry=bench", "launcher.nproc=2"), "2 ranks would measure the same"),
        (("entry=bench", "model.init=random", "bench.new_tokens=2000"), "and the network ends at 2048"),
        (
            ("entry=bench", "placement=tensor_parallel", "model.init=random", "launcher.nproc=4"),
            "launcher.nproc: 4 ranks do not divide the 2 key/value heads of builtin:tiny (placement=tensor_parallel)",
        ),
        (("entry=evaluate", "placement=tensor_parallel", "launcher.nproc=3"), "ranks that do: 2"),
        (
            ("entry=bench", "bench.prompt_lengths=[2000]"),
            "2000 and 128 new tokens are 2128, and the network ends at 2048",
        ),
        (("entry=generate", "generate.max_length=4096"), "4096 tokens, and the network was made for 2048"),
        (("data.max_length=4096",), "4096 tokens, and the network of builtin:tiny ends at 2048"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(words: tuple[str, ...], part: str) -> None:
    assert part in refusal(*words)
