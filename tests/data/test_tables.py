"""Parquet and hub data sets: text stays text, everything else is named."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from glmexp.config.errors import DataError
from glmexp.data import tables
from tests.cli import glmexp

from .fakes import pairs, read_rows


def parquet(folder: Path, name: str = "rows.parquet", **columns: list[Any]) -> str:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)
    return str(folder / name)


def test_texts_of_a_parquet_file_stay_as_they_are(tmp_path: Path) -> None:
    values = ["007", "2024-05-01", "NA", None]
    read = read_rows(parquet(tmp_path, prompt=["q"] * 4, response=values))
    assert pairs(read) == [("q", "007"), ("q", "2024-05-01"), ("q", "NA")]
    assert "4 rows read, 3 used, 1 dropped (empty answer: row 4)" in read.report[0]


def test_typed_columns_of_a_parquet_file_are_named_and_not_turned_into_text(tmp_path: Path) -> None:
    path = parquet(tmp_path, prompt=["q"], response=[datetime.date(2024, 5, 1)])
    with pytest.raises(DataError, match=r"rows\.parquet: row 1: 'response' must be text, found a date"):
        read_rows(path)


def test_lists_of_turns_in_a_parquet_file_are_conversations(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    assert pairs(read_rows(parquet(tmp_path, messages=turns))) == [("q", "a")]


def test_a_parquet_file_is_known_by_its_contents_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path, "rows.data", prompt=["q"], response=["a"])
    assert pairs(read_rows(path)) == [("q", "a")]
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:-20])
    with pytest.raises(DataError, match=r"rows\.data: broken Parquet: "):
        read_rows(path)


def test_a_hub_data_set_is_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    parquet(folder, "train.parquet", question=["1", "2"], answer=["a", "b"])
    read = read_rows(f"hub:{folder}:train")
    assert pairs(read) == [("1", "a"), ("2", "b")]
    with pytest.raises(DataError, match=r"hub:.*:nosuch: cannot be loaded: .*nosuch"):
        read_rows(f"hub:{folder}:nosuch")
    with pytest.raises(DataError, match="names no split of a hub data set"):
        read_rows("hub:owner/name")


def test_two_ranks_that_fetch_a_hub_data_set_at_once_do_not_write_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    parquet(folder, "train.parquet", question=["1", "2"], answer=["a", "b"])
    plain, others = datasets.Dataset.to_parquet, []

    def to_parquet(rows: Any, path: str) -> Any:
        written = plain(rows, path)
        if not others:  # the other rank came while this one wrote, and is done first
            others.append(path)
            others.append(tables.from_hub(f"hub:{folder}:train"))
        return written

    monkeypatch.setattr(datasets.Dataset, "to_parquet", to_parquet)
    found = tables.from_hub(f"hub:{folder}:train")
    assert found == others[1]
    assert [file.name for file in found[1].iterdir()] == ["rows.parquet"]
    assert pairs(read_rows(f"hub:{folder}:train")) == [("1", "a"), ("2", "b")]


@pytest.mark.parametrize(
    ("variable", "value", "asked"),
    [
        ("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE=1 keeps from"),
        ("HF_ENDPOINT", "http://192.0.2.1", "(http://192.0.2.1) does"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_a_mistake_with_a_way_out(
    variable: str, value: str, asked: str, tmp_path: Path
) -> None:
    settings = {"HF_HOME": str(tmp_path / "hub"), variable: value}
    words = ("entry=inspect", "data.train_file=hub:nobody/nothing:train")
    done = glmexp(*words, folder=tmp_path, timeout_s=60, **settings)
    assert done.returncode == 2
    assert "hub:nobody/nothing:train: it was not fetched before, and " in done.stderr
    assert asked in done.stderr
    assert "-> download it and name its file" in done.stderr
    assert not (tmp_path / "outputs").exists()
    assert "Traceback" not in done.stderr
