"""Streams of a device that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stream:
    """Writes down whom it waits for."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self._told = name, told

    def wait_stream(self, other: Stream) -> None:
        self._told.append(f"{self.name} waits for {other.name}")


class Streams:
    """An accelerator as one with streams: writes down what waits for what. The current one is ``compute``."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self.on = accelerator, "compute"
        self._named: dict[str, Stream] = {}
        self.told: list[str] = []

    def resolves_data_dependency(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.told.append("the host waits")

    def current_stream(self) -> Stream:
        return self.named(self.on)

    def named(self, name: str) -> Stream:
        return self._named.setdefault(name, Stream(name, self.told))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.on = self.on, stream.name
        yield
        self.on = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)
