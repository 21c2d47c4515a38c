"""``python -m glmexp.compare RUN_OR_SWEEP...``: what differs between runs, and what came of it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from glmexp.compare import files, terminal, where
from glmexp.compare.pairs import differences, scores
from glmexp.compare.runs import Run, read_all
from glmexp.compare.table import table
from glmexp.config.errors import EXIT_USER_MISTAKE, ConfigError, Problem, UserError
from glmexp.config.streams import show_everything

_EPILOG = """Keys are those of config.yaml, results those of the table; the end of one suffices where no other has it.
results: the last value of each eval/ metric and of train/loss; best/loss and best/step; perf/tokens_per_s (median of
steps), mem/peak_bytes, time/train_s (steps alone), time/wall_s, model/trainable_parameters, train/steps.
docs/compare.md says more. Exit codes: 0; 2 where the command line or a folder is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    options = parser().parse_args(argv)
    show_everything()
    try:
        _compare(options)
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return EXIT_USER_MISTAKE
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    made = argparse.ArgumentParser(
        prog="python -m glmexp.compare",
        description="Compare runs and sweeps by their folders alone.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("paths", nargs="+", type=Path, metavar="RUN_OR_SWEEP", help="a run folder, a sweep's, or one above such")
    add("--sort", metavar="KEY", help="a result, a config key or label; default: the held-out loss")
    add("--descending", action="store_true", help="largest first")
    add("--where", action="append", default=[], metavar="CONDITION", help=f"{where.HELP}; may be given again")
    add("--columns", nargs="+", metavar="KEY", help="results or keys of config.yaml that the terminal's table shows")
    add(
        "--width",
        type=_width,
        metavar="N",
        help="of the table; default: the terminal's, and no limit in a pipe or file",
    )
    add("--all", action="store_true", help="runs of every entry; default: trainings and evaluations, and what is named")
    add("--runs", action="store_true", help="one row a run; default: the seeds of a configuration are one row")
    add("--baseline", metavar="LABEL", help="run that others are held against; default: the first one named")
    add("--axes", nargs=2, metavar=("X", "Y"), help="keys of the page's heat map; default: the first two swept ones")
    add("--csv", type=Path, metavar="FILE", help="all columns and digits as CSV")
    add("--parquet", type=Path, metavar="FILE", help="the same as Parquet")
    add("--html", type=Path, metavar="FILE", help="one page with curves, heat map, answers; needs no network")
    return made


def _compare(options: argparse.Namespace) -> None:
    written = {f"--{name}": getattr(options, name) for name in ("csv", "parquet", "html")}
    for option, file in written.items():
        if file is not None:
            files.check_target(file, option)
    found = table(_asked(read_all(options.paths), options.all), together=not options.runs)
    columns = [where.column(word, found.keys, "--columns") for word in options.columns or []]
    axes = [where.column(word, found.keys, "--axes") for word in options.axes or []]
    found = found.where(options.where) if options.where else found
    runs = [run for row in found.rows for run in row.runs]
    labels = [label for row in found.rows for label in row.labels]
    baseline = _baseline(options.baseline, runs, labels)
    pairs = differences([scores(run) for run in runs], baseline)
    found.sort(options.sort, options.descending)
    terminal.print_table(found, columns, options.width)
    terminal.print_differences(pairs, labels, labels[baseline], options.width)
    if options.csv is not None:
        files.write_csv(found, options.csv)
    if options.parquet is not None:
        files.write_parquet(found, options.parquet)
    if options.html is not None:
        from glmexp.compare import page

        files.write_text(page.page(found, runs, labels, pairs, baseline, axes), options.html, "--html")
    for file in written.values():
        if file is not None:
            print(f"written: {file}")


def _width(word: str) -> int:
    if not word.isdigit() or int(word) < terminal.NARROWEST:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of characters from {terminal.NARROWEST} on")
    return int(word)


def _asked(runs: list[Run], every: bool) -> list[Run]:
    """Those to compare; the others are counted in one line."""
    left_out = Counter(run.left_out_as for run in runs if run.left_out_as is not None and not every)
    if not left_out:
        return runs
    words = ", ".join(f"{count} {what}" for what, count in left_out.most_common())
    kept = [run for run in runs if run.left_out_as is None]
    if not kept:
        raise ConfigError(Problem("no training and no evaluation", f"only {words}", "--all, or name their folders"))
    total = left_out.total()
    print(f"{total} run{'s are' if total > 1 else ' is'} not shown (--all): {words}\n")
    return kept


def _baseline(word: str | None, runs: Sequence[Run], labels: Sequence[str]) -> int:
    """The place of the run that is meant by its name, its label, or a part that only one label has."""
    if word is None:
        return 0
    fitting = [place for place, label in enumerate(labels) if label == word]
    fitting = fitting or [place for place, run in enumerate(runs) if run.name == word]
    fitting = fitting or [place for place, label in enumerate(labels) if word in label]
    if len(fitting) != 1:
        some = ", ".join(repr(labels[place]) for place in (fitting or range(len(labels)))[:5])
        found = "fits several runs" if fitting else "fits no run"
        raise ConfigError(Problem(f"--baseline {word!r}", found, f"a label, or a part of one: {some}"))
    return fitting[0]


if __name__ == "__main__":
    sys.exit(main())
