"""Secrets stay out of what is written: configurations, trackers, failure records, logs.

A name tells a secret (``WANDB_API_KEY``, ``tracker.password``), a URL with ``user:password@`` does, and the values of
secret environment variables are looked for in texts. Ranks get what config.yaml lacks through the environment.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

HIDDEN = "<hidden>"
VARIABLE = "GLMEXP_SECRETS"
"""Dotted keys and values that config.yaml does not hold, as JSON, in the environment of a run's processes."""
_SECRET = re.compile(r"(token|secret|password|passwd|credentials?|api_?key)$", re.IGNORECASE)
_SPECIAL = re.compile(r"(?<![a-z])(pad|eos|bos|unk|mask|sep|cls)_token['\"]?\s*[=:]?\s*$", re.IGNORECASE)
"""A vocabulary's special token (``model.pad_token``), which is no secret."""
_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_ASSIGNED = re.compile(
    r"(?<![\w])((?:\w+[._-])*\w*(?:token|secret|passwo?r?d|api_?key|access_key)['\"]?\s*[=:]\s*)(['\"]?)([^\s'\",}]+)",
    re.IGNORECASE,
)
_SHORTEST = 6
"""A variable's value of fewer characters is not looked for in texts: it would be found by chance."""


def is_secret(name: str) -> bool:
    """Whether what has this name is not to be written: a word of the name says so (not ``add_tokens``)."""
    if _SPECIAL.search(name):
        return False
    words = re.split(r"[._-]", name)
    return any(_SECRET.search(word) for word in words) or words[-1].lower() == "key"


def redacted(tree: Any) -> Any:
    """A copy of a plain tree without its secrets."""
    if isinstance(tree, Mapping):
        return {
            name: HIDDEN if value and isinstance(value, str) and is_secret(str(name)) else redacted(value)
            for name, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return [redacted(value) for value in tree]
    return _URL.sub(HIDDEN, tree) if isinstance(tree, str) else tree


def text(words: str, environ: Mapping[str, str] = os.environ) -> str:
    """A text without secrets: those of URLs, of assignments and of this process's variables."""
    for name, value in environ.items():
        if name == VARIABLE:
            for secret in (one for one in json.loads(value).values() if isinstance(one, str)):
                words = words.replace(secret, HIDDEN)
        elif is_secret(name) and len(value) >= _SHORTEST:
            words = words.replace(value, HIDDEN)
    return _ASSIGNED.sub(_hide, _URL.sub(HIDDEN, words))


def _hide(found: re.Match[str]) -> str:
    return found[0] if _SPECIAL.search(found[1]) else f"{found[1]}{found[2]}{HIDDEN}"


def hand_on(tree: Mapping[str, Any], environ: MutableMapping[str, str] = os.environ) -> None:
    """Put what ``redacted`` takes out of a configuration into this process's environment, for its ranks."""
    lost = dict(_lost(tree, redacted(tree)))
    if lost:
        environ[VARIABLE] = json.dumps(lost)
    else:
        environ.pop(VARIABLE, None)


def restored(tree: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """A tree read from config.yaml with what ``hand_on`` has left for it."""
    for key, value in json.loads(environ.get(VARIABLE, "{}")).items():
        *folders, name = json.loads(key)
        place = tree
        for folder in folders:
            place = place.get(folder) if isinstance(place, dict) else None
        if isinstance(place, dict) and HIDDEN in str(place.get(name)):
            place[name] = value
    return tree


def _lost(tree: Any, shown: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(path as JSON, value) of each text or list that differs."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _lost(value, shown[name], (*path, str(name)))
    elif (isinstance(tree, str) and tree != shown) or (isinstance(tree, (list, tuple)) and list(tree) != shown):
        yield json.dumps(path), tree


class Formatter(logging.Formatter):
    """Log lines without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return text(super().format(record))
