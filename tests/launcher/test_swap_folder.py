"""Runs that offload to one disk at a time keep out of each other's files, and what dead ones left is taken away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from glmexp.config.errors import ConfigError
from glmexp.entry import training
from glmexp.launcher import swap_folder
from tests.engine.cells import configure


@pytest.fixture(autouse=True)
def _another_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_folder, "_held", {})
    monkeypatch.setattr(swap_folder, "WAIT_S", 0.1)


def _as_another_process(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Locks are the open files': what this process forgets it holds still, as another one would."""
    kept = swap_folder._held
    monkeypatch.setattr(swap_folder, "_held", {})
    return kept


def test_each_run_has_a_folder_of_its_own_and_keeps_it_when_it_goes_on(tmp_path: Path) -> None:
    one, two = (swap_folder.place(str(tmp_path), tmp_path / name) for name in ("one", "two"))
    assert one != two
    assert one.parent == tmp_path
    assert swap_folder.place(str(tmp_path), tmp_path / "one") == one


def test_a_living_run_s_files_stay_and_a_dead_one_s_are_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, dead, new = (swap_folder.place(str(tmp_path / "disk"), Path(name)) for name in ("living", "dead", "new"))
    for folder in (living, dead):
        swap_folder.take(folder)
        (folder / "param.swp").write_text("weights")
    swap_folder.take(living)  # asking again is no other process
    others = _as_another_process(monkeypatch)
    others[dead].release()
    swap_folder.take(new)
    assert (living / "param.swp").exists()
    assert not dead.exists()
    with pytest.raises(ConfigError, match="another process trains with"):
        swap_folder.take(living)


def test_a_run_that_ends_takes_its_files_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = (swap_folder.place(str(tmp_path / "disk"), Path(name)) for name in ("own", "other"))
    swap_folder.take(other)
    kept = _as_another_process(monkeypatch)
    swap_folder.take(own)
    (own / "param.swp").write_text("weights")
    swap_folder.leave()
    assert not own.exists()
    assert other.exists()
    assert other in kept
    swap_folder.take(own)  # it can go on there


def test_deepspeed_is_given_the_run_s_own_folder(tmp_path: Path) -> None:
    config = configure("zero=stage3", "offload=nvme", f"offload.nvme_path={tmp_path / 'disk'}", ranks=1)
    here = SimpleNamespace(config=config, folder=tmp_path / "run")
    zero = training.lowered(here)["zero_optimization"]  # type: ignore[arg-type]
    (own,) = (path for path in (tmp_path / "disk").iterdir() if path.is_dir())
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == str(own)
    assert config.offload.nvme_path == str(tmp_path / "disk"), "the run's configuration is as it was"
