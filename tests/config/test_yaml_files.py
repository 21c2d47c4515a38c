"""Every YAML file that is shipped composes; a file that is added or lost shows in the count."""

from __future__ import annotations

from pathlib import Path

import pytest

from glmexp.config.nearest import conf_folder, shipped_options
from tests.config.helpers import asked, rows_file

OPTIONS = sorted((group, option) for group, options in shipped_options().items() for option in options)
STUDIES, COUNT_OF_STUDIES = "experiments", 12
EXTRA = {
    **{
        ("data", option): ["data.train_file={rows}"]
        for option in ("alpaca", "adgen", "sharegpt", "messages", "cmrc2018", "squad")
    },
    ("entry", "export"): ["artifact.path={folder}"],
    ("entry", "doctor"): ["doctor.explain=zero.stage"],
    ("offload", "all"): ["zero=stage3"],
    ("placement", "layers"): ["entry=evaluate"],
    ("placement", "tensor_parallel"): ["entry=evaluate", "launcher.nproc=2"],
    ("offload", "nvme"): ["zero=stage3", "offload.nvme_path={folder}"],
    ("precision", "fp16"): [],
    ("sweep", "search"): ["method.rank=2,4"],
}
COUNT = 67


@pytest.mark.parametrize(("group", "option"), [one for one in OPTIONS if one[0] != STUDIES])  # test_studies.py
def test_option_composes_and_passes_every_check(group: str, option: str, tmp_path: Path) -> None:
    values = {"rows": rows_file(tmp_path / "rows.jsonl"), "folder": str(tmp_path)}
    (tmp_path / "latest").touch()  # as artifact.path the folder is a DeepSpeed checkpoint
    words = [word.format(**values) for word in EXTRA.get((group, option), [])]
    flag = ["-m"] if group == "sweep" else []
    outside = 1 if (group, option) == ("launcher", "env") else None
    gpus = 2 if option == "tensor_parallel" else 1
    assert asked(*flag, f"{group}={option}", *words, gpus=gpus, world_size=outside).trials


def test_count_of_yaml_files() -> None:
    files = [path for path in conf_folder().rglob("*.yaml") if STUDIES not in path.relative_to(conf_folder()).parts]
    studies = list((conf_folder() / STUDIES).glob("*.yaml"))
    assert len(files) == len(set(files)) == 1 + sum(group != STUDIES for group, _ in OPTIONS)
    assert len(studies) == sum(group == STUDIES for group, _ in OPTIONS)
    assert (len(files), len(studies)) == (COUNT, COUNT_OF_STUDIES)


def test_options_of_a_group_set_the_same_keys() -> None:
    """Values-only groups: no option leaves a key to chance."""
    import yaml

    for group in ("zero", "offload", "precision", "launcher", "gather", "entry", "placement", "sweep"):
        keys = {
            frozenset(yaml.safe_load(path.read_text(encoding="utf-8")))
            for path in (conf_folder() / group).glob("*.yaml")
        }
        assert len(keys) == 1, group
