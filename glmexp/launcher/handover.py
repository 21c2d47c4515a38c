"""Under an outside launcher there is no parent: rank 0 composes, and hands the run to the others through the store."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from glmexp.config import redact
from glmexp.config.errors import EXIT_FAILURE, EXIT_USER_MISTAKE, UserError
from glmexp.launcher import folder, rendezvous

_RUN, _READ = "run", "run/read"
WAIT_S = 600.0
"""How long a rank waits for rank 0, whose configuration it does not have yet."""


def give(run_folder: Path, timeout_s: float) -> None:
    """Rank 0: the run's folder and its configuration, for machines that do not share the folder."""
    text = (run_folder / folder.CONFIG).read_text(encoding="utf-8")
    given = {"folder": str(run_folder), "config": text, "secrets": os.environ.get(redact.VARIABLE)}
    rendezvous.store(timeout_s).set(_RUN, json.dumps(given))


@contextlib.contextmanager
def giving_up_together() -> Iterator[None]:
    """Rank 0: what is raised in here ends the other ranks as well; else they would wait for a run that never comes."""
    try:
        yield
    except UserError as error:
        # Shown before the others end: their launcher ends this process as soon as one of them has.
        print(error.report(), file=sys.stderr, flush=True)
        _give_up(EXIT_USER_MISTAKE)
        raise SystemExit(EXIT_USER_MISTAKE) from error
    except Exception as error:
        traceback.print_exc()
        _give_up(EXIT_FAILURE)
        raise SystemExit(EXIT_FAILURE) from error


def _give_up(exit_code: int, wait_s: float = 20) -> None:
    """Tell the others; they must have read it before this process, which may hold the store, ends."""
    if os.environ["WORLD_SIZE"] == "1":
        return
    try:
        store = rendezvous.store(wait_s)
        store.set(_RUN, json.dumps({"exit_code": exit_code}))
        deadline = time.monotonic() + wait_s
        while store.add(_READ, 0) < int(os.environ["WORLD_SIZE"]) - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
    except (RuntimeError, UserError) as error:  # the first error is the one to show; this one only says who waits
        print(f"the other ranks could not be told: {error}", file=sys.stderr)


def take(timeout_s: float) -> Path:
    """Ranks other than 0: wait for rank 0's run. Exits where rank 0 has none, as it did."""
    store = rendezvous.store(timeout_s)
    try:
        given = json.loads(store.get(_RUN).decode())
    except RuntimeError as error:
        raise rendezvous.RendezvousError(f"rank 0 named no run within {timeout_s:g} s: {error}") from error
    store.add(_READ, 1)
    if "exit_code" in given:
        raise SystemExit(given["exit_code"])
    if given["secrets"] is not None:  # what config.yaml does not hold
        os.environ[redact.VARIABLE] = given["secrets"]
    run_folder = Path(given["folder"])
    if not (run_folder / folder.CONFIG).exists():  # this machine does not share rank 0's disk
        run_folder.mkdir(parents=True, exist_ok=True)
        temporary = run_folder / f".{folder.CONFIG}.{os.getpid()}"
        temporary.write_text(given["config"], encoding="utf-8")
        temporary.replace(run_folder / folder.CONFIG)
    return run_folder
