"""What a row looks like: which of the known forms it has, and in which columns."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from glmexp.config.data_schema import Columns, Format
from glmexp.config.errors import DataError, Problem

PAIRS: tuple[tuple[str, str | None, str], ...] = (
    ("instruction", "input", "output"),
    ("prompt", None, "response"),
    ("prompt", None, "answer"),
    ("prompt", None, "completion"),
    ("question", None, "answer"),
    ("query", None, "response"),
    ("query", None, "answer"),
    ("content", None, "summary"),
    ("instruction", "input", "response"),
)
"""(prompt, input, answer) as public instruction sets name them, most usual first."""
TURNS = ("messages", "conversations", "conversation")
DEFAULTS: dict[str, Columns] = {
    "alpaca": Columns("instruction", "input", "output", "system", "history", None, None),
    "adgen": Columns("content", None, "summary", "system", "history", None, None),
    "sharegpt": Columns(None, None, None, "system", None, "conversations", "tools"),
    "messages": Columns(None, None, None, "system", None, "messages", "tools"),
    "cmrc2018": Columns(None, None, None, None, None, None, None),
    "squad": Columns(None, None, None, None, None, None, None),
}
NEEDED: dict[str, tuple[str, ...]] = {
    "alpaca": ("prompt", "answer"),
    "adgen": ("prompt", "answer"),
    "sharegpt": ("messages",),
    "messages": ("messages",),
}
USUAL = {
    "prompt": (*dict.fromkeys(prompt for prompt, _, _ in PAIRS), "指令", "问题", "提问", "提示"),
    "input": ("input", "输入"),
    "answer": (*dict.fromkeys(answer for _, _, answer in PAIRS), "回答", "答案", "输出", "回复"),
}
"""Names under which a column is looked for that a message proposes; none is taken without the user's word."""
QUESTIONS = ("data", "paragraphs", "qas", "answers")
"""Keys of which one is in every row of a reading comprehension set."""


@dataclass(frozen=True)
class Form:
    """A format with the columns that it is read from; null ones are not there."""

    format: Format
    columns: Columns

    @cached_property
    def names(self) -> dict[str, None]:
        """The columns, in the order of the schema."""
        return {name: None for name in vars(self.columns).values() if name is not None}

    @cached_property
    def words(self) -> str:
        """As messages show it."""
        return f"{self.format} ({', '.join(self.names)})" if self.names else self.format

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Forms:
    """How the rows of one file are read."""

    wanted: Columns
    """What the user named."""
    fixed: Form | None
    """The form of all rows, where the user chose one; else each row is looked at."""
    seen: tuple[Form, ...] = ()
    """Forms among the first rows, for rows that lack a column."""
    _known: dict[tuple[str, ...], Form | None] = field(default_factory=dict, compare=False, repr=False)
    """Names of a row whose values are all text, to its form: nothing else decides it, and most rows are alike."""

    def of(self, value: dict[str, Any]) -> Form | None:
        """The form of a row, or None where it cannot be told or lacks what makes its form."""
        if not all(one is None or type(one) is str for one in value.values()):
            return self._look(value)
        names = tuple(value)
        if names not in self._known:
            self._known[names] = self._look(value)
        return self._known[names]

    def _look(self, value: dict[str, Any]) -> Form | None:
        if self.fixed is not None:
            needed = NEEDED.get(self.fixed.format, ())[:1]
            there = all(getattr(self.fixed.columns, key) in value for key in needed)
            return present(self.fixed, value) if there else None
        found = recognise(value, self.wanted)
        if found is not None:
            return found
        likely = (form for form in self.seen if (form.columns.prompt or form.columns.messages) in value)
        return next((present(form, value) for form in likely), None)


def resolve(path: str, sample: Sequence[dict[str, Any]], wanted: Columns, format_name: Format | None) -> Forms:
    """Decide how a file is read, from its first rows. Raises DataError that names the columns found and the options."""
    names = list(dict.fromkeys(name for value in sample for name in value))
    if format_name is None and (wanted.prompt is None or wanted.answer is None):
        _check_named(path, names, wanted, {})
        forms: list[Form] = []
        for value in (*sample, dict.fromkeys(names, "")):
            form = recognise(value, wanted)
            if form is not None and form not in forms:
                forms.append(form)
        if not forms:
            raise _unknown(path, names, wanted)
        return Forms(wanted, None, tuple(forms))
    if format_name is None:
        format_name = "adgen"
    default = DEFAULTS[format_name]
    columns = Columns(**{key: getattr(wanted, key) or name for key, name in vars(default).items()})
    _check_named(path, names, wanted, {key: getattr(columns, key) for key in NEEDED.get(format_name, ())})
    return Forms(wanted, Form(format_name, columns))


def _check_named(path: str, names: list[str], wanted: Columns, needed: dict[str, str]) -> None:
    named = {key: name for key, name in vars(wanted).items() if name is not None} | needed
    problems = []
    for key, name in named.items():
        if name in names:
            continue
        near = _near(names, (name, *USUAL.get(key, ())))
        fix = f"did you mean data.columns.{key}={_typed(near)}?" if near else f"set data.columns.{key} to one of them"
        instead = "" if key in ("prompt", "answer", "messages") else f", or data.columns.{key}=null if there is none"
        message = f"{name!r} is not a column of {path}: its columns are {_listed(names)}"
        problems.append(Problem(f"data.columns.{key}", message, fix + instead))
    if problems:
        raise DataError(*problems)


def _unknown(path: str, names: list[str], wanted: Columns) -> DataError:
    needed = [key for key in ("prompt", "answer") if getattr(wanted, key) is None]
    proposed = [key for key in USUAL if getattr(wanted, key) is None]
    near = {key: _near(names, USUAL[key]) for key in proposed}
    if all(near[key] for key in needed):
        words = " ".join(f"data.columns.{key}={_typed(name)}" for key, name in near.items() if name)
        fix = f"did you mean {words}?"
    else:
        fix = "set " + " and ".join(f"data.columns.{key}" for key in needed)
    return DataError(Problem(path, f"cannot tell the question and the answer among its columns {_listed(names)}", fix))


def _near(names: list[str], usual: Sequence[str]) -> str | None:
    """The column that is called nearly like one of the usual names: another case, width or letter, a blank."""
    plain = {unicodedata.normalize("NFKC", name).strip().lower(): name for name in reversed(names)}
    for word in usual:
        found = difflib.get_close_matches(word, list(plain), n=1, cutoff=0.8)
        if found:
            return plain[found[0]]
    return None


def _listed(names: list[str]) -> str:
    """Columns for a message; blanks at the ends and signs that nobody sees are shown."""
    return (
        ", ".join(name if name.isprintable() and name == name.strip() != "" else repr(name) for name in names)
        or "(none)"
    )


def _typed(name: str) -> str:
    """A column as the command line takes it."""
    return name if re.fullmatch(r"\w+", name) else f"\"'{name}'\""


def recognise(value: dict[str, Any], wanted: Columns) -> Form | None:
    """The form that a row has by itself. ``wanted`` names some of the columns."""
    if wanted.prompt is None and wanted.answer is None:
        names = TURNS if wanted.messages is None else (wanted.messages,)
        for name in names:
            turns = value.get(name)
            if isinstance(turns, list) and turns and isinstance(turns[0], dict):
                kind: Format = "sharegpt" if "from" in turns[0] else "messages"
                columns = replace(DEFAULTS[kind], messages=name)
                return present(Form(kind, _named(columns, wanted)), value)
        if _is_question(value):
            return Form("cmrc2018" if _chinese(value) else "squad", DEFAULTS["squad"])
    for prompt, extra, answer in PAIRS:
        question = prompt if wanted.prompt is None else wanted.prompt
        reply = answer if wanted.answer is None else wanted.answer
        if question == reply or question not in value or reply not in value:
            continue
        # The further material belongs to its own pair: with a named prompt it is only used when it is named too.
        material = extra if wanted.prompt is None else None
        columns = Columns(question, wanted.input or material, reply, "system", "history", None, None)
        pair: Format = "alpaca" if question == "instruction" else "adgen"
        return present(Form(pair, _named(columns, wanted)), value)
    return None


def _named(columns: Columns, wanted: Columns) -> Columns:
    return Columns(**{key: getattr(wanted, key) or name for key, name in vars(columns).items()})


def present(form: Form, value: dict[str, Any]) -> Form:
    """The form without the optional columns that the row lacks; a guessed history must be a list."""
    needed = NEEDED.get(form.format, ())
    columns = {key: name if key in needed or name in value else None for key, name in vars(form.columns).items()}
    if columns["history"] == "history" and not isinstance(value.get("history"), list | str | None):
        columns["history"] = None
    return Form(form.format, Columns(**columns))


def _is_question(value: dict[str, Any]) -> bool:
    if isinstance(value.get("answers"), list | dict):
        return "context" in value and "question" in value
    return any(isinstance(value.get(name), list) for name in QUESTIONS[:3])


def _chinese(value: Any) -> bool:
    """Whether the first long text in a nested value has Chinese characters."""
    for text in _texts(value):
        if len(text) >= 20:
            return any("\u4e00" <= sign <= "\u9fff" for sign in text)
    return False


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
