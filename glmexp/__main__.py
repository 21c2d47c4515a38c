"""The front door: ``python -m glmexp KEY=VALUE ...``. Composes, checks everything, then hands over to the launcher."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glmexp.config.errors import EXIT_USER_MISTAKE, ConfigError, Problem, UserError
from glmexp.config.streams import show_everything

if TYPE_CHECKING:
    from glmexp.config.arguments import Arguments
    from glmexp.config.compose import Request


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for the user's mistakes, 1 for failures while running."""
    words = list(sys.argv[1:] if argv is None else argv)
    show_everything()
    try:
        return _main(words)
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return EXIT_USER_MISTAKE
    except SystemExit as ended:  # rank 0 has said why, and told the other ranks
        return int(ended.code or 0)
    except BrokenPipeError:  # the reader of a printed text, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _main(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        from glmexp.config.help import overview

        print(overview(words))
        return 0
    if "--version" in words:
        from glmexp.config.help import versions

        print(versions())
        return 0
    from glmexp.launcher.ranks import outside_ranks

    outside = outside_ranks()
    if outside is not None and outside.rank != 0:
        from glmexp.launcher.start import follow

        return follow(outside, _run_rank)
    if outside is None:
        return _lead(words, None)
    from glmexp.launcher.handover import giving_up_together

    outside.export()
    with giving_up_together():
        return _lead(words, outside.world_size)


def _lead(words: list[str], world_size: int | None) -> int:
    """Compose and run, as the only process so far or as rank 0 of an outside launcher."""
    from glmexp.config.arguments import parse

    arguments = parse(words)
    if arguments.show or arguments.info or arguments.hydra_help or arguments.shell_completion:
        from glmexp.config.compose import Machine
        from glmexp.config.show import show
        from glmexp.launcher.ranks import gpu_count

        return show(arguments, Machine(gpu_count(), world_size))
    return _run(words, arguments, world_size)


def _run(words: list[str], arguments: Arguments, world_size: int | None) -> int:
    from glmexp.config.compose import Machine, request, trial_of_search
    from glmexp.launcher.ranks import core_count, gpu_count

    if arguments.multirun and world_size is not None:
        raise ConfigError(
            Problem("-m", "a sweep starts ranks of its own for each trial", "run it without torchrun or deepspeed")
        )
    machine = Machine(gpu_count(), world_size, core_count())
    asked = request(arguments, machine)
    if any(trial.entry.name == "doctor" for trial in asked.trials):
        return _doctor(asked)
    for warning in asked.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if any(trial.entry.name == "plan" for trial in asked.trials):
        return _plan(asked)
    from glmexp.entry.before import check

    check(asked.trials)
    if asked.sweep is None:
        from glmexp.launcher.start import start

        return start(asked.trials[0], _run_rank)
    from glmexp.launcher.sweep import sweep

    return sweep(asked, words, _run_rank, lambda values: trial_of_search(arguments, machine, values))


def _doctor(asked: Request) -> int:
    """What only tells something needs no run folder and no ranks."""
    if asked.sweep is not None:
        raise ConfigError(Problem("-m", "entry=doctor tells about one configuration", "leave out -m"))
    from glmexp.entry.doctor import tell

    return tell(asked.trials[0], asked.origins, _run_rank)


def _plan(asked: Request) -> int:
    """Told by this process alone, from the configuration."""
    if asked.sweep is not None:
        raise ConfigError(
            Problem("-m", "entry=plan plans one configuration", "leave out -m; plan.search=true looks around")
        )
    from glmexp.entry.plan import tell

    return tell(asked.trials[0])


def _run_rank(run_folder: Path, shows_failures: bool) -> int:
    """This process as a rank; the launcher room does not know the worker above it."""
    from glmexp.worker import run_rank

    return run_rank(run_folder, shows_failures)


if __name__ == "__main__":
    sys.exit(main())
