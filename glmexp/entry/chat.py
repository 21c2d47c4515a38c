"""A chat: at the terminal, or with the lines of a pipe. The answer shows while it comes, whole characters only."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from glmexp.config.errors import DataError
from glmexp.data.template import Message
from glmexp.entry.conversation import Answer, Fitted, Speaker, TooLongError, fitted
from glmexp.launcher import stopping
from glmexp.model.streaming import TextStream

HELP = """/reset          begins a new conversation
/system TEXT    begins a new one with this system text; without TEXT, with none
//TEXT          asks /TEXT
/help /quit     these lines; the end, as Ctrl-D
Ctrl-C ends an answer, Ctrl-D the chat"""
PROMPT = "> "
Record = Callable[[dict[str, Any]], None]


def talk(speaker: Speaker, record: Record, kept: str) -> None:
    """Chat until the input ends. ``record`` gets each answer as a line of the file that ``kept`` names."""
    keyboard = sys.stdin.isatty()
    if keyboard and importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")  # input() then edits lines: whole characters are erased, not bytes
    chat = Chat(speaker, record, sys.stdout, sys.stdout if keyboard else sys.stderr)
    facts = speaker.facts(rows=1)
    facts["answers"] += f"; kept in {kept}"
    chat.say(*(f"{name}: {value}" for name, value in facts.items()))
    if keyboard:
        chat.say(HELP)
    with _interrupts(chat):
        for line in _lines(chat, keyboard):
            if not chat.hear(line):
                break


def _lines(chat: Chat, keyboard: bool) -> Iterator[str]:
    """What is typed, or the lines of the pipe, until the end."""
    if not keyboard:
        # Windows editors put a mark in front, which is no part of the first question.
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")  # type: ignore[union-attr]  # a text file
        try:
            yield from _in_utf_8(chat, sys.stdin)
        except KeyboardInterrupt:
            return
        return
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            chat.say("")
            return
        except KeyboardInterrupt:
            chat.say("", "(Ctrl-D ends the chat)")


def _in_utf_8(chat: Chat, lines: Iterable[str]) -> Iterator[str]:
    """Lines with other bytes are named and not asked: the model would answer another question."""
    for number, line in enumerate(lines, start=1):
        try:
            line.encode()
        except UnicodeEncodeError:
            chat.say(f"(line {number} is not UTF-8; it was not asked: iconv -f gb18030 -t utf-8, or the like, before)")
        else:
            yield line


@contextmanager
def _interrupts(chat: Chat) -> Iterator[None]:
    """Ctrl-C is for the chat: it ends an answer, or the line that is being typed."""

    def interrupt(number: int, frame: Any) -> None:
        if not chat.answering:
            raise KeyboardInterrupt
        chat.interrupted = True

    ear = stopping.listener()
    if ear is not None:
        ear.ends_on_interrupt = False
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if ear is not None:
            ear.ends_on_interrupt = True


class Chat:
    """One conversation after the other. ``out`` gets the answers alone, ``notes`` the rest."""

    def __init__(self, speaker: Speaker, record: Record, out: TextIO, notes: TextIO) -> None:
        self._speaker, self._record = speaker, record
        self._out, self._notes = out, notes
        self._system = speaker.settings.system
        self.messages: list[Message] = []
        """The conversation so far."""
        self._count = 0
        self.answering = self.interrupted = False
        self._stream: TextStream | None = None
        self.reset()

    def say(self, *lines: str) -> None:
        """Notes beside the conversation."""
        print(*lines, sep="\n", file=self._notes, flush=True)

    def reset(self) -> None:
        """Begin anew, with the system text."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def hear(self, line: str) -> bool:
        """A command or a question. False: the chat is over."""
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/") or text.startswith("//"):
            self._ask(text.removeprefix("/") if text.startswith("//") else text)
            return True
        command, _, rest = text.partition(" ")
        if command == "/quit":
            return False
        if command == "/reset":
            self.reset()
            self.say("(a new conversation)")
        elif command == "/system":
            self._system = rest.strip() or None
            self.reset()
            self.say(f"(a new conversation, {'with this' if self._system else 'without a'} system text)")
        elif command == "/help":
            self.say(HELP)
        else:
            self.say(f"({command} is no command)", HELP)
        return True

    def _ask(self, text: str) -> None:
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt = fitted(self._speaker.served.template, asked, self._speaker.settings)
        except TooLongError as error:
            self.say(f"({error}; it was not asked)")
            return
        except DataError as error:
            self.say(f"({error.problems[0]}; it was not asked)")
            return
        if prompt.dropped:
            settings = self._speaker.settings
            self.say(
                f"(the oldest {prompt.dropped} turns are left out: generate.max_length={settings.max_length} holds "
                f"the conversation and generate.max_new_tokens={settings.max_new_tokens})"
            )
        answer = self._answer(prompt)
        self._record(answer.row(self._count, prompt))
        self._count += 1
        if answer.text:
            self.messages = [*prompt.messages, {"role": "assistant", "content": answer.text}]
        if answer.finish_reason == "interrupted":
            self.say("(interrupted" + (": what was said stays in the conversation)" if answer.text else ")"))
        elif answer.finish_reason == "length":
            self.say(f"(cut off after {answer.tokens} tokens, by generate.max_new_tokens or generate.max_length)")

    def _answer(self, prompt: Fitted) -> Answer:
        served = self._speaker.served
        self._stream = TextStream(served.template.tokenizer, served.template.stop_ids)
        self.answering, self.interrupted = True, False
        try:
            (answer,) = self._speaker.answers([prompt], follower=self)
        finally:
            self.answering = False
        print(self._stream.rest(), file=self._out, flush=True)
        return answer

    def tokens(self, ids: list[int]) -> None:
        """The model's next token: what it completes is shown."""
        assert self._stream is not None, "tokens come in an answer"
        print(self._stream.add(ids[0]), end="", file=self._out, flush=True)

    def enough(self) -> bool:
        """Ctrl-C was pressed in this answer."""
        return self.interrupted
