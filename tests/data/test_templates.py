"""What is learned, through the template of every family: the answers with their end tokens, and nothing else."""

from __future__ import annotations

import unicodedata
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glmexp.config.errors import DataError
from glmexp.data.encode import Encoding, encode, encode_rows, fit
from glmexp.data.readers import Row
from glmexp.data.template import Message
from glmexp.model import chat
from glmexp.model.renderer import shown

from .conftest import FAMILIES

MARKS = [
    "<|im_end|>",
    "[gMASK]",
    "<|user|>",
    "</s>",
    "sop",
    "<eop>",
    "<|im_start|>assistant\n",
    "[Round 1]",
    "\n\n",
    "  ",
    "\u2581",  # SentencePiece's own sign for a space
]
texts = st.lists(
    st.one_of(
        st.sampled_from(MARKS),
        st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
).map("".join)
answers = texts.filter(lambda text: bool(text.strip()))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(answers)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(answers)})
        messages.append({"role": "assistant", "content": draw(answers)})
    return messages


def learned_runs(ids: list[int], supervised: list[bool]) -> list[list[int]]:
    pairs = groupby(zip(ids, supervised, strict=True), key=lambda pair: pair[1])
    return [[index for index, _ in run] for flag, run in pairs if flag]


def text_ids(template: Any, text: str) -> list[int]:
    if template.tokenizer.__class__.__name__.startswith("Qwen"):
        return template.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return chat.encode_text(template.tokenizer, text)


def expected_run(family: str, template: Any, answer: str, last: bool) -> list[int]:
    """Ids that one answer must be learned as."""
    tokenizer = template.tokenizer
    ids = text_ids(template, answer)
    if family == "chatglm":
        return [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    if family == "chatglm3":
        end = tokenizer.eos_token_id if last else tokenizer.get_command("<|user|>")
        return [*text_ids(template, "\n"), *ids, end]
    return [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations())
def test_learned_are_exactly_the_answers_with_their_end_tokens(
    renderers: dict[str, Any], family: str, messages: list[Message]
) -> None:
    template = renderers[family]
    turns = [message["content"] for message in messages if message["role"] == "assistant"]
    for supervise in ("last", "all"):
        rows = encode_rows([Row(messages, 1, "1")], Encoding(100_000, supervise), template)  # type: ignore[arg-type]
        assert not rows.faults
        many = supervise == "all" and template.one_answer_a_row
        assert len(rows.columns["length"]) == (len(turns) if many else 1)
    for supervise, wanted in (("last", turns[-1:]), ("all", turns)):
        if supervise == "all" and template.one_answer_a_row:
            continue
        example = encode(messages, Encoding(100_000, supervise), template)  # type: ignore[arg-type]
        runs = learned_runs(example.ids, example.supervised)
        last = [place == len(wanted) - 1 for place in range(len(wanted))]
        assert runs == [expected_run(family, template, text, end) for text, end in zip(wanted, last, strict=True)]
        assert example.ids[: example.prompt_length] == template.prompt(messages[:-1])
    if family != "chatglm":  # v1's vocabulary file normalises: there the ids above are all that can be said
        run = [index for index in runs[-1] if not template.is_special(index)]
        text = template.tokenizer.decode(run)
        head = "\n" if family == "chatglm3" else ""
        found = text.removeprefix(head).removeprefix(" ") if head else text
        # SentencePiece writes a space as U+2581 and reads a typed one as a space, in the releases as here.
        said = turns[-1] if family == "qwen2" else turns[-1].replace("\u2581", " ")
        assert unicodedata.normalize("NFC", found) == unicodedata.normalize("NFC", said)


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_that_a_user_types_open_no_turn(renderers: dict[str, Any], family: str) -> None:
    template = renderers[family]
    plain = encode([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], ENCODING, template)
    typed = "".join(MARKS)
    messages: list[Message] = [{"role": "user", "content": typed}, {"role": "assistant", "content": f"{typed}z"}]
    example = encode(messages, ENCODING, template)
    marks = [index for index in example.ids if template.is_special(index)]
    assert marks == [index for index in plain.ids if template.is_special(index)]


ENCODING = Encoding(100_000, "last")


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_that_do_not_count_have_no_text_and_an_empty_answer_is_empty(
    renderers: dict[str, Any], family: str
) -> None:
    template = renderers[family]
    ids = text_ids(template, "good day")
    assert template.answer([-100, *ids, -100, template.stop_ids[0], -100]) == "good day"
    assert template.answer([-100, -100]) == template.answer([]) == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_start_with_their_marks_once(renderers: dict[str, Any], family: str) -> None:
    template = renderers[family]
    example = encode([{"role": "user", "content": "甲"}, {"role": "assistant", "content": "乙"}], ENCODING, template)
    text = shown(template, example.ids)
    for mark in ("[gMASK]", "sop"):
        assert text.count(mark) == (0 if family == "qwen2" else 1), text
    assert text.count("<|im_start|>") == (3 if family == "qwen2" else 0)


def test_tool_calls_are_learned_and_observations_are_not(renderers: dict[str, Any]) -> None:
    template = renderers["chatglm3"]
    messages: list[Message] = [
        {"role": "system", "content": "use tools", "tools": [{"name": "add"}]},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "metadata": "add", "content": "tool_call(a=1, b=1)"},
        {"role": "observation", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    example = encode(messages, Encoding(10_000, "all"), template)
    runs = [shown(template, run) for run in learned_runs(example.ids, example.supervised)]
    assert runs == ["add\n tool_call(a=1, b=1)<|observation|>", "\n two</s>"]
    for family in ("chatglm", "chatglm2", "qwen2"):
        with pytest.raises(DataError):
            encode(messages, ENCODING, renderers[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_too_long_loses_turns_then_the_middle_of_the_question(renderers: dict[str, Any], family: str) -> None:
    template = renderers[family]
    messages: list[Message] = [
        {"role": "user", "content": "old question " * 30},
        {"role": "assistant", "content": "old answer"},
        {"role": "user", "content": "first " + "x" * 400 + " last"},
        {"role": "assistant", "content": "answer"},
    ]
    whole = encode(messages, ENCODING, template)
    fitted = fit(messages, Encoding(140, "last"), template)
    assert fitted is not None
    example, done = fitted
    assert done == ["the first turns are left out", "the prompt is cut"]
    assert len(example.ids) <= 140
    question = example.messages[-2]["content"]
    assert question.startswith("first x") and question.endswith("x last")  # noqa: PT018
    assert learned_runs(example.ids, example.supervised) == learned_runs(whole.ids, whole.supervised)
    assert fit([messages[2], {"role": "assistant", "content": "word " * 300}], Encoding(140, "last"), template) is None


def test_no_turn_is_lost_where_nothing_is_too_long(renderers: dict[str, Any]) -> None:
    messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    fitted = fit(messages, ENCODING, renderers["chatglm3"])
    assert fitted is not None
    assert (fitted[0].messages, fitted[1]) == (messages, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprints_tell_templates_apart(renderers: dict[str, Any], family: str) -> None:
    others = {one.fingerprint for name, one in renderers.items() if name != family}
    assert renderers[family].fingerprint not in others
