"""A search: its choices follow from its seed and its results alone, whatever interrupted it."""

from __future__ import annotations

from pathlib import Path

import pytest

from glmexp.config.errors import ConfigError
from glmexp.config.schema import SweepSection
from glmexp.config.sweep import Choice, Interval, Space
from glmexp.launcher.search import suggest
from glmexp.launcher.trials import Trial
from tests.cli import wait_until
from tests.launcher.sweeps import outcomes, parent, run, starts, state

SPACE: dict[str, Space] = {
    "optim.lr": Interval(1e-5, 1e-1, whole=False, log=True),
    "method.rank": Interval(2, 16, whole=True),
    "zero": Choice(("stage1", "stage2")),
}
LINE = ["sweep=search", "optim.lr=tag(log,interval(0.01,1))", "method.rank=int(interval(1,8))"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings(direction: str = "minimize", seed: int = 1) -> SweepSection:
    return SweepSection("search", "eval/loss/loss", direction, [], 40, seed)  # type: ignore[arg-type]


def searched(count: int, one: SweepSection, failing: bool = False) -> list[Trial]:
    """Trials one after another; the loss is smallest where the rate is 1e-3 and the rank 4, in stage 1."""
    trials: list[Trial] = []
    for number in range(count):
        values = suggest(SPACE, one, trials, number)
        rate, rank = float(values["optim.lr"]), int(values["method.rank"])
        loss = abs(rate / 1e-3 - 1) + abs(rank - 4) + (values["zero"] == "stage2")
        if failing and number % 2:
            trials.append(Trial(number, "", values, "", state="out_of_memory"))
        else:
            trials.append(Trial(number, "", values, "", state="finished", metrics={"eval/loss/loss": loss}))
    return trials


def test_a_search_is_seeded_stays_in_its_space_and_finds_the_good_part() -> None:
    first = searched(40, settings())
    assert [one.values for one in first] == [one.values for one in searched(40, settings())]
    assert [one.values for one in first[:10]] != [one.values for one in searched(10, settings(seed=2))]
    for one in first:
        assert 1e-5 <= float(one.values["optim.lr"]) <= 1e-1
        assert 2 <= int(one.values["method.rank"]) <= 16
    early, late = ([one.value("eval/loss/loss") for one in part] for part in (first[:10], first[-10:]))
    assert sum(late) < 0.5 * sum(early)
    upward = searched(40, settings("maximize"))
    assert sum(one.value("eval/loss/loss") for one in upward[-10:]) > 2 * sum(early)


def test_failed_trials_are_told_as_failed_and_running_ones_are_not_chosen_again() -> None:
    trials = searched(30, settings(), failing=True)
    assert len({str(one.values) for one in trials}) == 30
    waiting = [Trial(number, "", one.values, "", state="running") for number, one in enumerate(trials[:12])]
    assert suggest(SPACE, settings(), waiting, 12) not in [one.values for one in waiting]


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run([*LINE, "sweep.trials=6", f"hydra.sweep.dir={whole}"]) == 0
    line = [*LINE, "sweep.trials=6", f"hydra.sweep.dir={broken}"]
    fourth = state(whole)["trials"][3]
    with parent(*line, HANG_AT=fourth["values"]["method.rank"]) as process:
        wait_until(lambda: list(broken.glob("*/checkpoints/latest")), 60, "a trial hangs")
        process.kill()
        process.communicate()
    assert outcomes(broken)[-1] == "running"
    assert run(line) == 0
    plain = [
        [(one["values"], one["metrics"], one["state"]) for one in state(root)["trials"]] for root in (whole, broken)
    ]
    assert plain[0] == plain[1]
    assert sum(len(one) for one in starts(broken)) == 7, "one was started twice"
    assert run([*LINE, "sweep.trials=7", f"hydra.sweep.dir={broken}"]) == 0, "more trials may be asked for later"
    assert len(outcomes(broken)) == 7


def test_another_search_on_the_same_folder_is_refused_with_both_values(tmp_path: Path) -> None:
    root = f"hydra.sweep.dir={tmp_path}/s"
    assert run([*LINE, "sweep.trials=1", root]) == 0
    for words, part in (
        (["sweep.seed=7"], "seed=42, not 7"),
        (["sweep.direction=maximize"], "direction=minimize, not maximize"),
        (["train.max_steps=9"], "other options"),
    ):
        with pytest.raises(ConfigError, match=part):
            run([*LINE, "sweep.trials=2", root, *words])


def test_a_choice_made_again_is_not_run_again_and_what_cannot_be_composed_is_a_failed_trial(tmp_path: Path) -> None:
    """A space of 2 x 2, one of which contradicts itself: batches of 12 rows are not made of micro batches of 8."""
    space = ["train.micro_batch_size=4,8", "train.batch_size=12,8"]
    assert run(["sweep=search", "sweep.trials=8", *space, f"hydra.sweep.dir={tmp_path}"]) == 1
    trials = state(tmp_path)["trials"]
    wrong = [one for one in trials if one["values"] == {"train.micro_batch_size": "8", "train.batch_size": "12"}]
    assert {one["state"] for one in wrong} == {"failed"}
    assert "train.batch_size" in wrong[0]["reason"]
    right = [one for one in trials if one not in wrong]
    assert {one["state"] for one in right} == {"finished"}
    once = [one for one in right if one["same_as"] is None]
    assert len(once) == len({str(one["values"]) for one in right}) < len(right), "twins have the first one's result"
    assert all(len(started) == 1 for started in starts(tmp_path) if started)
    words = ["sweep=search", "sweep.trials=8", *space, f"hydra.sweep.dir={tmp_path}"]
    assert run([*words, "sweep.retry=failed"]) == 1, "and not one that can be retried"
    assert state(tmp_path)["trials"] == trials
