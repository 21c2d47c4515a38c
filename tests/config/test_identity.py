"""Two command lines that describe the same run have one identity; a value that a study could compare makes another."""

from __future__ import annotations

import pytest

from glmexp.config.identity import identity
from tests.config.helpers import config

BASE = ("train.batch_size=8", "train.micro_batch_size=4")


@pytest.mark.parametrize(
    "words",
    [
        ["run.dir=elsewhere"],
        ["run.name=other"],
        ["tracker=none"],
        ["launcher.timeout_s=77"],
        ["train.stop_after=2"],
        ["train.stop_after_s=60"],
        ["launcher.env={NCCL_DEBUG: INFO}"],
        ["method=lora", "zero=stage2"],
    ],
)
def test_place_tracker_and_launcher_make_no_other_run(words: list[str]) -> None:
    assert identity(config(*BASE, *words)) == identity(config(*BASE))


def test_the_same_batch_on_another_number_of_ranks_is_the_same_run() -> None:
    assert identity(config(*BASE, "launcher.nproc=2")) == identity(config(*BASE, "launcher.nproc=1"))


@pytest.mark.parametrize(
    "word",
    ["train.max_steps=9", "train.seed=1", "zero=stage3", "zero.reduce_bucket_size=7", "optim.lr=1e-5", "method.rank=3",
     "eval=loss", "data.max_length=64", "train.save_steps=2", "train.micro_batch_size=2"],
)  # fmt: skip
def test_what_a_study_could_compare_makes_another_run(word: str) -> None:
    words = [one for one in BASE if one.split("=")[0] != word.split("=")[0]]
    assert identity(config(*words, word)) != identity(config(*BASE))
