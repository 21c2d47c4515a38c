"""Texts as units for scores: Chinese by character or by word (jieba), everything else by word."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_UNITS = re.compile(rf"[{CHINESE}]|[^\W_{CHINESE}]+")
_HAS_CHINESE = re.compile(rf"[{CHINESE}]")

Split = Callable[[str], list[str]]


def by_character(text: str) -> list[str]:
    """Each Chinese character, each run of other letters and digits; lower case, without punctuation."""
    return _UNITS.findall(text.lower())


def by_word(text: str) -> list[str]:
    """Words: Chinese as jieba cuts it, others as in ``by_character``."""
    if not _HAS_CHINESE.search(text):
        return by_character(text)
    words = []
    for word in _cutter()(text.lower()):
        words += [word] if _HAS_CHINESE.search(word) else by_character(word)
    return words


@cache
def _cutter() -> Split:
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jieba's source has invalid escapes and imports pkg_resources
        import jieba
    jieba.setLogLevel(logging.WARNING)
    tokenizer = jieba.Tokenizer()
    return tokenizer.lcut
