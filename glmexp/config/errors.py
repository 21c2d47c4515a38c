"""The user's mistakes, as values: every message names the place, what was found, what is allowed and the way out."""

from __future__ import annotations

from dataclasses import dataclass

EXIT_USER_MISTAKE = 2
EXIT_FAILURE = 1
EXIT_UNUSABLE = 3
"""Of a sweep: every trial has a result, and some are out of memory or not finite."""
EXIT_STOPPED = 75
"""Asked to stop, saved, can go on: EX_TEMPFAIL of sysexits.h."""


class VerdictError(Exception):
    """What was asked for was judged, and failed: exit code 1, and no traceback, since nothing went wrong."""


@dataclass(frozen=True)
class Problem:
    """One mistake. ``where`` is a dotted key, an override or file:line; ``fix`` is what to do about it."""

    where: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}"
        return f"{text}\n    -> {self.fix}" if self.fix else text


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class UserError(Exception):
    """A mistake in what the user gave. Ends with exit code 2 and without a traceback."""

    kind = "input"

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise AssertionError("a UserError needs at least one Problem")
        self.problems = problems
        super().__init__(self.report())

    def report(self) -> str:
        """All problems at once, one a paragraph."""
        count = len(self.problems)
        head = f"{self.kind} error" if count == 1 else f"{count} {self.kind} errors"
        return "\n".join([f"{head}:", *(f"  {problem}" for problem in self.problems)])


class ConfigError(UserError):
    """The composed configuration cannot be run."""

    kind = "config"


class DataError(UserError):
    """A data file cannot be used."""

    kind = "data"


class ArtifactError(UserError):
    """An artifact does not fit the base model, or is not whole."""

    kind = "artifact"
