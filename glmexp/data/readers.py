"""Rows of conversation out of records: what is used, what is dropped and why. Every row is accounted for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from glmexp.config.errors import DataError, Problem
from glmexp.data.files import DataFile, Fault, Record, json_type
from glmexp.data.forms import Form, Forms
from glmexp.data.template import Message
from glmexp.data.turns import TurnError, read_history, read_turns, repair, shown, text_of, unpacked

EMPTY_ANSWER = "empty answer"
EMPTY_PROMPT = "empty prompt"
SHOWN_PLACES = 10
HISTORY_GAPS = "history pairs without text: left out"
QUESTION_TEXTS = {
    "cmrc2018": "阅读下面的短文，用短文中的原话回答问题。\n\n{context}\n\n问题：{question}",
    "squad": "Read the text and answer the question with words from it.\n\n{context}\n\nQuestion: {question}",
}


@dataclass(frozen=True)
class Row:
    """One conversation that ends with the answer to learn."""

    messages: list[Message]
    line: int
    """Line of the file it begins on; in tables without lines the number of the row."""
    label: str
    """The place as messages name it."""
    id: str | None = None
    answers: tuple[str, ...] = ()
    """All accepted answers, where the file gives several."""


@dataclass
class Outcome:
    """What became of some records. ``read`` is the number of used and dropped rows together."""

    unit: str
    read: int = 0
    used: int = 0
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> places."""
    repaired: dict[str, list[str]] = field(default_factory=dict)
    """What was done to used rows -> places."""
    problems: list[Problem] = field(default_factory=list)
    forms: dict[str, int] = field(default_factory=dict)
    """Form in words -> rows."""
    names: dict[str, None] = field(default_factory=dict)
    """Columns in order of first appearance."""
    taken: dict[str, None] = field(default_factory=dict)
    """Columns that were read."""

    def add(self, other: Outcome) -> None:
        """Count the other's rows in as well."""
        self.read += other.read
        self.used += other.used
        self.problems += other.problems
        self.names |= other.names
        self.taken |= other.taken
        for form, count in other.forms.items():
            self.forms[form] = self.forms.get(form, 0) + count
        for mine, more in ((self.dropped, other.dropped), (self.repaired, other.repaired)):
            for reason, places in more.items():
                mine.setdefault(reason, []).extend(places)

    def drop(self, reason: str, place: str) -> None:
        """Count a row that is not used."""
        self.dropped.setdefault(reason, []).append(place)

    def report(self, path: str) -> str:
        """``FILE: 6 rows read, 2 used, 4 dropped (empty answer: lines 2, 3, 4, 5); alpaca (instruction, output)``."""
        gone = sum(map(len, self.dropped.values()))
        assert self.used + gone == self.read, f"{path}: {self.used} used and {gone} dropped are not {self.read} read"
        text = f"{path}: {self.read} {'row' if self.read == 1 else 'rows'} read, {self.used} used, {gone} dropped"
        reasons = [f"{reason}: {places(self.unit, found)}" for reason, found in self.dropped.items()]
        parts = [f"{text} ({'; '.join(reasons)})" if reasons else text]
        parts += [f"{reason} ({places(self.unit, found)})" for reason, found in self.repaired.items()]
        if len(self.forms) == 1:
            parts += list(self.forms)
        else:
            parts.append("forms: " + ", ".join(f"{count} rows {form}" for form, count in self.forms.items()))
        unused = [shown(name) for name in self.names if name not in self.taken]
        if unused:
            parts.append("not used: " + ", ".join(unused))
        return "; ".join(parts)


def refuse_nothing(file: DataFile, outcome: Outcome) -> None:
    """Raise DataError where a whole file has no row to learn from."""
    if outcome.used == 0:
        reasons = "; ".join(f"{reason}: {places(file.unit, found)}" for reason, found in outcome.dropped.items())
        raise DataError(Problem(file.path, f"no example with an answer is left (0 of {outcome.read}; {reasons})"))


def refuse_all_held_out(path: str, rows: int, holdout: int | None) -> None:
    """Raise DataError where data.holdout leaves none of a whole file's rows to train on."""
    if holdout is not None and holdout >= rows:
        raise DataError(
            Problem(
                "data.holdout",
                f"{holdout} rows cannot be held out of the {rows} of {path}: none would be left to train on",
                f"set it to at most {rows - 1}" if rows > 1 else "name a data.eval_file",
            )
        )


def places(unit: str, found: list[str]) -> str:
    """``line 3`` or ``lines 3, 5 and 40 more``."""
    shown = ", ".join(found[:SHOWN_PLACES])
    more = f" and {len(found) - SHOWN_PLACES} more" if len(found) > SHOWN_PLACES else ""
    return f"{unit if len(found) == 1 else f'{unit}s'} {shown}{more}"


def read_records(
    file: DataFile, records: Iterable[Record | Fault], forms: Forms, on_error: Literal["error", "skip"]
) -> tuple[list[Row], Outcome]:
    """Rows of some records of a file and what became of the others."""
    outcome = Outcome(file.unit)
    rows: list[Row] = []
    for record in records:
        if isinstance(record, Fault):
            reject(file, outcome, record, str(record.line), on_error)
            continue
        for row in _rows(file, record, forms, outcome, on_error):
            rows.append(row)
            outcome.used += 1
            outcome.read += 1
    return rows, outcome


def reject(file: DataFile, outcome: Outcome, fault: Fault, label: str, on_error: str) -> None:
    """A row that is an error, or left out and counted where the user said so."""
    outcome.read += 1
    if on_error == "skip":
        # Without the place inside the line: the same fault is one reason, however many lines have it.
        outcome.drop(f"skipped, {fault.reason.partition(' (character ')[0]}", label)
        return
    where = f"{file.path}:{fault.line}" if file.unit != "row" else f"{file.path}: row {fault.line}"
    if file.unit == "record":  # json.dumps writes a whole array on one line
        where += f" (record {label.partition(' (')[0]})"
    outcome.problems.append(Problem(where, fault.reason, fault.fix))
    outcome.drop(fault.reason, label)


def _rows(file: DataFile, record: Record, forms: Forms, outcome: Outcome, on_error: str) -> Iterator[Row]:
    """The usable rows of one record; the others are counted."""
    label = _label(file, record)
    if not isinstance(record.value, dict):
        reason = f"a row must be a JSON object, found {json_type(record.value)}"
        reject(file, outcome, Fault(record.line, reason), label, on_error)
        return
    outcome.names.update(dict.fromkeys(record.value))
    form = forms.of(record.value)
    if form is None:
        reject(file, outcome, Fault(record.line, _other_form(record.value, forms), _SPLIT), label, on_error)
        return
    if form.format in QUESTION_TEXTS:
        yield from _questions(file, record, form, outcome, on_error)
        return
    outcome.taken.update(form.names)
    try:
        messages, repairs = _conversation(record.value, form)
    except TurnError as error:
        if error.drops:
            outcome.read += 1
            outcome.drop(error.reason, label)
        else:
            reject(file, outcome, Fault(record.line, error.reason, error.fix), label, on_error)
        return
    for done in repairs:
        outcome.repaired.setdefault(done, []).append(label)
    _count_form(outcome, form)
    yield Row(messages, record.line, label, _id(record.value))


_SPLIT = "put rows of different forms into files of their own, or leave data.format and data.columns to be found"


def _other_form(value: dict[str, Any], forms: Forms) -> str:
    first = forms.fixed or forms.seen[0]
    wanted = first.columns.prompt or first.columns.messages or "question"
    found = ", ".join(value) or "(none)"
    return f"the row has no {wanted!r}: its columns are {found}, and {first} is expected"


def _count_form(outcome: Outcome, form: Form) -> None:
    outcome.forms[str(form)] = outcome.forms.get(str(form), 0) + 1


def _id(value: dict[str, Any]) -> str | None:
    found = value.get("id")
    return shown(str(found)) if isinstance(found, str | int) else None


def _label(file: DataFile, record: Record) -> str:
    if file.unit != "record":
        return str(record.line)
    name = _id(record.value) if isinstance(record.value, dict) else None
    return f"{record.number} ({name}, line {record.line})" if name else f"{record.number} (line {record.line})"


def _conversation(value: dict[str, Any], form: Form) -> tuple[list[Message], list[str]]:
    """Messages of a row, and what was repaired. Raises TurnError."""
    columns = form.columns
    system = text_of(value[columns.system], f"{columns.system!r}") if columns.system else ""
    head: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
    if columns.messages is None:
        messages, repairs = _pair(value, form)
        return [*head, *messages], repairs
    keys = ("from", "value") if form.format == "sharegpt" else ("role", "content")
    turns = read_turns(value.get(columns.messages), columns.messages, *keys)
    if head and turns and turns[0]["role"] == "system":
        head = [{"role": "system", "content": f"{system}\n{turns[0]['content']}"}]
        turns = turns[1:]
    tools = unpacked(value[columns.tools]) if columns.tools else None
    if tools:
        if not isinstance(tools, list):
            raise TurnError(f"{columns.tools!r} must be a list of tools, found {json_type(tools)}")
        text_of(json.dumps(tools, ensure_ascii=False), f"{columns.tools!r}")
        first = head or [turn for turn in turns[:1] if turn["role"] == "system"]
        text = first[0]["content"] if first else ""
        turns = turns if head or not first else turns[1:]
        head = [{"role": "system", "content": text, "tools": tools}]
    return repair([*head, *turns])


def _pair(value: dict[str, Any], form: Form) -> tuple[list[Message], list[str]]:
    """A question and its answer, with earlier turns."""
    columns = form.columns
    assert columns.prompt is not None, "a form of pairs has a prompt"
    assert columns.answer is not None, "a form of pairs has an answer"
    prompt = text_of(value.get(columns.prompt), f"{columns.prompt!r}")
    extra = text_of(value.get(columns.input), f"{columns.input!r}") if columns.input else ""
    answer = text_of(value.get(columns.answer), f"{columns.answer!r}")
    history, gaps = read_history(value[columns.history], columns.history) if columns.history else ([], False)
    if not answer.strip():
        raise TurnError(EMPTY_ANSWER, drops=True)
    question = "\n".join(part for part in (prompt, extra) if part.strip())
    if not question:
        raise TurnError(EMPTY_PROMPT, drops=True)
    messages: list[Message] = [
        *history,
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    if history:
        messages, repairs = repair(messages)
    else:
        repairs = []
    return messages, [HISTORY_GAPS, *repairs] if gaps else repairs


def _questions(file: DataFile, record: Record, form: Form, outcome: Outcome, on_error: str) -> Iterator[Row]:
    """Rows of reading comprehension: one a question, with the first answer to learn and all answers to score by."""
    outcome.taken |= dict.fromkeys(record.value)
    try:
        found = list(question_rows(record.value))
    except TurnError as error:
        reject(file, outcome, Fault(record.line, error.reason, error.fix), _label(file, record), on_error)
        return
    for number, (name, context, question, answers) in enumerate(found, start=1):
        label = name if name and file.unit == "record" else f"{_label(file, record)} (question {name or number})"
        missing = not context.strip() or not question.strip()
        if missing or not answers:
            outcome.read += 1
            outcome.drop(EMPTY_PROMPT if missing else "no answer in the text", label)
            continue
        _count_form(outcome, form)
        text = QUESTION_TEXTS[form.format].format(context=context, question=question)
        turns: list[Message] = [{"role": "user", "content": text}, {"role": "assistant", "content": answers[0]}]
        yield Row(turns, record.line, label, name, tuple(answers))


_ASKING = {"data", "paragraphs", "qas", "question", "query_text"}
"""Keys of SQuAD's and CMRC 2018's objects, one of which leads to a question."""
Question = tuple[str | None, str, str, list[str]]
"""(id, context, question, answers)"""


def question_rows(value: dict[str, Any]) -> Iterator[Question]:
    """Questions of a SQuAD or CMRC 2018 file, of a part of one, or of a flat row. Raises TurnError."""
    for key in ("data", "paragraphs"):
        if isinstance(value.get(key), list):
            if value[key] and not any(isinstance(part, dict) and part.keys() & _ASKING for part in value[key]):
                raise TurnError(
                    f"an object with {key!r} is read as SQuAD's, and none in it has 'paragraphs', 'qas' or 'question'",
                    "the rows as an array, without an object around them",
                )
            for part in value[key]:
                if not isinstance(part, dict):
                    raise TurnError(f"{key!r} must be a list of objects, found {json_type(part)}")
                yield from question_rows(part)
            return
    context = text_of(value.get("context", value.get("context_text")), "'context'")
    questions = value.get("qas", [value])
    if not isinstance(questions, list) or not all(isinstance(one, dict) for one in questions):
        raise TurnError("'qas' must be a list of objects")
    for one in questions:
        name = one.get("id", one.get("query_id"))
        question = text_of(one.get("question", one.get("query_text")), "'question'")
        yield (None if name is None else shown(str(name))), context, question, _answers(one)


def _answers(one: dict[str, Any]) -> list[str]:
    if one.get("is_impossible") is True:
        return []
    found = one.get("answers", one.get("answer"))
    if isinstance(found, dict):
        found = found.get("text")
    if found is None or isinstance(found, str):  # one answer in place of a list of one
        found = [found]
    if not isinstance(found, list):
        raise TurnError(f"'answers' must be a list of answers, found {json_type(found)}")
    texts = [part.get("text") if isinstance(part, dict) else part for part in found]
    words = [text_of(text, "an answer") for text in texts]
    return list(dict.fromkeys(word for word in words if word.strip()))
