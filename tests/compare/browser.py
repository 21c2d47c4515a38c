"""A headless Chromium, driven through two pipes by its own protocol: no package, no port, real clocks.

``--dump-dom`` would do for a page that only stands there; sorting, filtering and a width of 400 px need a conversation.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
_WORDS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)


def found() -> str | None:
    """The browser's program; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. Messages are JSON with a zero byte behind: the browser reads from 3 and writes to 4."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._number, self._rest, self._session = 0, b"", ""
        self.width = 0
        """Of the page that is open; 0: none is."""
        self.events: list[dict[str, Any]] = []
        """What the browser told by itself: requests, messages of the console, exceptions."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self._call("Performance.enable", timeDomain="threadTicks")

    def open(self, file: Path, width: int, height: int = 1000) -> None:
        """Load a file at this width, as a telephone does below 600 px, and wait until its scripts have run."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.width = width
        self.events.clear()
        self._call("Page.navigate", url=file.resolve().as_uri())
        end = time.monotonic() + 60
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < end, "the page was not loaded within 60 s"
            self.run("0")
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited. AssertionError with what it throws."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def cpu_ms(self) -> float:
        """Milliseconds that the page's thread has worked so far, layout included, whatever else the machine does."""
        metrics = self._call("Performance.getMetrics")["metrics"]
        return 1000 * next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    def screenshot(self, file: Path) -> None:
        """The whole page, top to bottom, as PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def until(self, script: str) -> None:
        """Wait for a JavaScript condition."""
        end = time.monotonic() + 30
        while not self.run(script):
            assert time.monotonic() < end, f"not within 30 s: {script}"
            time.sleep(0.05)

    def told(self, method: str) -> list[dict[str, Any]]:
        """Parameters of all events of this name."""
        return [event["params"] for event in self.events if event["method"] == method]

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def _receive(self, method: str) -> dict[str, Any]:
        end = time.monotonic() + 60
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no answer to {method} within 60 s"
            part = os.read(self._read, 1 << 20)
            assert part, f"the browser ended at {method}"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with an empty profile in ``folder``; ended on the way out."""
    program = found()
    assert program is not None, "asked for where there is none"
    to_browser, from_browser = os.pipe(), os.pipe()

    def at_three_and_four() -> None:  # above them first, so that neither is overwritten before it is copied
        read, write = os.dup(to_browser[0]), os.dup(from_browser[1])
        high_read, high_write = os.dup(read), os.dup(write)
        os.dup2(high_read, 3)
        os.dup2(high_write, 4)

    log = (folder / "browser.log").open("wb")
    process = subprocess.Popen(
        [program, *_WORDS, f"--user-data-dir={folder / 'profile'}"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=at_three_and_four,
        close_fds=False,
        start_new_session=True,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        os.close(to_browser[1])  # it ends when nobody speaks to it any more
        os.close(from_browser[0])
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        log.close()
