"""Blocks of a file to encoded parts, in this process or, for large files, in several."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from glmexp.data.encode import Encoding, Part, encode_rows
from glmexp.data.files import Block, DataFile, parse_block
from glmexp.data.forms import Forms
from glmexp.data.readers import Outcome, read_records, reject
from glmexp.data.template import Renderer

LARGE_BYTES = 8 << 20
"""Below this size starting processes takes longer than the work."""
MOST_WORKERS = 8
Done = tuple[Part, Outcome, int]
"""Examples of a block, what became of its rows, and its bytes (0 for records, which have none)."""


@dataclass(frozen=True)
class Work:
    """Everything that the processes need; the same for all blocks of a file."""

    file: DataFile
    forms: Forms
    encoding: Encoding
    renderer: Renderer
    on_error: Literal["error", "skip"]

    def do(self, block: Block) -> Done:
        """Parse, read and encode one block."""
        rows, outcome = read_records(self.file, parse_block(block, self.file.line_encoding), self.forms, self.on_error)
        part = encode_rows(rows, self.encoding, self.renderer)
        for label, fault in part.faults:
            outcome.used -= 1
            outcome.read -= 1
            reject(self.file, outcome, fault, label, self.on_error)
        return part, outcome, len(block.text or b"")


def workers_for(size: int, wanted: int | None) -> int:
    """Processes for a file of ``size`` bytes; 1 is this one alone."""
    if size < LARGE_BYTES:
        return 1
    return wanted or min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def run(work: Work, blocks: Iterator[Block], workers: int) -> Iterator[Done]:
    """The results of all blocks in their order, with few of them in memory at a time."""
    if workers == 1:
        yield from map(work.do, blocks)
        return
    import multiprocessing

    # Forked: a spawned process would import the tokenizer's library first (seconds each), and share no memory.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, context, _start, (work, os.getpid()))
    waiting: deque[Future[Done]] = deque()
    try:
        for block in blocks:
            waiting.append(pool.submit(_do, block))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_work: Any = None


def _start(work: Work, parent: int) -> None:
    global _work
    # What a fork brings along: a signal here must not be read as one of the parent's.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    _end_with_parent(parent)
    _work = work


def _end_with_parent(parent: int) -> None:
    """Linux: a SIGKILL when the parent is gone; a process would else wait for work forever."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _do(block: Block) -> Done:
    return _work.do(block)
