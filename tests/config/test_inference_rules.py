"""Placement, decoding and bench: who reads them, how many ranks there are, what cannot be divided."""

from __future__ import annotations

import pytest

from tests.config.helpers import config, refusal


def test_one_rank_where_more_would_do_the_same() -> None:
    assert config("entry=evaluate", "placement=layers", gpus=4).launcher.nproc == 1
    assert config("entry=bench", gpus=4).launcher.nproc == 1
    assert config("entry=bench", "placement=tensor_parallel", "launcher.nproc=2", gpus=4).launcher.nproc == 2
    assert config("entry=evaluate", gpus=4).launcher.nproc == 4


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("bench.runs=3",), "bench.runs: without effect under entry=train"),
        (("placement=layers",), "placement.name: layers without effect under entry=train"),
        (("decoding.way=plain",), "decoding.way: without effect under entry=train"),
        (("entry=evaluate", "placement.gpu_bytes=9"), "placement.gpu_bytes: without effect with placement=single"),
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
        (("entry=bench", "model.init=random", "bench.new_tokens=2000"), "model.sizes.max_positions=2048"),
        (
            ("entry=bench", "placement=tensor_parallel", "model.init=random", "launcher.nproc=4"),
            "model.sizes.num_key_value_heads: 2 cannot be shared out over 4 ranks",
        ),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(words: tuple[str, ...], part: str) -> None:
    assert part in refusal(*words)
