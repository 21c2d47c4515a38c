"""A polite signal counts when every rank has seen it; auto finds the run that is meant, and leaves others alone."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from glmexp.config.errors import ConfigError
from glmexp.config.identity import identity
from glmexp.config.schema import RunConfig
from glmexp.launcher import folder, stopping, unfinished
from tests.config.helpers import config


class Shared:
    """A store in this process, as torch.distributed's."""

    def __init__(self, fails: bool = False) -> None:
        self.keys: set[str] = set()
        self.fails = fails

    def clone(self) -> Shared:
        return self

    def set(self, key: str, _: str) -> None:
        if self.fails:
            raise RuntimeError("Broken pipe")
        self.keys.add(key)

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self.keys


def _ears(store: Shared, folder_: Path) -> list[stopping.Listener]:
    ears = [stopping.Listener(folder_, rank) for rank in range(2)]
    for ear in ears:
        ear._receiver.settimeout(0.01)
        ear.offer(store, 2, grace_s=1)
    return ears


def test_a_request_counts_when_every_rank_has_seen_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "AGREE_S", 0.3)
    store = Shared()
    one, two = _ears(store, tmp_path)
    begun = time.monotonic()
    assert not one._agree(store, begun), "the other rank is dead: it sees nothing"
    assert time.monotonic() - begun < 5
    assert two._agree(store, time.monotonic()), "both have seen it"


def test_a_store_that_is_gone_is_no_agreement(tmp_path: Path) -> None:
    store = Shared(fails=True)
    assert not _ears(store, tmp_path)[0]._agree(store, time.monotonic())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _left(words: list[str], state: str, age_s: float = 0.0) -> Path:
    """A run of these words, left in this state."""
    run = folder.make(config("train.resume=auto", *words))
    folder.write_status(run, state)
    then = time.time() - age_s
    os.utime(run / folder.ENVIRONMENT, (then, then))
    return run


def _auto(*words: str) -> RunConfig:
    return config("train.resume=auto", *words)


def test_auto_takes_the_newest_unfinished_run_of_the_same_configuration(here: Path) -> None:
    assert unfinished.find(_auto()) is None
    _left([], "failed", age_s=100)
    newest = _left([], "stopped", age_s=50)
    _left([], "finished")
    _left(["optim.lr=7e-4"], "stopped")
    assert unfinished.find(_auto()) == newest
    assert unfinished.find(_auto("launcher.nproc=1", "tracker=none", "train.stop_after=2")) == newest
    assert unfinished.find(_auto("train.seed=1")) is None
    assert unfinished.find(config()) is None, "nobody asked"


def test_auto_leaves_a_run_alone_that_somebody_writes_in(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "ORPHANS_S", 0.2)
    older, running = _left([], "stopped", age_s=50), _left([], "running")
    lock = unfinished.Lock(running)
    assert lock.take(0)
    assert unfinished.find(_auto()) == older
    lock.release()
    assert unfinished.find(_auto()) == running


def test_auto_names_the_run_that_it_passes_over_and_that_could_go_on(here: Path) -> None:
    kept = _left(["train.batch_size=8"], "stopped", age_s=50)
    (kept / "checkpoints").mkdir()
    (kept / "checkpoints/latest").write_text("step-2")
    for one in (["optim.lr=7e-4"], ["train.seed=1"]):  # would train something else
        shutil.copytree(kept / "checkpoints", _left(one, "stopped") / "checkpoints")
    _left(["zero=stage1"], "failed")  # has nothing to go on from
    wanted = _auto("zero=stage3", "train.batch_size=16")
    assert unfinished.find(wanted) is None
    said = unfinished.by_name(wanted)
    assert said is not None
    assert said.startswith(f"{kept} is unfinished and differs (zero.stage: 3 now, 2 there; ")
    assert said.endswith(f"): train.resume={kept} goes on with it")
    folder.write_status(kept, "finished")
    assert unfinished.by_name(wanted) is None


def test_auto_with_a_folder_names_what_differs_there(here: Path) -> None:
    assert unfinished.find(_auto("run.dir=mine")) is None
    run = _left(["run.dir=mine"], "stopped")
    assert unfinished.find(_auto("run.dir=mine")) == run
    with pytest.raises(ConfigError, match=r"holds another run \(optim.lr: 0.0007 now, .* there\)"):
        unfinished.find(_auto("run.dir=mine", "optim.lr=7e-4"))
    folder.write_status(run, "finished")
    with pytest.raises(ConfigError, match="is finished"):
        unfinished.find(_auto("run.dir=mine"))


def test_the_identity_is_that_of_the_words_not_of_what_the_machine_decides(here: Path) -> None:
    run = folder.make(config(), composed="from before")
    assert json.loads((run / folder.ENVIRONMENT).read_text())["identity"] == "from before"
    assert unfinished.identity_of(folder.make(config())) == identity(config())
