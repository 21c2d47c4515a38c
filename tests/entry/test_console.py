from __future__ import annotations

import io
import os
import sys

import pytest

from glmexp.config.streams import show_everything
from glmexp.entry.console import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_command_is_copied_from_a_narrow_terminal_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    line = "  python -m glmexp entry=evaluate artifact.path=outputs/tiny-lora/2026-11-30_07-12-17"
    Screen(active=True).lines([line])
    assert terminal.getvalue() == line + "\n"


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "utf-8"])
def test_a_character_that_the_terminal_lacks_ends_no_run(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    show_everything()
    Screen(active=True).lines(["答案🚀 \udcff.jsonl"])
    sys.stdout.flush()
    assert written.getvalue() == "答案🚀 \udcff.jsonl\n".encode(encoding, errors="backslashreplace")


def test_a_reader_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    end, start = os.pipe()
    os.close(end)
    with os.fdopen(start, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(BrokenPipeError, match="nobody reads standard output any more"):
            Screen(active=True).lines(["step 1"])
        os.dup2(os.open(os.devnull, os.O_WRONLY), start)  # what is still to be flushed goes there


def test_the_resumed_weights_are_not_called_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    screen, row = Screen(active=True), ("2+2", "4", "5", "4")
    screen.answers([row], 0)
    assert "held-out prompts: base against tuned" in capsys.readouterr().out
    screen.answers([row], 10)
    assert "held-out prompts: step 10 against tuned" in capsys.readouterr().out
