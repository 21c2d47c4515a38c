"""Runs as rows: seeds of one configuration put together, what differs, what came out, sorted and filtered."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from glmexp.compare.runs import Run
from glmexp.compare.statistics import Spread, spread
from glmexp.compare.where import as_text, column, matches, nothing_left, parse
from glmexp.config.entries import reads
from glmexp.launcher.trials import FINISHED
from glmexp.tracker.outcome import LOSS

SEED = "train.seed"
_ELSEWHERE = ("run", "tracker", "sweep", "slurm")
_NOT_THE_RUN = (
    *("train.resume", "train.stop_after", "train.stop_after_s", "train.profile", "data.cache_dir"),
    *("data.num_workers", "data.prefetch", "data.prepare_workers", "offload.nvme_path"),
    *(
        f"launcher.{key}"
        for key in ("name", "slots", "node_rank", "master_addr", "master_port", "timeout_s", "watch_s")
    ),
)
"""Where a run lay and who watched it: no part of what is compared."""
_LONG = 80
"""Characters: runs that differ in this much are known by their names."""
LOWER_IS_BETTER = (LOSS, "best/loss", "eval/loss/perplexity", "train/loss", "mem/peak_bytes", "time/train_s")


@dataclass(frozen=True)
class Row:
    """One configuration: a run, or several seeds of it."""

    label: str
    runs: list[Run]

    @cached_property
    def config(self) -> dict[str, Any]:
        """Dotted key to value; the seed only where the row is one run."""
        config = described(self.runs[0])
        if len(self.runs) > 1:
            config.pop(SEED, None)
        return config

    @property
    def name(self) -> str:
        """``ranks#0``, trial 0 of that sweep; the folder of a run; of each seed."""
        return " ".join(run.name for run in self.runs)

    @property
    def labels(self) -> list[str]:
        """One a run: with the seed where there are several."""
        if len(self.runs) == 1:
            return [self.label]
        return [f"{self.label} seed={short(run.config.get(SEED))}".strip() for run in self.runs]

    @cached_property
    def state(self) -> str:
        """``finished``, or ``2 finished, 1 failed``."""
        states = [run.state for run in self.runs]
        if len(set(states)) == 1:
            return states[0]
        return ", ".join(f"{states.count(one)} {one}" for one in dict.fromkeys(states))

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        """Result to its mean and spread: over finished seeds; over what there is where none has finished."""
        finished = [run for run in self.runs if run.state == FINISHED] or self.runs
        names = dict.fromkeys(name for run in finished for name in run.results)
        return {name: spread([run.results[name] for run in finished if name in run.results]) for name in names}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """``env/<name>`` to value; several where the seeds differ in it."""
        flat = [_environment(run) for run in self.runs]
        names = dict.fromkeys(name for one in flat for name in one)
        values = {name: list(dict.fromkeys(as_text(one.get(name)) for one in flat)) for name in names}
        return {name: " / ".join(texts) for name, texts in values.items()}

    @cached_property
    def cells(self) -> dict[str, Any]:
        """Everything by its key: for filters, sorting and files."""
        means = {name: one.mean for name, one in self.spreads.items()}
        reasons = " / ".join(dict.fromkeys(run.reason for run in self.runs if run.reason))
        first = {"label": self.label, "state": self.state, "runs": len(self.runs)}
        return first | self.config | means | self.environment | {"reason": reasons}


def described(run: Run) -> dict[str, Any]:
    """Dotted key to value of what says what a run was: not where it lay, and nothing that its entry does not read."""
    entry = str(run.config.get("entry.name", "train"))
    apart = {"data.train_file"} if entry == "evaluate" and run.config.get("data.holdout") is None else set()
    return {key: value for key, value in run.config.items() if compared(key) and reads(entry, key) and key not in apart}


def compared(key: str) -> bool:
    """Whether a dotted key says what a run was, and not where it lay."""
    return key.split(".")[0] not in _ELSEWHERE and key not in _NOT_THE_RUN


def _environment(run: Run) -> dict[str, Any]:
    found = {f"env/{name}": value for name, value in run.environment.get("versions", {}).items()}
    commit = run.environment.get("git_commit")
    dirty = " and changes" if run.environment.get("git_dirty") else ""
    found |= {"env/git_commit": f"{commit[:9]}{dirty}" if commit else None, "env/python": run.environment.get("python")}
    return found if run.environment else {}


@dataclass
class Table:
    """What is shown: rows in order, and the columns that tell them apart."""

    rows: list[Row]
    differing: list[str]
    """Config keys with more than one value, swept ones first."""
    swept: list[str]
    environment: list[str] = field(default_factory=list)
    """Versions and commits with more than one value."""
    sorted_by: str = "label"
    descending: bool = False

    @property
    def results(self) -> list[str]:
        """Result columns that some row has."""
        return list(dict.fromkeys(name for row in self.rows for name in row.spreads))

    @property
    def keys(self) -> list[str]:
        """Everything that a filter may name."""
        return list(dict.fromkeys(key for row in self.rows for key in row.cells))

    def where(self, expressions: Collection[str]) -> Table:
        """The rows for which all conditions hold. Raises ConfigError for a condition that cannot be understood, and
        where no row is left."""
        clauses = parse(expressions, self.keys)
        rows = [row for row in self.rows if matches(clauses, row.cells)]
        if not rows:
            raise nothing_left(clauses, [row.cells for row in self.rows])
        return replace(self, rows=rows)

    def sort(self, key: str | None, descending: bool) -> None:
        """Numbers before texts, rows without a value last. None: by what came out, best first."""
        if key is None:
            named = [name for name in (LOSS, "train/loss") if name in self.results]
            key = named[0] if named else "label"
        else:
            key = column(key, self.keys, "--sort")
        self.sorted_by, self.descending = key, descending

        def place(row: Row) -> tuple[int, float, str]:
            value = row.cells.get(self.sorted_by)
            if isinstance(value, (int, float)) and not math.isnan(value):
                return 0, -value if descending else value, ""
            return (2 if value is None or isinstance(value, float) else 1), 0.0, as_text(value)

        self.rows.sort(key=place)


def table(runs: Sequence[Run], together: bool = True) -> Table:
    """Rows of runs. together: runs that differ in the seed, and in nothing but the seed, become one."""
    groups: dict[tuple[str, int], list[Run]] = {}
    places = _groups(runs) if together else [("", number) for number in range(len(runs))]
    for place, run in zip(places, runs, strict=True):
        groups.setdefault(place, []).append(run)
    rows = [Row("", group) for group in groups.values()]
    swept = list(dict.fromkeys(key for run in runs for key in run.swept if compared(key)))
    keys = _differing([row.config for row in rows], swept)
    environments = [row.environment for row in rows]
    versions = [key for key in dict.fromkeys(key for one in environments for key in one) if _several(environments, key)]
    labels = _labels(rows, keys)
    named = [Row(label, row.runs) for label, row in zip(labels, rows, strict=True)]
    return Table(named, keys, [key for key in swept if key in keys or key == SEED], versions)


def _groups(runs: Sequence[Run]) -> list[tuple[str, int]]:
    """Of each run a group, equal for runs that differ in the seed alone. A seed that was run again begins another
    group, finished runs first: what came out twice the same would pass for a small spread over seeds."""
    met: Counter[tuple[str, str]] = Counter()
    found: dict[int, tuple[str, int]] = {}
    for number in sorted(range(len(runs)), key=lambda place: runs[place].state != FINISHED):
        text, seed = _but_the_seed(runs[number]), as_text(runs[number].config.get(SEED))
        found[number] = (text, met[text, seed])
        met[text, seed] += 1
    return [found[number] for number in range(len(runs))]


def _but_the_seed(run: Run) -> str:
    """Equal for runs that differ in the seed alone."""
    config = {key: value for key, value in described(run).items() if key != SEED}
    return json.dumps(config, sort_keys=True, ensure_ascii=True, default=str)


def _several(maps: Sequence[dict[str, Any]], key: str) -> bool:
    return len({as_text(one[key]) for one in maps if key in one}) > 1


def _differing(configs: Sequence[dict[str, Any]], swept: Sequence[str]) -> list[str]:
    """Keys with several values. One that only some options have (``method.rank``) counts where those differ in it; one
    that follows another (``optim.lr`` the method's) is left out."""
    keys = dict.fromkeys([*swept, *(key for config in configs for key in config)])
    kept: dict[tuple[str, ...], str] = {}
    for key in keys:
        if _several(configs, key):
            kept.setdefault(tuple(as_text(config.get(key)) for config in configs), key)
    return list(kept.values())


def _labels(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Short words that tell the rows apart: what differs, else (or where that would be long) where they lie."""
    leaves = [key.rsplit(".", 1)[-1] for key in keys]
    names = [leaf if leaves.count(leaf) == 1 else key for leaf, key in zip(leaves, keys, strict=True)]

    def words(row: Row) -> str:
        pairs = [(name, row.config.get(key)) for name, key in zip(names, keys, strict=True)]
        return " ".join(f"{name}={short(value)}" for name, value in pairs if value is not None)

    labels = [words(row) for row in rows]
    places = [row.name for row in rows]
    return [
        place if len(label) > _LONG else label if label and labels.count(label) == 1 else f"{label} {place}".strip()
        for label, place in zip(labels, places, strict=True)
    ]


def short(value: Any) -> str:
    """A cell for people: six digits of a number, at most 40 characters of a text."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.6g}"
    text = as_text(value)
    return text if len(text) <= 40 else f"…{text[-39:]}"
