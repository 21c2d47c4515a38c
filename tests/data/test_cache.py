"""Prepared once: used again while nothing has changed, made anew when anything has, whole or not there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glmexp.config.errors import DataError
from glmexp.data import prepare as room
from glmexp.data import workers
from glmexp.data.prepare import prepare
from glmexp.data.store import Store

from .fakes import CharacterTemplate, named, section

Counted = Callable[..., Any]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    build: Counted = room._build

    def counted(file: Any, *rest: Any) -> None:
        made.append(file.path)
        build(file, *rest)

    monkeypatch.setattr(room, "_build", counted)
    return made


def rows_file(path: Path, answer: str, count: int = 4) -> str:
    rows = ({"prompt": f"q{number}", "response": f"{answer}{number}"} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answers(folder: Path, path: str, template: Any = None, **settings: object) -> list[str]:
    config = section(path, cache_dir=str(folder / "cache"), **settings)
    return [row.answer for row in prepare(config, 0, template or CharacterTemplate()).train]


def test_the_second_run_prepares_nothing_and_says_the_same(tmp_path: Path, builds: list[str]) -> None:
    path = rows_file(tmp_path / "rows.jsonl", "a")
    config = section(path, cache_dir=str(tmp_path / "cache"))
    first, second = (prepare(config, 0, CharacterTemplate()) for _ in range(2))
    assert len(builds) == 1
    assert second.report == first.report
    assert second.sha256 == first.sha256
    assert [row.text for row in second.train] == [row.text for row in first.train]


def test_a_file_edited_in_place_is_prepared_again(tmp_path: Path) -> None:
    """Same path, size and time stamp: only the contents tell."""
    path = rows_file(tmp_path / "rows.jsonl", "old")
    before = os.stat(path)
    assert answers(tmp_path, path)[0] == "old0"
    first = prepare(section(path, cache_dir=str(tmp_path / "cache")), 0, CharacterTemplate()).sha256
    rows_file(tmp_path / "rows.jsonl", "new")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert answers(tmp_path, path)[0] == "new0"
    assert prepare(section(path, cache_dir=str(tmp_path / "cache")), 0, CharacterTemplate()).sha256 != first


class OtherTemplate(CharacterTemplate):
    fingerprint = "other"


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 32},
        {"supervise": "all"},
        {"on_error": "skip"},
        {"columns": named(prompt="prompt", answer="response")},
        {"format": "adgen", "columns": named(prompt="prompt", answer="response")},
        {"template": OtherTemplate()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_could_change_the_ids_makes_them_anew(
    tmp_path: Path, builds: list[str], change: dict[str, Any]
) -> None:
    path = rows_file(tmp_path / "rows.jsonl", "a")
    answers(tmp_path, path)
    answers(tmp_path, path, **change)
    assert len(builds) == 2


@pytest.mark.parametrize("change", [{"shuffle": False}, {"packing": True}, {"num_workers": 3}, {"holdout": 1}])
def test_what_comes_after_does_not(tmp_path: Path, builds: list[str], change: dict[str, Any]) -> None:
    path = rows_file(tmp_path / "rows.jsonl", "a")
    answers(tmp_path, path)
    answers(tmp_path, path, **change)
    assert len(builds) == 1


def test_another_version_of_the_code_prepares_anew(
    tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows_file(tmp_path / "rows.jsonl", "a")
    answers(tmp_path, path)
    monkeypatch.setattr(room, "code_version", lambda: "next")
    answers(tmp_path, path)
    assert len(builds) == 2


@pytest.mark.parametrize("name", ["tokens.bin", "texts.bin", "about.json"])
def test_a_damaged_cache_is_prepared_again(tmp_path: Path, name: str) -> None:
    path = rows_file(tmp_path / "rows.jsonl", "a")
    first = answers(tmp_path, path)
    (found,) = (tmp_path / "cache").glob(f"*/{name}")
    found.write_bytes(found.read_bytes()[:-3])
    assert answers(tmp_path, path) == first


def test_a_run_that_died_while_preparing_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", "a")
    first = answers(tmp_path, path)
    (whole,) = (one for one in (tmp_path / "cache").iterdir() if one.is_dir())
    whole.rename(whole.with_name(f".{whole.name}"))
    assert answers(tmp_path, path) == first


def test_a_broken_file_leaves_no_store(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", "a")
    with (tmp_path / "rows.jsonl").open("a") as stream:
        stream.write("{broken\n")
    with pytest.raises(DataError):
        answers(tmp_path, path)
    assert [one.suffix for one in (tmp_path / "cache").iterdir()] == [".lock"]


def test_ranks_that_start_together_prepare_once(tmp_path: Path, builds: list[str]) -> None:
    path = rows_file(tmp_path / "rows.jsonl", "a")
    found: list[list[str]] = []
    ranks = [threading.Thread(target=lambda: found.append(answers(tmp_path, path))) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(builds) == 1
    assert found == [["a0", "a1", "a2", "a3"]] * 4


def test_processes_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": f"question {number} " + "x" * (number % 70), "response": f"a{number}" if number % 11 else ""}
        for number in range(4000)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("glmexp.data.files.BLOCK_BYTES", 20_000)
    alone = prepare(section(str(path), cache_dir=str(tmp_path / "one"), holdout=7), 3, CharacterTemplate())
    monkeypatch.setattr(workers, "LARGE_BYTES", 0)
    config = section(str(path), cache_dir=str(tmp_path / "many"), holdout=7, prepare_workers=2)
    shared = prepare(config, 3, CharacterTemplate())
    assert shared.report == alone.report
    assert "3636 used, 364 dropped (empty answer: lines 1, 12, 23, 34," in shared.report[0]
    for one, other in ((alone.train, shared.train), (alone.eval, shared.eval)):
        assert [row.text for row in one] == [row.text for row in other]
        assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in zip(one, other, strict=True))


def test_errors_of_all_processes_are_reported_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    lines = ['{"prompt": "q", "response": "a"}\n'] * 3000
    lines[1] = lines[2900] = "{\n"
    path.write_text("".join(lines))
    monkeypatch.setattr("glmexp.data.files.BLOCK_BYTES", 20_000)
    monkeypatch.setattr(workers, "LARGE_BYTES", 0)
    with pytest.raises(DataError) as caught:
        prepare(section(str(path), prepare_workers=2), 0, CharacterTemplate())
    assert [problem.where for problem in caught.value.problems] == [f"{path}:2", f"{path}:2901"]


def test_examples_are_read_from_a_map_of_the_file(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", "a")
    train = prepare(section(path, cache_dir=str(tmp_path / "cache")), 0, CharacterTemplate()).train
    (folder,) = (one for one in (tmp_path / "cache").iterdir() if one.is_dir())
    assert isinstance(Store(folder)._tokens, np.memmap)
    assert train.lengths.tolist() == [len(row.input_ids) for row in train]
    assert [row.answer for row in train[1:3]] == ["a1", "a2"]
    assert train.shortest(1) == [train[0].input_ids.tolist()]
