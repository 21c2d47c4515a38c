"""What standard output cannot show is shown as its escape: no run ends because of a character."""

from __future__ import annotations

import io
import sys


def show_everything() -> None:
    """Before anything is printed. Standard error escapes what its encoding lacks by itself; standard output raises:
    for a Chinese answer under LANG=C, an emoji under GBK, a file name that is no UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
