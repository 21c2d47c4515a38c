"""Conversations as people store them: speakers under many names, tool calls, and turns that do not alternate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from glmexp.data.files import json_type
from glmexp.data.template import Message

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "observation": "observation",
    "tool": "observation",
    "function": "observation",
    "function_call": "call",
    "tool_call": "call",
}
"""Name of a speaker in the file to its role here."""
JOINED = "turns of one speaker in a row: joined"
NO_QUESTION = "starts with an answer: that turn left out"
UNANSWERED = "ends without an answer: the last turns left out"
EMPTY_INSIDE = "an empty turn: the conversation ends before it"
NO_ANSWER = "no answer"


class TurnError(Exception):
    """A turn that cannot be used, and why. ``drops``: the conversation is left out; else it is an error."""

    def __init__(self, reason: str, fix: str = "", drops: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.fix, self.drops = reason, fix, drops


def text_of(value: Any, what: str) -> str:
    """``value`` if it is text, "" for null. Raises TurnError for anything else and for half a character."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TurnError(f"{what} must be text, found {json_type(value)}", "write it as text in double quotes")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TurnError(
            f"{what} holds half of a character (\\u{ord(value[error.start]):04x} at {error.start})",
            "write the character itself, or both halves of its \\u escape",
        ) from error
    return value


def shown(name: str) -> str:
    """A name for messages and files: half of a character is shown as its escape."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def read_turns(turns: Any, column: str, speaker: str, text: str) -> list[Message]:
    """Turns ``{speaker: ..., text: ...}`` with the roles of this project. Raises TurnError."""
    turns = unpacked(turns)
    if not isinstance(turns, list):
        raise TurnError(f"{column!r} must be a list of turns, found {json_type(turns)}")
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        what = f"turn {number} of {column!r}"
        if not isinstance(turn, dict) or speaker not in turn:
            found = f"an object with {', '.join(turn)}" if isinstance(turn, dict) else json_type(turn)
            raise TurnError(f"{what} must have {speaker!r} and {text!r}, found {found}")
        messages += _turn(turn, speaker, text, what)
    return messages


def _turn(turn: dict[str, Any], speaker: str, text: str, what: str) -> list[Message]:
    role = SPEAKERS.get(turn[speaker]) if isinstance(turn[speaker], str) else None
    if role is None:
        known = ", ".join(SPEAKERS)
        raise TurnError(f"unknown speaker {turn[speaker]!r} (known: {known})", f"rename {speaker!r}", drops=True)
    content = turn.get(text)
    if isinstance(content, list):
        content = _joined_parts(content, what)
    words = text_of(content, what)
    if role == "call":
        return [tool_call(unpacked(words), what)]
    calls = unpacked(turn.get("tool_calls"))
    if calls and role == "assistant":
        if not isinstance(calls, list):
            raise TurnError(f"'tool_calls' of {what} must be a list, found {json_type(calls)}")
        spoken: list[Message] = [{"role": "assistant", "content": words}] if words.strip() else []
        return spoken + [
            tool_call(call.get("function", call) if isinstance(call, dict) else call, what) for call in calls
        ]
    return [cast(Message, {"role": role, "content": words})]


def _joined_parts(parts: list[Any], what: str) -> str:
    """The text of a list of content parts (``{"type": "text", "text": ...}``)."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise TurnError(f"{what} has a part of type {kind!r}; only text can be learned", drops=True)
    return "".join(part["text"] for part in parts)


def tool_call(call: Any, what: str) -> Message:
    """A call as ChatGLM3 writes it: the tool's name behind the role, then Python code with the arguments."""
    arguments = unpacked(call.get("arguments", {})) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise TurnError(f"{what} is no tool call", 'write {"name": ..., "arguments": {...}}')
    name = text_of(call["name"], f"the name of the tool that {what} calls")
    words = text_of(", ".join(f"{key}={value!r}" for key, value in arguments.items()), what)
    return {"role": "assistant", "metadata": name, "content": f"```python\ntool_call({words})\n```"}


def unpacked(value: Any) -> Any:
    """Lists and objects that are written as JSON text (cells of a table, ``arguments``); other values as they are."""
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def read_history(value: Any, column: str) -> tuple[list[Message], bool]:
    """Earlier turns: pairs of question and answer, or messages. Also whether pairs without text were left out."""
    value = unpacked(value)
    if value is None or value == "":
        return [], False
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return read_turns(value, column, "role", "content"), False
    messages: list[Message] = []
    left_out = False
    for number, pair in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise TurnError(f"entry {number} of {column!r} is no pair of question and answer")
        question, answer = (text_of(part, f"entry {number} of {column!r}") for part in pair)
        if not question.strip() or not answer.strip():
            left_out = True
            continue
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages, left_out


def repair(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """A conversation that starts with a question, alternates and ends with an answer; and what was done to get there.

    Raises TurnError with ``drops`` where nothing to learn is left.
    """
    done: list[str] = []
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns: list[Message] = []
    for message in messages[len(system) :]:
        if message["role"] == "system":
            raise TurnError("a system text inside the conversation", "put it first", drops=True)
        if not message["content"].strip():
            done.append(EMPTY_INSIDE)
            break
        if not turns and message["role"] != "user":
            done.append(NO_QUESTION)
        elif turns and _continues(turns[-1], message):
            turns[-1] = {"role": message["role"], "content": f"{turns[-1]['content']}\n{message['content']}"}
            done.append(JOINED)
        else:
            turns.append(message)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
        if EMPTY_INSIDE not in done:
            done.append(UNANSWERED)
    if not turns:
        raise TurnError(NO_ANSWER, drops=True)
    return [*(one for one in system if one["content"].strip() or one.get("tools")), *turns], list(dict.fromkeys(done))


def _continues(before: Message, message: Message) -> bool:
    same = before["role"] == message["role"] and message["role"] in ("user", "assistant")
    return same and not before.get("metadata") and not message.get("metadata")
