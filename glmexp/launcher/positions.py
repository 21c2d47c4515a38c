"""Where each rank is: a small file a rank, written once a second by a thread of its own, read by whoever watches.

A position is a count, a step and a phase. All ranks go through the same phases, so the one whose count is behind is the
one that the others wait for; a file that is no longer written belongs to a rank that is stopped or gone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from glmexp.launcher.folder import write_json

FOLDER = "positions"
BEAT_S = 1.0
SILENT_AFTER_S = 10.0
"""A rank that has not written for so long is stopped or gone."""


@dataclass
class Position:
    """One rank, now. ``since_s`` is how long it has been there when it was written; ``beat`` counts the writes."""

    rank: int
    count: int = 0
    step: int | None = None
    phase: str = "starting"
    since_s: float = 0.0
    beat: int = 0
    ended: bool = False

    def words(self) -> str:
        """``step 17, backward``."""
        return f"step {self.step}, {self.phase}" if self.step is not None else self.phase


class _Here:
    """This process's own position."""

    def __init__(self) -> None:
        self.position = Position(rank=0)
        self.folder: Path | None = None
        self.entered = time.monotonic()
        self.also: Callable[[], None] | None = None
        self.lock = threading.Lock()

    def write(self) -> None:
        with self.lock:
            if self.folder is not None:
                self.position.beat += 1
                self.position.since_s = time.monotonic() - self.entered
                write_json(self.folder / f"rank{self.position.rank}.json", asdict(self.position))


_here = _Here()


def at(phase: str, step: int | None = None) -> None:
    """This rank is now in ``phase``, of optimizer step ``step``. Costs nothing: the thread does the writing.

    Every rank must come by every call: who is behind is found by counting them.
    """
    position = _here.position
    position.phase, position.step = phase, step
    position.count += 1
    _here.entered = time.monotonic()


def within(phase: str) -> None:
    """The next phase of the same step."""
    at(phase, _here.position.step)


def begin(run_folder: Path, rank: int, also: Callable[[], None] | None = None) -> None:
    """Start writing this rank's position; ``also`` is called as often."""
    _here.position = Position(rank=rank)
    _here.entered = time.monotonic()
    _here.folder, _here.also = run_folder / FOLDER, also
    _here.write()

    def beat() -> None:
        while _here.folder == run_folder / FOLDER:
            time.sleep(BEAT_S)
            _here.write()
            if _here.also is not None:
                _here.also()

    threading.Thread(target=beat, name="position", daemon=True).start()


def end() -> None:
    """Write once more, at the end of this rank: what is reported is where it really ended, and nobody misses it."""
    _here.position.ended = True
    _here.write()
    with _here.lock:
        _here.folder = None  # the thread ends, and nobody finds a file written behind this


def read(run_folder: Path) -> dict[int, Position]:
    """What each rank wrote last, as far as its file can be seen from here."""
    found = {}
    for file in (run_folder / FOLDER).glob("rank*.json"):
        one = Position(**json.loads(file.read_text(encoding="utf-8")))
        found[one.rank] = one
    return found


def table(run_folder: Path, ranks: int) -> list[str]:
    """One line a rank for a report, the rank that is behind marked."""
    found = read(run_folder)
    if len(found) < 2:
        return []
    counts = [one.count for one in found.values()]
    lines = []
    for rank in range(ranks):
        if rank not in found:
            lines.append(f"  rank {rank}  not seen from this machine")
            continue
        one = found[rank]
        file = run_folder / FOLDER / f"rank{rank}.json"
        unheard_s = 0.0 if one.ended else time.time() - file.stat().st_mtime
        mark = "behind the others" if one.count == min(counts) < max(counts) else ""
        mark += f"{', ' if mark else ''}no sign for {unheard_s:.0f} s" if unheard_s > SILENT_AFTER_S / 2 else ""
        lines.append(f"  rank {rank}  {one.words()}, for {one.since_s:.0f} s{'  <- ' if mark else ''}{mark}")
    return ["where each rank was last:", *lines]


class Watch:
    """Looks at the positions from time to time and says who holds up the others. Clocks of machines may differ: only
    changes count, by the clock of the one who looks."""

    def __init__(self, run_folder: Path, ranks: int, silent_s: float | None, say: Callable[[str], None]) -> None:
        self._folder, self._ranks, self._silent_s, self._say = run_folder, ranks, silent_s, say
        self._moved: dict[int, tuple[int, float]] = {}
        self._beaten: dict[int, tuple[int, float]] = {}
        self._behind_since: dict[int, float] = {}
        self._next_s: dict[str, float] = {}

    def look(self) -> None:
        """Call about once a second."""
        if self._silent_s is None or self._ranks < 2:
            return
        now = time.monotonic()
        found = read(self._folder)
        for rank, one in found.items():
            if self._moved.get(rank, (-1, 0.0))[0] != one.count:
                self._moved[rank] = (one.count, now)
            if self._beaten.get(rank, (-1, 0.0))[0] != one.beat:
                self._beaten[rank] = (one.beat, now)
        if len(found) < 2:
            return
        for line in self._lines(found, now):
            self._say(line)

    def _lines(self, found: dict[int, Position], now: float) -> Iterator[str]:
        assert self._silent_s is not None
        for rank, (_, beaten) in sorted(self._beaten.items()):
            if found[rank].ended:
                continue
            if now - beaten > SILENT_AFTER_S and self._due(f"silent {rank}", now - beaten):
                yield (
                    f"rank {rank} has given no sign for {now - beaten:.0f} s, last in {found[rank].words()}: it is "
                    "stopped, swapped out, or its machine is gone"
                )
        least, furthest = min(one.count for one in found.values()), max(one.count for one in found.values())
        together = min(now - moved for _, moved in self._moved.values())
        if least == furthest and together > 4 * self._silent_s and self._due("all", together):
            yield f"all ranks have been in {found[min(found)].words()} for {together:.0f} s"
        for rank, one in sorted(found.items()):
            if one.count == furthest:
                self._behind_since.pop(rank, None)
                continue
            # From when another one has passed it: until then it stood with them, waiting for somebody else.
            behind = now - self._behind_since.setdefault(rank, now)
            stood = min(behind, now - self._moved[rank][1])
            waiting = [other for other, two in sorted(found.items()) if two.count > one.count]
            if (
                not one.ended
                and one.count == least < furthest
                and stood > self._silent_s
                and self._due(f"slow {rank}", stood)
            ):
                yield (
                    f"rank {rank} has been in {one.words()} for {stood:.0f} s; {_names(waiting)} "
                    f"{'waits' if len(waiting) == 1 else 'wait'} in {found[waiting[0]].words()}"
                )

    def _due(self, what: str, stood: float) -> bool:
        """Once, and again after twice the time; anew where the rank has moved in between."""
        assert self._silent_s is not None
        if stood < self._next_s.get(what, 0.0) / 2:
            self._next_s[what] = 0.0
        if stood < self._next_s.get(what, 0.0):
            return False
        self._next_s[what] = 2 * stood
        return True


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whole = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]} to {ranks[-1]}" if whole else f"ranks {', '.join(map(str, ranks))}"
