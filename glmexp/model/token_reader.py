"""The tokens of a decoding step on the host, some steps behind the one that is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OnTokens = Callable[[list[int]], bool]
"""Gets each step's token of every row, pads where a row has ended; True ends the generation."""
AHEAD = 2
"""Steps that are under way before the tokens of the first of them are read."""


class Reader:
    """Reads tokens some steps behind the one that is under way."""

    def __init__(self, step: Any, rows: int) -> None:
        self.step, self.rows, self.on_gpu = step, rows, step.token.device.type == "cuda"
        self.waiting: deque[tuple[Tensor, Any]] = deque()
        self.seen = 0
        """Tokens of each row that were read."""
        self.note()

    def note(self) -> None:
        """The step that was just called will have written these tokens."""
        noted = torch.cat((self.step.token[: self.rows, 0], self.step.ended.all()[None].to(torch.int64)))
        if not self.on_gpu:
            self.waiting.append((noted, None))
            return
        host = torch.empty(noted.shape, dtype=noted.dtype, pin_memory=True)
        host.copy_(noted, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.waiting.append((host, event))

    def behind(self, on_tokens: OnTokens | None) -> bool:
        """Read what is ``AHEAD`` steps old. True: it is over."""
        stop = False
        while len(self.waiting) >= (AHEAD if self.on_gpu else 1) and not stop:
            stop = self.read(on_tokens)
        return stop

    def read(self, on_tokens: OnTokens | None) -> bool:
        """Wait for the oldest step that was not read. True: all rows have ended, or the reader has enough."""
        host, event = self.waiting.popleft()
        if event is not None:
            event.synchronize()
        *tokens, ended = host.tolist()
        self.seen += 1
        enough = on_tokens(tokens) if on_tokens is not None else False
        return bool(ended) or enough
