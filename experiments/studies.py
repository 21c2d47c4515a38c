"""The studies of this folder: what their files say, the tables beside them, and all of them shortened.

    python experiments/studies.py table NAME SWEEP...          results/NAME.csv, from the folders of its sweeps
    python experiments/studies.py table NAME --bench FILE...   the same, from rows that a bench wrote
    python experiments/studies.py smoke [NAME...]              every command with two steps and small sizes, on a CPU

A study is a Hydra file with a head of comments: ``Question``, ``Command`` (a line each, where there are several),
``Columns`` (results in its table), ``Smoke`` (what shortens it), ``Expected`` (what was found: every decimal number in
it stands in the table) and ``Measured`` (hardware, commit, date, seeds). ``Needs`` makes data that is not shipped. A
table is only written from runs whose configuration is that of the file.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glmexp.compare.runs import Run
    from glmexp.compare.table import Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
HEAD = ("Question", "Command", "Columns", "Smoke", "Expected", "Measured")
SEED, SWEEP = "train.seed", "sweep"
STOPPED = 75
NOT_YET = "not here yet"
"""How ``Measured`` begins where there is no table."""
_START = ["python", "-m", "glmexp", "-m"]
SETTING = ("seeds", "state", "hardware", "versions", "commit", "date")
"""Columns behind the results: what they were measured with."""
_PACKAGES = ("torch", "deepspeed", "transformers", "peft")
_SETTLED = ("offload.adam",)
"""What a run settles by itself and writes down."""
_NOT_COMPARED = ("data.train_file", "train.max_steps", "train.epochs", "launcher.nproc")
"""Of bench rows: where their data lies, how long they go on."""


@dataclass(frozen=True)
class Study:
    """One file."""

    name: str
    head: dict[str, str]
    """Word of the head -> its text, lines joined by line ends."""
    fixed: dict[str, Any]
    """Group or dotted key -> what the file sets it to in every trial."""
    grid: dict[str, list[Any]]
    """Swept key -> its values."""

    @property
    def commands(self) -> list[list[str]]:
        """Its command lines as words."""
        return [line.split() for line in self.head["Command"].splitlines()]

    @property
    def columns(self) -> list[str]:
        """Results in its table."""
        return self.head["Columns"].split()

    @property
    def table(self) -> Path:
        """The table beside it."""
        return HERE / "results" / f"{self.name}.csv"

    def trials(self) -> list[dict[str, Any]]:
        """Of each trial, all that the file sets; seeds are rows of one configuration and left out."""
        axes = {key: values for key, values in self.grid.items() if key != SEED}
        rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        return [row | self.fixed for row in rows]


def names() -> list[str]:
    """Every study."""
    return sorted(file.stem for file in HERE.glob("*.yaml"))


def read(name: str) -> Study:
    """The study of this name. Raises SystemExit where there is none."""
    import yaml

    file = HERE / f"{name}.yaml"
    if not file.exists():
        raise SystemExit(f"{name}: no study of that name; there are {', '.join(names())}")
    text = file.read_text(encoding="utf-8")
    tree = yaml.safe_load(text)
    swept = tree.pop("hydra")["sweeper"]["params"]
    tree.pop("run")
    chosen = [next(iter(one.items())) for one in tree.pop("defaults", []) if isinstance(one, dict)]
    groups = {key.removeprefix("override /"): value for key, value in chosen}
    grid = {key: [yaml.safe_load(word) for word in str(value).split(",")] for key, value in swept.items()}
    return Study(name, _head(text), {**groups, **dict(_leaves(tree))}, grid)


def _head(text: str) -> dict[str, str]:
    """``# Word: text``, with further lines of the text further in."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()):
        start = re.fullmatch(r"# ([A-Z]\w+):\s+(.*)", line)
        if start:
            lines = found.setdefault(start[1], [])
        lines.append((start[2] if start else line[1:]).strip())
    return {word: "\n".join(lines) for word, lines in found.items()}


def _leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


# -- tables


def write_table(study: Study, sweeps: Sequence[Path], bench: Sequence[Path], note: str) -> Path:
    """The table of a study. Raises SystemExit where the runs are not those of its file."""
    found = _of_bench(study, bench) if bench else _of_sweeps(study, sweeps)
    several = len({place for place, _, _ in found}) > 1
    first = ([SWEEP] if several else []) + list(found[0][1])
    spread = [name for name in study.columns if any(row.spreads[name].sd for _, _, row in found)]
    results = [name for one in study.columns for name in (one, *([f"{one}:sd"] if one in spread else []))]
    study.table.parent.mkdir(exist_ok=True)
    with study.table.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow([*first, *results, *SETTING])
        for place, options, row in found:
            numbers = [getattr(row.spreads[name.removesuffix(":sd")], "sd" if name.endswith(":sd") else "mean")
                       for name in results]  # fmt: skip
            texts = [*map(_text, options.values()), *map(_number, numbers)]
            rows.writerow([*([place] if several else []), *texts, *_setting(row.runs, note)])
    return study.table


Found = tuple[str, dict[str, Any], "Row"]
"""(name of its sweep, its options, its runs: one a seed)."""


def _of_sweeps(study: Study, sweeps: Sequence[Path]) -> list[Found]:
    from glmexp.compare.runs import read_all

    found: list[Found] = []
    for sweep in sweeps:
        runs = [_with_more(run) for run in read_all([sweep])]
        found += [(sweep.name, options, _row(study, options, runs, ())) for options in study.trials()]
    return found


def _of_bench(study: Study, bench: Sequence[Path]) -> list[Found]:
    lines = [json.loads(line) for file in bench for line in file.read_text(encoding="utf-8").splitlines()]
    runs = [_bench_run(line) for line in lines]
    return [("", options, _row(study, options, runs, _NOT_COMPARED)) for options in study.trials()]


def _row(study: Study, options: dict[str, Any], runs: Sequence[Run], but: Sequence[str]) -> Row:
    """The runs that have these options, and every other key as the study's file has it."""
    from glmexp.compare.table import Row, compared

    wanted = {seed: _composed(study, options, seed, but) for seed in study.grid.get(SEED, [None])}
    fitting: list[Run] = []
    closest: tuple[int, str] = (1 << 30, "there are none")
    for config in wanted.values():
        keys = [key for key in config if compared(key) and key not in (*_SETTLED, *but)]
        for run in runs:
            wrong = [key for key in keys if key in run.config and run.config[key] != config[key]]
            closest = min(closest, (len(wrong), f"{run.name} differs in {', '.join(wrong[:5])}"))
            if not wrong:
                fitting.append(run)
                break
        else:
            raise SystemExit(f"{study.name}: no run of {options}; {closest[1]}")
    for run in fitting:
        if run.state in ("running", "waiting", "unfinished"):
            raise SystemExit(f"{study.name}: {run.name} is {run.state}: let it end first")
        missing = [name for name in study.columns if name not in run.results]
        if missing:
            raise SystemExit(f"{study.name}: {run.name} has no {', '.join(missing)}; it has {sorted(run.results)}")
    return Row("", fitting)


def _composed(study: Study, options: dict[str, Any], seed: int | None, but: Sequence[str] = ()) -> dict[str, Any]:
    """Dotted key to value of one trial, as the command line composes it."""
    from glmexp.config.arguments import parse
    from glmexp.config.compose import Machine, request
    from glmexp.config.load import dump, flatten

    words = [f"{key}={_text(value)}" for key, value in options.items() if key in study.grid]
    seeds = [] if seed is None else [f"{SEED}={seed}"]
    # A bench's data lay elsewhere; composing asks only that there is such a file.
    data = [f"data.train_file={__file__}"] if {"data.train_file"} & set(but) & set(study.fixed) else []
    (config,) = request(parse(["-m", f"+experiments={study.name}", *words, *seeds, *data]), Machine()).trials
    return flatten(dump(config))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else str(int(value) if value.is_integer() else value)


def _with_more(run: Run) -> Run:
    """Results that a comparison of runs in general has no use for."""
    more: dict[str, Any] = {}
    steps = [values for values in run.metrics.values() if "perf/step_s" in values]
    if steps:
        more["data/padding_share"] = statistics.fmean(one["data/padding_share"] for one in steps)
        rows = [one["perf/samples_per_s"] * one["perf/step_s"] for one in steps]
        more["data/examples_a_step"] = round(statistics.fmean(rows), 3)
    record = run.place / "artifact" / "glmexp.json"
    if record.exists():
        sums = json.dumps(json.loads(record.read_text(encoding="utf-8"))["tensors"], sort_keys=True)
        more["artifact/sum"] = float(int(hashlib.sha256(sums.encode()).hexdigest()[:8], 16))
    return replace(run, results=run.results | more)


def _bench_run(line: dict[str, Any]) -> Run:
    """A row of bench/plan.py, or a side of two that were measured in turns, as a run."""
    from glmexp.compare.runs import Run
    from glmexp.config.compose import run_config
    from glmexp.config.load import dump, flatten

    results: dict[str, float] = {}
    if line.get("kind") == "side":
        name, state = line["side"], "finished"
        words = [word for word in shlex.split(line["command"])[3:] if not word.startswith(("run.", "data.train_file"))]
        config = flatten(dump(run_config([*words, f"data.train_file={__file__}"], ranks=_ranks(words))))
        results = {name: line[name.rpartition("/")[2]] for name in ("perf/tokens_per_s", "perf/step_s")}
    else:
        name, state, config = line["case"], line["outcome"].replace("ran", "finished"), flatten(line.get("config", {}))
        if state == "finished":
            results = {
                "mem/peak_bytes": line["peak"],
                "perf/step_s": line["step_s"],
                # Of the steps behind step_s: the first ones of line["steps"] compile.
                "perf/tokens_per_s": sum(one["tokens"] for one in line["steps"][-1]["batches"]) / line["step_s"],
                "model/parameters": line["parameters"],
                "model/trainable_parameters": line["trained"],
            }
    environment = {name: line[name] for name in ("versions", "device")}
    environment |= {"git_commit": line["commit"], "started": line["date"]}
    numbers = {key: float(one) for key, one in results.items()}
    return Run(name, Path(), None, state, "", config, environment, {}, numbers)


def _ranks(words: Sequence[str]) -> int:
    return int(next(word for word in words if word.startswith("launcher.nproc=")).partition("=")[2])


def _setting(runs: Sequence[Run], note: str) -> list[str]:
    """The columns of SETTING."""
    first = runs[0].environment
    hardware = first.get("device") or f"{first['cpus']} CPU cores"
    commits = dict.fromkeys(_commit(run.environment) for run in runs)
    versions = " ".join(f"{name} {first['versions'][name]}" for name in _PACKAGES)
    seeds = " ".join(str(run.config[SEED]) for run in runs)
    states = "/".join(dict.fromkeys(run.state for run in runs))
    hardware = f"{hardware}, {note}" if note else hardware
    return [seeds, states, hardware, versions, "/".join(commits), min(run.environment["started"] for run in runs)[:10]]


def _commit(environment: dict[str, Any]) -> str:
    return environment["git_commit"][:7] + (" and changes" if environment.get("git_dirty") else "")


# -- a file against its table


def contradictions(study: Study) -> Iterator[str]:
    """What the head lacks, and where the table beside the file is not the file's."""
    yield from (f"the head has no {word}" for word in HEAD if not study.head.get(word))
    wrong = [" ".join(words) for words in study.commands if words[:5] != [*_START, f"+experiments={study.name}"]]
    yield from (f"no command of this study: {line}" for line in wrong)
    if study.head.get("Measured", "").startswith(NOT_YET):
        if study.table.exists():
            yield f"{NOT_YET}, and there is a table"
        return
    if not study.table.exists():
        yield "there is no table beside it"
        return
    yield from _table_contradictions(study)


def _table_contradictions(study: Study) -> Iterator[str]:
    with study.table.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    wanted = [{key: _text(value) for key, value in one.items()} for one in study.trials()]
    for sweep in dict.fromkeys(row.get(SWEEP, "") for row in rows):
        mine = [row for row in rows if row.get(SWEEP, "") == sweep]
        options = [{key: row[key] for key in row if key in wanted[0]} for row in mine]
        if options != wanted:
            yield f"options of the table: {options}, of the file: {wanted}"
    results = [name for name in rows[0] if name not in (SWEEP, *wanted[0], *SETTING) and not name.endswith(":sd")]
    if results != study.columns:
        yield f"results of the table: {results}, of the file: {study.columns}"
    seeds = " ".join(map(str, study.grid.get(SEED, [])))
    if seeds and any(row["seeds"] != seeds for row in rows):
        yield f"seeds of the table: {[row['seeds'] for row in rows]}, of the file: {seeds}"
    said = study.head.get("Measured", "")
    facts = {row[key] for row in rows for key in ("commit", "date")}
    yield from (f"Measured does not say {fact}" for fact in sorted(facts) if fact not in said)
    cells = [float(value) for row in rows for key, value in row.items() if key.removesuffix(":sd") in results and value]
    for word in re.findall(r"(?<![\w.])\d[\d,]*\.\d+", study.head.get("Expected", "")):
        if not any(_rounds_to(cell * unit, word) for cell in cells for unit in (1.0, 100.0, 2.0**-30)):
            yield f"expected {word}, which is no number of the table"


def _rounds_to(value: float, word: str) -> bool:
    return f"{value:.{len(word.partition('.')[2])}f}" == word.replace(",", "")


# -- all of them shortened


def shortened(study: Study, work: Path) -> list[tuple[list[str], int]]:
    """Its commands with two steps, and with what its head says under ``Smoke``; the exit code of each."""
    done = []
    for words in study.commands:
        places = {word.partition("=")[0]: word for word in words[len(_START) :]}
        folder = Path(places.get("hydra.sweep.dir", f"={study.name}").partition("=")[2].removeprefix("outputs/"))
        stops = "train.stop_after" in places
        places |= {"hydra.sweep.dir": f"hydra.sweep.dir={work / folder}", "tracker": "tracker=none"}
        places["train.max_steps"] = "train.max_steps=2"
        if stops:
            places["train.stop_after"] = "train.stop_after=1"
        places |= {word.partition("=")[0]: word for word in study.head["Smoke"].split()}
        done.append(([*_START, *places.values()], STOPPED if stops else 0))
    return done


def smoke(wanted: Sequence[str], work: Path) -> int:
    """Run them; how many commands did not end as they should."""
    wrong = 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for study in map(read, wanted):
        for words, expected in shortened(study, work):
            print(f"{study.name}: {' '.join(words)}", flush=True)
            done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, env=environment, check=False)
            wrong += done.returncode != expected
            if done.returncode != expected:
                print(f"{study.name}: exit code {done.returncode}, expected {expected}", flush=True)
    print(f"{len(wanted)} studies, {wrong} commands went wrong", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    table = commands.add_parser("table", help="write results/NAME.csv")
    table.add_argument("name")
    table.add_argument("sweeps", nargs="*", type=Path)
    table.add_argument("--bench", nargs="+", default=[], type=Path, help="rows of bench/plan.py or zero3_speed.py")
    table.add_argument("--note", default="", help="added to the hardware, such as what else ran there")
    short = commands.add_parser("smoke", help="run each study shortened")
    short.add_argument("names", nargs="*")
    short.add_argument("--work", type=Path, default=Path("outputs/experiments-smoke"))
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if asked.what == "smoke":
        raise SystemExit(min(1, smoke(asked.names or names(), asked.work.resolve())))
    if bool(asked.sweeps) == bool(asked.bench):
        parser.error("folders of sweeps, or --bench FILE")
    print(os.path.relpath(write_table(read(asked.name), asked.sweeps, asked.bench, asked.note)))


if __name__ == "__main__":
    main()
