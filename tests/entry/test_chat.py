"""A chat through a real pseudo-terminal, as a person at a keyboard has it."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli import environment, status

TIMEOUT_S = 200.0
CTRL_C, CTRL_D = "\x03", "\x04"


class Keyboard:
    """The other side of a process's terminal. What the process prints must be whole UTF-8, whenever it is read."""

    def __init__(self, side: int) -> None:
        self._side = side
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self.screen = ""

    def type(self, text: str, enter: bool = True) -> None:
        """Type a line. What is on the screen is forgotten first: what comes is the answer to it."""
        self.screen = ""
        os.write(self._side, (text + ("\r" if enter else "")).encode())

    def sees(self, text: str, behind: str = "") -> None:
        """Wait for ``text`` on the screen, somewhere behind ``behind``."""
        self._until(lambda: text in (self.screen.partition(behind)[2] if behind else self.screen), text)

    def presses(self, key: str, text: str) -> None:
        """Press a key until ``text`` is seen: readline notices a signal only while it waits for a key, and one that
        comes between its prompt and that is noticed with the next."""
        self.screen, pressed = "", 0.0
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.screen:
            assert time.monotonic() < deadline, f"{text!r} never came:\n{self.screen}"
            if time.monotonic() - pressed > 3:
                os.write(self._side, key.encode())
                pressed = time.monotonic()
            if select.select([self._side], [], [], 0.5)[0]:
                self.screen += self._decoder.decode(os.read(self._side, 4096))

    def sees_an_answer(self) -> None:
        """Wait until something stands below the line that was typed."""
        self._until(lambda: self.screen.partition("\n")[2].strip() != "", "an answer")

    def _until(self, seen: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not seen():
            assert time.monotonic() < deadline, f"{what!r} never came:\n{self.screen}"
            if select.select([self._side], [], [], 1.0)[0]:
                self.screen += self._decoder.decode(os.read(self._side, 4096))


@contextmanager
def at_a_terminal(*words: str, folder: Path) -> Iterator[tuple[Keyboard, subprocess.Popen[bytes]]]:
    """``python -m glmexp WORDS`` with a terminal of its own, whose Ctrl-C reaches it as a signal."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "glmexp", *words],
        cwd=folder,
        env=environment(TERM="dumb", PYTHONPATH=os.environ.get("PYTHONPATH", "")),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    try:
        yield Keyboard(ours), process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)


def test_chinese_history_streaming_and_interrupts_at_a_terminal(tmp_path: Path) -> None:
    """A random network, which finds no end by itself: each answer ends by its length, or by Ctrl-C."""
    run = tmp_path / "chat"
    words = ("entry=generate", "model.init=random", "precision=fp32", "generate.max_new_tokens=900", f"run.dir={run}")
    with at_a_terminal(*words, folder=tmp_path) as (keyboard, process):
        keyboard.sees("Ctrl-C ends an answer, Ctrl-D the chat")
        head = "answers: up to 900 tokens, the likeliest each time; kept in chat/answers.jsonl"
        assert keyboard.screen.count(head) == 1, "the head says where, once"
        keyboard.sees("> ")
        keyboard.type("你好，世界")
        keyboard.sees_an_answer()  # while it is written: it is not at its end when Ctrl-C comes
        keyboard.type(CTRL_C, enter=False)
        keyboard.sees("(interrupted: what was said stays in the conversation)")
        keyboard.sees("> ", behind="(interrupted")
        keyboard.type("再说一遍")
        keyboard.sees_an_answer()
        keyboard.type(CTRL_C, enter=False)
        keyboard.sees("> ", behind="(interrupted")
        keyboard.presses(CTRL_C, "(Ctrl-D ends the chat)")  # at the prompt it ends nothing
        keyboard.type("/reset")
        keyboard.sees("> ", behind="(a new conversation)")
        keyboard.type(CTRL_D, enter=False)
        assert process.wait(timeout=TIMEOUT_S) == 0
    rows = [json.loads(line) for line in (run / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == ["你好，世界", "再说一遍"]
    assert {row["finish_reason"] for row in rows} == {"interrupted"}
    assert all(0 < row["new_tokens"] < 900 for row in rows)
    assert rows[1]["prompt_tokens"] > rows[0]["prompt_tokens"], "the first round is part of the second"
    assert status(run)["state"] == "finished"
