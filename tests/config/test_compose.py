"""What the command line composes to: options, a user's own files, defaults that give way, and the grid of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from glmexp.config import registry
from glmexp.config.load import dump, flatten, load, read, write
from glmexp.config.sweep import Choice, Interval
from tests.config.helpers import asked, config, refusal, rows_file


def test_own_train_file_drops_the_shipped_eval_file_but_not_an_own_one(tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl")
    assert config().data.eval_file == "builtin:demo/eval.jsonl"
    assert config(f"data.train_file={rows}").data.eval_file is None
    assert config(f"data.train_file={rows}", f"data.eval_file={rows}").data.eval_file == rows
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"defaults: [demo]\ntrain_file: {rows}\n")
    assert config("--config-dir", str(tmp_path), "data=mine").data.eval_file is None


@pytest.mark.parametrize(
    ("words", "section", "name"),
    [
        (["data.holdout=5"], "data", "eval_file"),
        (["optim.warmup_steps=3"], "optim", "warmup_ratio"),
        (["method=freeze", "method.patterns=[lm_head]"], "method", "num_layers"),
    ],
)
def test_a_default_gives_way_to_its_alternative(words: list[str], section: str, name: str) -> None:
    assert getattr(getattr(config(*words), section), name) is None


def test_null_lists_and_big_numbers_arrive_typed() -> None:
    one = config("optim.max_grad_norm=null", "zero.reduce_bucket_size=5e8", "method.alpha='3'", "optim.betas=[0.8,0.9]")
    assert one.optim.max_grad_norm is None
    assert one.zero.reduce_bucket_size == 500_000_000
    assert isinstance(one.zero.reduce_bucket_size, int)
    assert one.method.alpha == 3.0
    assert one.optim.betas == [0.8, 0.9]


def test_text_that_looks_like_a_number_stays_as_typed() -> None:
    one = config("run.name=1e5", "launcher.env.NCCL_IB_DISABLE=1", "launcher.env.SHARE=1.0")
    assert one.run.name == "1e5"
    assert one.launcher.env == {"NCCL_IB_DISABLE": "1", "SHARE": "1.0"}


def test_users_options_come_from_config_dir_and_searchpath(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text("defaults: [lora]\nrank: 3\n")
    assert config("--config-dir", str(tmp_path), "method=mine").method.rank == 3
    assert config(f"hydra.searchpath=[{tmp_path}]", "method=mine").method.rank == 3
    assert config(f"hydra.searchpath=[file://{tmp_path}]", "+method=mine").method.rank == 3


def test_a_group_may_be_given_with_and_without_plus(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "big.yaml").write_text("# @package _global_\nmethod: {rank: 64}\n")
    for word in ("experiment=big", "+experiment=big"):
        assert config("--config-dir", str(tmp_path), word).method.rank == 64
    assert config("+method=full").method.name == "full"


def test_saved_configuration_is_read_back_equal(tmp_path: Path) -> None:
    for words in ([], ["method=ptuning", "eval=none", "tracker=none"], ["method=freeze", "zero=stage3", "offload=all"]):
        one = config(*words, "run.name='数据 #1'", "launcher.env.A=1")
        assert load(dump(one)) == one
        write(one, tmp_path / "config.yaml")
        assert read(tmp_path / "config.yaml") == one
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "no temporary file stays"


def test_relative_paths_are_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_file(tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    assert config("data.train_file=rows.jsonl").data.train_file == str(tmp_path / "rows.jsonl")
    assert config().data.train_file == "builtin:demo/train.jsonl"


def test_under_an_outside_launcher_its_ranks_count_and_the_launcher_is_env() -> None:
    one = config("train.batch_size=32", world_size=4, gpus=8)
    assert one.launcher.name == "env"
    assert one.train.micro_batch_size == 8


def test_nproc_beside_an_outside_launcher_is_warned_about() -> None:
    assert "the outside launcher started 4 ranks" in asked("launcher.nproc=2", world_size=4).warnings[0]
    assert asked("launcher.nproc=4", world_size=4).warnings == []


PLUGIN = """
from dataclasses import dataclass
from glmexp.config.registry import register
from glmexp.config.schema import Count, Named

@register("method", "scaled")
@dataclass
class Scaled(Named):
    layers: Count
    \"\"\"How many layers.\"\"\"
    lr: float
    \"\"\"Learning rate.\"\"\"
"""


def test_a_users_own_method_is_found_checked_and_named_like_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_methods.py").write_text(PLUGIN)
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "scaled.yaml").write_text("name: scaled\nlayers: 2\nlr: 1e-3\n")
    own = ("--config-dir", str(tmp_path / "conf"), "method=scaled")
    assert "method.name: no code is registered for 'scaled'" in refusal(*own)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "their_methods")
    monkeypatch.setattr(registry, "_options", dict(registry._options))
    monkeypatch.setattr(registry, "_plugins_loaded", set())
    one = config(*own, "method.layers=3")
    assert (one.method.layers, one.optim.lr) == (3, 1e-3)
    assert "did you mean method.layers?" in refusal(*own, "method.layer=3")
    assert "'x' is not a whole number of at least 1" in refusal(*own, "method.layers=x")


def test_ranks_are_the_gpus_where_nproc_is_not_given() -> None:
    assert config(gpus=2).train.batch_size == 16
    assert config("launcher.nproc=1", gpus=2).train.batch_size == 8


def test_the_number_of_ranks_is_decided_once_and_stands_in_the_configuration() -> None:
    assert config(gpus=2).launcher.nproc == 2
    assert config().launcher.nproc == 1
    assert config("launcher=inprocess", "launcher.nproc=null", gpus=2).launcher.nproc == 1
    assert config(world_size=4).launcher.nproc is None, "the outside launcher's to say"


def pairs(*words: str) -> list[tuple[int, int | None]]:
    return [(one.method.rank, one.zero.reduce_bucket_size) for one in asked(*words).trials]


GRID = [(2, 200_000_000), (2, 500_000_000), (4, 200_000_000), (4, 500_000_000)]


def test_a_sweep_is_the_product_and_each_trial_has_its_folder(tmp_path: Path) -> None:
    words = ("-m", "method.rank=2,4", "zero.reduce_bucket_size=2e8,5e8", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert pairs(*words) == GRID
    request = asked(*words)
    assert request.sweep is not None
    assert request.sweep.folder == str(tmp_path / "sweep")
    assert [Path(one.run.dir or "").name for one in request.trials] == [
        "0_method.rank-2_zero.reduce_bucket_size-200000000",
        "1_method.rank-2_zero.reduce_bucket_size-500000000",
        "2_method.rank-4_zero.reduce_bucket_size-200000000",
        "3_method.rank-4_zero.reduce_bucket_size-500000000",
    ]
    assert {one.tracker.group for one in request.trials} == {"sweep"}


def test_a_trial_differs_from_a_single_run_only_in_its_folder_and_group(tmp_path: Path) -> None:
    (trial,) = asked("-m", "method.rank=2", f"hydra.sweep.dir={tmp_path}/s").trials
    alone = config("method.rank=2")
    differs = {key for key, value in flatten(dump(trial)).items() if flatten(dump(alone))[key] != value}
    assert differs == {"run.dir", "tracker.group"}


def test_a_study_brings_its_grid_and_the_command_line_replaces_an_axis_of_it() -> None:
    assert pairs("-m", "+experiments=rank_and_bucket") == [
        (4, 50_000_000),
        (4, 200_000_000),
        (8, 50_000_000),
        (8, 200_000_000),
    ]
    assert pairs("-m", "+experiments=rank_and_bucket", "++method.rank=16") == [(16, 50_000_000), (16, 200_000_000)]


def test_options_can_be_swept_by_name_range_and_glob() -> None:
    assert [one.method.name for one in asked("-m", "method=lora,full").trials] == ["lora", "full"]
    names = [one.method.name for one in asked("-m", "method=glob(*,exclude=[lora,f*])").trials]
    assert names == ["ptuning"]
    assert [one.train.seed for one in asked("-m", "train.seed=range(1,4)").trials] == [1, 2, 3]


def test_the_whole_grid_is_checked_before_the_first_trial_and_each_mistake_told_once() -> None:
    text = refusal("-m", "method.rank=2,a", "optim.lr=1,x", "zero=stage2,stage9", "run.dir=here")
    assert text.startswith("4 config errors:")
    for part in (
        "'a' is not a whole number",
        "'x' is not a number",
        "zero has no option 'stage9'",
        "every trial would",
    ):
        assert text.count(part) == 1


def test_a_search_takes_its_space_from_hydras_words() -> None:
    words = [
        *("optim.lr=tag(log,interval(1e-5,1e-3))", "method.rank=choice(4,8)", "method.alpha=int(interval(8,32))"),
        *("data.max_length=range(64,257,64)", "method=lora,lora", "optim.weight_decay=interval(0,1)"),
    ]
    sweep = asked("-m", "sweep=search", "sweep.trials=3", *words).sweep
    assert sweep is not None
    assert sweep.settings.trials == 3
    assert sweep.space == {
        "optim.lr": Interval(1e-5, 1e-3, whole=False, log=True),
        "method.rank": Choice(("4", "8")),
        "method.alpha": Interval(8, 32, whole=True),
        "data.max_length": Interval(64, 256, whole=True, step=64),
        "method": Choice(("lora", "lora")),
        "optim.weight_decay": Interval(0, 1, whole=False),
    }


def test_both_ends_of_a_search_are_checked_before_it_starts() -> None:
    assert "method.rank: 0 is not" in refusal("-m", "sweep=search", "method.rank=int(interval(0,8))")
    assert "optim.lr: -1.0 is not" in refusal("-m", "sweep=search", "optim.lr=interval(-1,1)", "method.rank=2,4,8")


def test_what_chose_a_trial_is_no_part_of_it(tmp_path: Path) -> None:
    words = ["method.rank=2", f"hydra.sweep.dir={tmp_path}/s"]
    own = ["sweep.metric=train/loss", "sweep.direction=maximize", "sweep.retry=failed", "launcher.slots=2"]
    plain, chosen = asked("-m", *words), asked("-m", *words, *own)
    assert plain.trials == chosen.trials
    assert chosen.sweep is not None
    assert (chosen.sweep.settings.retry, chosen.sweep.slots) == (["failed"], 2)


def test_a_slots_ranks_are_its_share_of_the_gpus() -> None:
    (trial,) = asked("-m", "method.rank=2", "launcher.slots=2", gpus=4).trials
    assert (trial.launcher.nproc, trial.train.batch_size) == (2, 16)


def test_composing_leaves_hydra_and_the_folder_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(tmp_path)
    config()
    assert not GlobalHydra.instance().is_initialized()
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []
