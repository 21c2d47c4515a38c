"""Values in the quotes that Hydra's override grammar and the shell need."""

from __future__ import annotations

import re
import shlex


def quoted(value: str) -> str:
    """``value`` in the quotes of Hydra's grammar, read back as itself."""
    inner = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", value)
    inner = re.sub(r"(\\+)$", lambda match: match[1] * 2, inner)
    return f"'{inner}'"


def for_shell(word: str) -> str:
    """One shell word; in double quotes where that is enough, since the value itself stands in single ones."""
    return f'"{word}"' if not re.search(r'["$`\\!]', word) else shlex.quote(word)


def typed(key: str, value: object) -> str:
    """``KEY=VALUE`` as it is typed at a shell: in quotes where Hydra's grammar or the shell needs them."""
    text = str(value)
    return f"{key}={text}" if re.fullmatch(r"[\w./+-]+", text) else for_shell(f"{key}={quoted(text)}")
