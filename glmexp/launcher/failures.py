"""What went wrong in a rank, kept as a file in the run folder, so that whoever watches can show it first and once."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from glmexp.config import redact
from glmexp.config.errors import EXIT_FAILURE, EXIT_USER_MISTAKE, UserError, VerdictError
from glmexp.launcher import positions
from glmexp.launcher.folder import FAILURES, write_json, write_status

STACK_SIGNAL = signal.SIGUSR2
"""A rank that gets this writes the Python stack of its threads to ``logs/rank<N>.stack``, also from inside a hang."""
_USUAL = {
    signal.SIGKILL: "usual cause: the machine ran out of memory (dmesg | tail tells), or somebody ended it",
    signal.SIGABRT: "usual cause on GPUs: a collective waited longer than launcher.timeout_s (NCCL's watchdog, "
    "its lines are above)",
    signal.SIGSEGV: "usual cause: a compiled extension that does not fit this torch",
}


@dataclass(frozen=True)
class Failure:
    """One rank's end. ``exit_code`` is 2 for a user's mistake, 1 for a failure, 128 + signal where one ended it."""

    rank: int
    exit_code: int
    message: str
    trace: str
    time_s: float
    verdict: bool = False
    """Nothing went wrong: what was judged has failed."""


def of_exception(rank: int, error: BaseException) -> Failure:
    """UserErrors keep their report and no traceback; everything else keeps both. Secrets are left out."""
    if isinstance(error, UserError):
        return Failure(rank, EXIT_USER_MISTAKE, redact.text(error.report()), "", time.time())
    if isinstance(error, VerdictError):
        return Failure(rank, EXIT_FAILURE, redact.text(str(error)), "", time.time(), verdict=True)
    trace = redact.text("".join(traceback.format_exception(error)))
    return Failure(rank, EXIT_FAILURE, redact.text(f"{type(error).__name__}: {error}"), trace, time.time())


def of_signal(rank: int, number: int) -> Failure:
    """A rank that a signal ended."""
    name = signal.Signals(number).name
    usual = f"; {_USUAL[signal.Signals(number)]}" if number in _USUAL else ""
    return Failure(rank, 128 + number, f"ended by signal {number} ({name}){usual}", "", time.time())


def record(folder: Path, failure: Failure) -> None:
    """Write the failure beside those of the other ranks."""
    write_json(folder / FAILURES / f"rank{failure.rank}.json", asdict(failure))


def recorded(folder: Path) -> list[Failure]:
    """All recorded failures, earliest first."""
    files = sorted((folder / FAILURES).glob("rank*.json"))
    found = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    return sorted(found, key=lambda failure: failure.time_s)


def first_cause(failures: list[Failure]) -> Failure:
    """The failure that the others follow from.

    A killed rank writes nothing itself and is seen after the errors of the ranks that lost it, so a signal that
    nobody here sends (not SIGTERM, which ends the survivors) goes before all others; then the earliest.
    """
    if not failures:
        raise AssertionError("a failed run without a failure")
    killed = [failure for failure in failures if failure.exit_code > 128 and failure.exit_code != 128 + signal.SIGTERM]
    own = [failure for failure in failures if failure.exit_code <= 128]
    return min(killed or own or failures, key=lambda failure: failure.time_s)


def conclude(run_folder: Path, ranks: int, exit_codes: dict[int, int], places: list[str] | None = None) -> int:
    """Show the first cause among what the ranks recorded and how they ended; the run's exit code.

    exit_codes: rank to exit code, minus the signal where one ended it. places: lines about where each rank was, taken
    before those that hung were ended.
    """
    found = recorded(run_folder)
    known = {failure.rank for failure in found}
    found += [of_signal(rank, -code) for rank, code in exit_codes.items() if code < 0 and rank not in known]
    if not found:
        found = [
            Failure(rank, EXIT_FAILURE, f"ended with exit code {code} and left no message", "", 0.0)
            for rank, code in exit_codes.items()
        ]
    cause = first_cause(found)
    report(run_folder, cause, ranks, places)
    return EXIT_USER_MISTAKE if cause.exit_code == EXIT_USER_MISTAKE else EXIT_FAILURE


def report(folder: Path, failure: Failure, ranks: int, places: list[str] | None = None) -> None:
    """Show the failure on the terminal and in status.json."""
    write_status(folder, "failed", rank=failure.rank, exit_code=failure.exit_code, reason=failure.message)
    if failure.verdict or failure.exit_code == EXIT_USER_MISTAKE:
        print(failure.message, file=sys.stderr)
        return
    print(f"\nrank {failure.rank} of {ranks} failed: {failure.message}", file=sys.stderr)
    if failure.trace:
        print(f"\n{failure.trace.rstrip()}", file=sys.stderr)
    for line in positions.table(folder, ranks) if places is None else places:
        print(line, file=sys.stderr)
    stacks = sorted(path.name for path in (folder / "logs").glob("*.stack") if path.stat().st_size)
    if stacks:
        print(f"Python stacks of ranks that hung: logs/{', logs/'.join(stacks)}", file=sys.stderr)
    print(f"run folder: {folder}", file=sys.stderr)
