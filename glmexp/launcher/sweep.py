"""Sweeps: several trials on parts of the machine, each in processes of its own; taken up again where they were.

``sweep.json`` in the sweep's folder says what became of each trial; the same command line with ``hydra.sweep.dir=``
that folder runs what is left. ``run_trial`` is all that is done for one: what hands trials to a queue in place of
running them here can call it there.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from glmexp.config import redact
from glmexp.config.compose import Request
from glmexp.config.errors import EXIT_FAILURE, EXIT_STOPPED, EXIT_UNUSABLE, ConfigError, Problem
from glmexp.config.quoting import typed
from glmexp.config.schema import RunConfig, SweepSection
from glmexp.config.sweep import Swept, folder_name, in_sweep
from glmexp.launcher import folder, search, slots, slurm, summary, taking_up, trials
from glmexp.launcher.slots import Slot
from glmexp.launcher.start import RunRank, start
from glmexp.launcher.taking_up import Job
from glmexp.launcher.trials import FINISHED, OUTCOMES, RUNNING, STOPPED, STOPPING, WAITING, SweepState, Trial

Compose = Callable[[Mapping[str, str]], RunConfig]
"""Values of a search -> the trial's configuration. Raises ConfigError where they do not fit together."""
Work = Callable[[RunConfig], int]


def run_trial(config: RunConfig, run_rank: RunRank) -> int:
    """One trial in its run folder, from start to end; its exit code."""
    return start(config, run_rank)


def sweep(asked: Request, words: Sequence[str], run_rank: RunRank, compose: Compose) -> int:
    """Run the trials that have no outcome yet. A failed one does not stop the others.

    Returns 0 if all have finished, 1 if some failed, 3 if all have a result and some of these are out of memory or not
    finite, 75 if it was asked to stop and can go on, 130 after Ctrl-C.
    """
    assert asked.sweep is not None
    if asked.sweep.settings.name == "search":
        if asked.trials[0].launcher.name == "slurm":
            what = "slurm: an array has all its trials at once, and a search chooses each by what the earlier ones gave"
            raise ConfigError(Problem("launcher.name", what, "sweep=grid, or a job that runs the search itself"))
        search.needs_optuna()
    line = taking_up.repeatable(words)
    asked, root = taking_up.claimed(asked, asked.sweep, line)
    assert asked.sweep is not None
    with trials.locked(root):
        state = taking_up.taken_up(root, line, asked)
        jobs = taking_up.grid(state, asked) if asked.sweep.settings.name == "grid" else None
        by_slurm = jobs is not None and asked.trials[0].launcher.name == "slurm"
        free = [] if by_slurm else slots.divide(asked.sweep.slots or 1)
        here = _Sweep(state, asked.sweep, partial(run_trial, run_rank=run_rank), free)
        state.line = line
        state.save()
        if jobs is not None:
            if by_slurm:
                return here.hand_in(jobs)
            here.announce([trial for trial, _ in jobs])
            return here.run(iter([job for job in jobs if here.due(job[0])]))
        here.announce(state.trials)
        return here.run(here.searched(compose))


@dataclasses.dataclass
class _Running:
    trial: Trial
    process: BaseProcess
    slot: Slot
    started: float


class _Sweep:
    """One start of a sweep."""

    def __init__(self, state: SweepState, swept: Swept, work: Work, free: list[Slot]) -> None:
        self.state = state
        self.swept = swept
        self.work = work
        self.free, self.several = free, len(free) > 1
        self.running: list[_Running] = []
        self.signals: list[int] = []

    @property
    def settings(self) -> SweepSection:
        return self.swept.settings

    def due(self, trial: Trial) -> bool:
        """Whether this start runs the trial."""
        return trial.same_as is None and (trial.state not in OUTCOMES or trial.state in self.settings.retry)

    def announce(self, known: Sequence[Trial]) -> None:
        """What there is, what is kept, and how to go on after an interruption."""
        total = self.settings.trials or len(known)
        print(f"sweep {self.swept.folder}: {total} trials, {len(self.free)} at a time", flush=True)
        kept = [trial for trial in known if not self.due(trial)]
        for trial in kept:
            self.tell(trial, "kept")
        if retry := sorted({trial.state for trial in kept} - {FINISHED}):
            print(f"sweep.retry=[{','.join(retry)}] runs them once more", flush=True)

    def tell(self, trial: Trial, event: str) -> None:
        """One line on the terminal."""
        print(f"{time.strftime('%H:%M:%S')} {trial.name} {event}{self._result(trial)}", flush=True)

    def _result(self, trial: Trial) -> str:
        if trial.state == FINISHED:
            metric = summary.compared_by(self.settings, [trial])
            return "" if metric is None else f": {metric} {trial.value(metric):.6g}"
        words = trial.state.replace("_", " ")
        return f": {words}: {trial.reason}" if trial.state in (*OUTCOMES, STOPPED) else ""

    def searched(self, compose: Compose) -> Iterator[Job]:
        """Trials that an earlier start left, then new ones until there are ``sweep.trials``."""
        for trial in [one for one in self.state.trials if self.due(one)]:
            yield from self._composed(trial, compose)
        assert self.settings.trials is not None, "composing asks for it"
        while len(self.state.trials) < self.settings.trials:
            number = len(self.state.trials)
            values = search.suggest(self.swept.space, self.settings, self.state.trials, number)
            trial = Trial(number, "", values, folder_name(number, values))
            self.state.trials.append(trial)
            yield from self._composed(trial, compose)

    def _composed(self, trial: Trial, compose: Compose) -> Iterator[Job]:
        """The trial to run; nothing where its values do not fit together, or where an earlier one was the same."""
        try:
            config = compose(trial.values)
        except ConfigError as error:
            trial.state, trial.reason = trials.FAILED, redact.text(str(error.problems[0]).splitlines()[0])
            self.tell(trial, "not run")
            return
        finally:
            self.state.save()
        trial.identity = trials.trial_identity(config, trial.values)
        self._repeat(trial)
        if trial.same_as is None:
            yield trial, in_sweep(config, str(self.state.root), trial.folder)
        else:
            self.tell(trial, f"is trial {trial.same_as} again")

    def _repeat(self, trial: Trial) -> None:
        """A configuration that has an outcome is not run again."""
        for twin in self.state.trials[: trial.number]:
            if twin.identity == trial.identity and twin.same_as is None and twin.state in OUTCOMES:
                trial.state, trial.metrics, trial.reason = twin.state, twin.metrics, twin.reason
                trial.same_as, trial.folder = twin.number, twin.folder
                return

    def hand_in(self, jobs: Sequence[Job]) -> int:
        """The trials that are due as one array of Slurm; what becomes of them is read when the sweep is taken up."""
        due = [job for job in jobs if self.due(job[0])]
        waiting = [one for one, _ in due if slurm.is_queued(self.state.folder_of(one))]
        for trial in waiting:
            self.tell(trial, "is in the queue already")
        due = [job for job in due if job[0] not in waiting]
        for trial, _ in due:
            shutil.rmtree(self.state.folder_of(trial), ignore_errors=True)
            trial.state, trial.reason, trial.metrics = RUNNING, "", {}
        self.state.save()
        return slurm.submit_sweep([config for _, config in due], self.state.root, self.swept.slots) if due else 0

    def run(self, jobs: Iterator[Job]) -> int:
        """Run jobs until there are none, or a signal ends all; the exit code."""
        with self._passing_signals_on():
            try:
                self._run(jobs)
            except BaseException:  # a failure of the sweep itself, such as a full disk, leaves no trial behind
                for one in self.running:
                    one.process.terminate()
                raise
        return self._close()

    def _run(self, jobs: Iterator[Job]) -> None:
        while True:
            while self.free and not self.signals and (job := next(jobs, None)) is not None:
                if not self.signals:  # one may have come while the trial was composed
                    self._start(*job)
            if not self.running:
                return
            wait([one.process.sentinel for one in self.running])
            for one in [one for one in self.running if one.process.exitcode is not None]:
                self._ended(one)

    def _start(self, trial: Trial, config: RunConfig) -> None:
        run_folder = self.state.folder_of(trial)
        trials.wait_for_ranks(run_folder)
        goes_on = config.entry.name == "train" and trial.state in _RESUMABLE and trials.has_checkpoint(run_folder)
        if goes_on:
            config = dataclasses.replace(
                config,
                train=dataclasses.replace(config.train, resume=str(run_folder)),
                run=dataclasses.replace(config.run, dir=None),
            )
            shutil.rmtree(run_folder / folder.FAILURES, ignore_errors=True)
        elif run_folder.exists():
            shutil.rmtree(run_folder)
        trial.state, trial.reason, trial.metrics = RUNNING, "", {}
        self.state.save()
        slot, several = self.free.pop(0), self.several
        log = os.path.relpath(run_folder / "logs" / slots.LOG)
        where = f" ({slot.words}); output: {log}" if several else f": {os.path.relpath(run_folder)}"
        self.tell(trial, f"{'goes on' if goes_on else 'starts'}{where}")
        ranks = config.launcher.nproc or 1
        with slots.signals_held():  # one that comes now reaches the new process as well
            process = slots.start_process(partial(self.work, config), slot, ranks, run_folder, log=several)
            self.running.append(_Running(trial, process, slot, time.monotonic()))

    def _ended(self, one: _Running) -> None:
        code = one.process.exitcode
        assert code is not None
        one.process.close()
        self.running.remove(one)
        self.free.append(one.slot)
        trial, run_folder = one.trial, self.state.folder_of(one.trial)
        trial.state, trial.reason = trials.settle(run_folder, code)
        trial.metrics = trials.last_metrics(run_folder) if trial.state == FINISHED else {}
        trial.seconds = time.monotonic() - one.started
        for twin in [other for other in self.state.trials if other.same_as == trial.number]:
            twin.state, twin.metrics, twin.reason = trial.state, trial.metrics, trial.reason
        self.state.save()
        self.tell(trial, f"ended after {trial.seconds:.0f} s")

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGUSR1 end the trials as they would end a run; the second one does so at once."""

        def pass_on(number: int, _: object) -> None:
            self.signals.append(number)
            for one in self.running:
                if one.process.pid is not None and one.process.exitcode is None:
                    os.kill(one.process.pid, number if len(self.signals) == 1 else signal.SIGKILL)

        before = {number: signal.signal(number, pass_on) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _close(self) -> int:
        """The table, where it lies, and the exit code."""
        self.state.save()
        known = self.state.trials
        print("", *summary.table(self.state, self.settings), sep="\n")
        counts = {state: sum(trial.state == state for trial in known) for state in (*OUTCOMES, STOPPED, WAITING)}
        words = [f"{count} {state.replace('_', ' ')}" for state, count in counts.items() if count and state != FINISHED]
        total = max(len(known), self.settings.trials or 0)
        rest = f"; {', '.join(words)}" if words else ""
        print(f"\nsweep {self.swept.folder}: {counts[FINISHED]} of {total} trials finished{rest}")
        print(f"table: {os.path.relpath(summary.write_csv(self.state, self.settings))}")
        print(f"compare: python -m glmexp.compare {shlex.quote(os.path.relpath(self.state.root))}", flush=True)
        if self.signals or counts[STOPPED]:
            print(f"to go on: the same line with {typed('hydra.sweep.dir', self.swept.folder)}", file=sys.stderr)
        return self._exit_code(counts, total)

    def _exit_code(self, counts: Mapping[str, int], total: int) -> int:
        if signal.SIGINT in self.signals:
            return 128 + signal.SIGINT
        if counts[FINISHED] == total:
            return 0
        if counts[trials.FAILED]:
            return EXIT_FAILURE
        results = sum(counts[state] for state in OUTCOMES)
        return EXIT_UNUSABLE if results == total else EXIT_STOPPED


_RESUMABLE = (STOPPED, trials.FAILED, trials.OUT_OF_MEMORY)
"""Where these have a checkpoint, they go on from it; what was not finite would not be so once more: from the start."""
