"""Host memory that checkpoints are copied to: taken beside training, page-locked where there is a GPU.

A save holds training until the state is out of the GPU's way, so what it is copied to must hold all of it: a small pool
that is written and filled again would make training wait for the disk (75 GB of a 6B run at 1 to 3 GB/s), the whole
copy makes it wait for the bus (tens of GB/s). The price is host memory, 12 bytes a trained parameter; where that is not
there, ``NoCopy`` is the small pool. Taking so much page-locked memory takes longer than several steps, which is why a
thread does it from the start of training on.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import sys
import threading
import time
from collections.abc import Iterator

import torch

log = logging.getLogger(__name__)

CHUNK = 1 << 28
"""Bytes that are taken at a time: the driver's lock is held for one of these, not for all."""
_FIRST_CHUNK = 1 << 24
_PAGE = 4096
_MEGABYTE = 1 << 20


class Chunk:
    """A stretch of host memory, page-locked where there is a GPU; given back with the object."""

    def __init__(self, size: int) -> None:
        self._locked = 0
        if not torch.cuda.is_available():
            self.bytes = torch.empty(size, dtype=torch.uint8)
            return
        # Most of the time goes into finding and clearing pages. Touching them first, huge ones where the kernel has
        # them, does that outside of the driver: measured on an H200 (experiments/bench/pinned.py), 7.8 GiB/s and steps
        # of 15.1 ms beside it for 14.0; torch's own pinned memory has 2.2 GiB/s, and no step goes on beside it.
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(area, dtype=torch.uint8)
        self.bytes[::_PAGE].zero_()
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0)))
        self._locked = self.bytes.data_ptr()

    def __del__(self) -> None:
        # The end of the process gives everything back, and the driver may be gone by then.
        if self._locked and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self._locked)


class HostCopy:
    """A stream of bytes in host memory that is used again for each save."""

    def __init__(self, ahead_bytes: int = 0) -> None:
        """ahead_bytes: what a thread takes from now on; more is taken when it is needed."""
        self._chunks: list[Chunk] = []
        self._used = 0
        self._coming = ahead_bytes
        """Bytes that the thread has still to take."""
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._take, name="host memory")
        if ahead_bytes:
            self._thread.start()

    def clear(self) -> None:
        """Begin anew."""
        self._used = 0

    def close(self) -> None:
        """Take nothing more ahead; waits for the chunk at hand."""
        self._coming = 0
        if self._thread.is_alive():
            self._thread.join()

    def append(self, tensor: torch.Tensor) -> None:
        """Copy a flat tensor's bytes; whole after ``finish``."""
        source = tensor.detach().contiguous().view(torch.uint8)
        done = 0
        while done < len(source):
            chunk, place = self._room()
            count = min(len(source) - done, len(chunk) - place)
            chunk[place : place + count].copy_(source[done : done + count], non_blocking=True)
            done += count
            self._used += count

    def finish(self) -> None:
        """Wait for the copies."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def parts(self) -> Iterator[memoryview]:
        """All bytes in order."""
        left = self._used
        for chunk in self._chunks:
            if left <= 0:
                return
            yield chunk.bytes[: min(left, len(chunk.bytes))].numpy().data
            left -= len(chunk.bytes)

    def _room(self) -> tuple[torch.Tensor, int]:
        """The chunk that the next byte goes to, and its place there. Waits for the thread where it is not there yet, so
        that copying and taking go on side by side."""
        with self._changed:
            while True:
                place = self._used
                for chunk in self._chunks:
                    if place < len(chunk.bytes):
                        return chunk.bytes, place
                    place -= len(chunk.bytes)
                if self._error is not None:
                    raise self._error
                if self._coming:
                    self._changed.wait()
                else:
                    self._chunks.append(Chunk(min(CHUNK, _FIRST_CHUNK << len(self._chunks))))

    def _take(self) -> None:
        """What the thread does, as long as the program runs: a run that fails must not wait for it."""
        begun, taken = time.perf_counter(), 0
        try:
            while (coming := self._coming) and threading.main_thread().is_alive():
                size = min(CHUNK, -(-coming // _MEGABYTE) * _MEGABYTE)
                chunk = Chunk(size)
                with self._changed:
                    self._chunks.append(chunk)
                    self._coming = max(0, self._coming - size)
                    self._changed.notify_all()
                taken += size
            log.info("%d bytes of host memory for checkpoints taken in %.2f s", taken, time.perf_counter() - begun)
        except BaseException as error:  # noqa: BLE001 - raised by the save that wants the memory
            with self._changed:
                self._error, self._coming = error, 0
                self._changed.notify_all()


class NoCopy(HostCopy):
    """For hosts without room for a copy: the bytes are read where they lie, while training waits."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[torch.Tensor] = []

    def clear(self) -> None:
        self._tensors.clear()

    def append(self, tensor: torch.Tensor) -> None:
        """Keep the tensor itself."""
        self._tensors.append(tensor.detach())

    def parts(self) -> Iterator[memoryview]:
        for tensor in self._tensors:
            for block in tensor.contiguous().view(torch.uint8).split(CHUNK):
                yield block.cpu().numpy().data
