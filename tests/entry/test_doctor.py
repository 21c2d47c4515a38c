"""doctor.explain tells every option there is: meaning, unit, range, values, who set it; at once and without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from glmexp.config.errors import ConfigError
from glmexp.config.explain import explain
from glmexp.config.nearest import keys
from tests.cli import environment
from tests.config.helpers import asked, ds_file, refusal


def _told(key: str, *words: str) -> str:
    request = asked("entry=doctor", f"doctor.explain={key}", *words, gpus=1)
    return explain(key, request.trials[0], request.origins)


def test_elements_come_with_their_bytes_and_the_file_that_set_them() -> None:
    assert _told("zero.reduce_bucket_size") == (
        "zero.reduce_bucket_size = 200000000\n"
        "  meaning   Elements reduced at a time (stages 1 to 3).\n"
        "  unit      elements; here 200,000,000 x 2 bytes (bf16) = 400,000,000 bytes = 381.5 MiB\n"
        "  allowed   a whole number of at least 1, or null\n"
        "  default   stage0 null, stage1 200000000, stage2 200000000, stage3 200000000\n"
        "  set by    conf/zero/stage2.yaml\n"
        "  DeepSpeed zero_optimization.reduce_bucket_size"
    )
    assert "x 4 bytes (fp32) = 800,000,000 bytes" in _told("zero.reduce_bucket_size", "precision=fp32")


def test_who_set_a_value_is_told_for_overrides_files_and_repeated_values(tmp_path: Path) -> None:
    assert "set by    the command line" in _told("zero.reduce_bucket_size", "zero.reduce_bucket_size=5e8")
    assert "set by    conf/optim/adamw.yaml: ${method.lr}, set by conf/method/lora.yaml" in _told("optim.lr")
    file = ds_file(tmp_path / "mine.json", {"zero_optimization": {"overlap_comm": False}})
    told = _told("zero.overlap_comm", f"deepspeed.config_file={file}")
    assert f"set by    {file}: zero_optimization.overlap_comm" in told
    assert told.startswith("zero.overlap_comm = false")


def test_every_option_has_meaning_unit_range_and_default() -> None:
    request = asked("entry=doctor", "doctor.explain=zero.stage")
    for key in keys():
        lines = explain(key, request.trials[0], request.origins).splitlines()
        rows = {line.split()[0]: line[12:] for line in lines[1:]}
        assert lines[0].startswith(key), key
        assert rows["meaning"].endswith((".", "?")), key
        assert rows["unit"], key
        assert rows["allowed"], key
        assert rows["default"], key
        if key in request.origins:
            assert "set" in rows, key


def test_a_section_lists_its_keys_and_a_misspelt_one_is_answered() -> None:
    assert "zero.zero_hpz_partition_size" in _told("zero")
    request = asked("entry=doctor", "doctor.explain=zero.reduce_buket_size")
    with pytest.raises(ConfigError, match=r"did you mean zero\.reduce_bucket_size"):
        explain("zero.reduce_buket_size", request.trials[0], request.origins)


def test_what_to_give_is_said() -> None:
    assert refusal("entry=doctor") == (
        "config error:\n  doctor.explain: is null, and there is nothing to tell\n"
        "    -> doctor.explain=zero.reduce_bucket_size"
    )
    assert "doctor.explain: without effect under entry=train" in refusal("doctor.explain=zero.stage")


def test_it_loads_nothing_heavy_and_leaves_no_run_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from glmexp.__main__ import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'deepspeed', 'transformers', 'peft', 'wandb'} & set(sys.modules); sys.exit(code)"
    )
    words = ["entry=doctor", "doctor.explain=train.seed"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "train.seed = 42" in done.stdout
    assert not [*tmp_path.iterdir()]
