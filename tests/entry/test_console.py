from __future__ import annotations

import io
import sys

import pytest

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
