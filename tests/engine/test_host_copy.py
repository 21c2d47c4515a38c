"""Host memory for saves is taken beside training; a save that comes early waits for what it needs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from glmexp.engine import host_copy
from glmexp.engine.host_copy import Chunk, HostCopy
from glmexp.launcher.needs import available_memory_bytes

MIB = 1 << 20


def _bytes(copy: HostCopy) -> bytes:
    return b"".join(bytes(part) for part in copy.parts())


def test_a_save_that_comes_early_copies_into_what_is_there_and_waits_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed, sizes = threading.Semaphore(1), []

    class Slow(Chunk):
        def __init__(self, size: int) -> None:
            allowed.acquire()
            sizes.append(size)
            super().__init__(size)

    monkeypatch.setattr(host_copy, "Chunk", Slow)
    monkeypatch.setattr(host_copy, "CHUNK", 2 * MIB)
    copy = HostCopy(ahead_bytes=5 * MIB - 3)
    data = torch.randint(0, 256, (6 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    copy.append(data[: 2 * MIB])  # the first chunk is all that this needs
    saving = threading.Thread(target=copy.append, args=(data[2 * MIB :],))
    saving.start()
    saving.join(0.1)
    assert saving.is_alive(), "there is one chunk so far"
    allowed.release(10)
    saving.join(20)
    assert not saving.is_alive()
    assert _bytes(copy) == data.numpy().tobytes()
    assert sizes == [2 * MIB, 2 * MIB, MIB, 2 * MIB], "what was told in advance, then what else was needed"
    copy.clear()
    copy.append(data[:100])
    assert _bytes(copy) == data[:100].numpy().tobytes()


def test_memory_that_cannot_be_had_is_the_save_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> Chunk:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(host_copy, "Chunk", refuse)
    copy = HostCopy(ahead_bytes=MIB)
    with pytest.raises(RuntimeError, match="out of memory"):
        copy.append(torch.zeros(8))


def test_a_run_that_ends_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    first, goes_on, sizes = threading.Event(), threading.Event(), []

    class Held(Chunk):
        def __init__(self, size: int) -> None:
            sizes.append(size)
            first.set()
            goes_on.wait(20)
            super().__init__(size)

    monkeypatch.setattr(host_copy, "Chunk", Held)
    monkeypatch.setattr(host_copy, "CHUNK", MIB)
    copy = HostCopy(ahead_bytes=100 * MIB)
    assert first.wait(20)
    ending = threading.Thread(target=copy.close)
    ending.start()
    while copy._coming:
        pass
    goes_on.set()
    ending.join(20)
    assert sizes == [MIB]


@pytest.mark.parametrize("version", [1, 2])
def test_memory_that_may_be_taken_is_the_least_of_linux_and_the_control_group(tmp_path: Path, version: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_memory_bytes(tmp_path) == 8000 * 1024
    folder = tmp_path / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
    folder.mkdir(parents=True)
    limit, used, before = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        2: ("memory.max", "memory.current", ""),
    }[version]
    (folder / used).write_text("5000000\n")
    (folder / "memory.stat").write_text(f"anon 1\n{before}active_file 300000\n{before}inactive_file 700000\n")
    (folder / limit).write_text("7000000\n")
    assert available_memory_bytes(tmp_path) == 3_000_000, "files in memory make room"
    (folder / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    assert available_memory_bytes(tmp_path) == 8000 * 1024
