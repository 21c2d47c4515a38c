"""Preparing a large file shows how far it is: a bar on a terminal, lines in a log; and nothing for a small one."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from glmexp.data import files, progress, workers
from tests.data.fakes import read_rows

ROWS = 300


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(workers, "LARGE_BYTES", 0)
    monkeypatch.setattr(files, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(files, "BLOCK_RECORDS", 50)
    return tmp_path / "rows.jsonl"


def rows() -> list[dict[str, str]]:
    return [{"prompt": f"q{number}", "response": "a"} for number in range(ROWS)]


@pytest.mark.parametrize("kind", ["lines", "array"])
def test_a_terminal_gets_a_bar_with_the_rate(large: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows())
    large.write_text(lines if kind == "lines" else json.dumps(rows()))
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(progress, "REFRESH_EVERY_S", 0.0)
    read_rows(str(large), prepare_workers=1)
    text = screen.getvalue()
    assert "preparing rows.jsonl" in text
    assert "100%" in text
    assert f"{ROWS} rows, " in text
    assert "rows/s" in text
    shares = {f"{share}%" for share in range(1, 100)}
    found = any(share in text for share in shares)
    assert found == (kind == "lines"), "an array is read whole: nothing tells how much of it is done"


def test_a_log_file_gets_lines_now_and_then(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    read_rows(str(large), prepare_workers=2)
    first, *between, last = capsys.readouterr().err.splitlines()
    assert first == f"preparing {large} (0 MB, 2 processes)"
    assert between == [], "half a minute has not passed"
    assert last.startswith(f"prepared {large}: {ROWS} rows, ")
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    read_rows(str(large), prepare_workers=1)
    _, *between, _ = capsys.readouterr().err.splitlines()
    shares = [int(line.split("%")[0]) for line in between]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert len(shares) > 3


def test_a_small_file_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    read_rows(str(file))
    assert capsys.readouterr().err == ""
