"""What a command of the manual asks for, judged without starting it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from glmexp.compare import __main__ as comparison
from glmexp.config.arguments import parse
from glmexp.config.compose import Machine, request
from glmexp.config.entries import TRAINS
from glmexp.config.errors import UserError
from glmexp.config.schema import RunConfig
from glmexp.plan import cards, estimate, shapes
from tests.manual.blocks import ROOT

RANKS = re.compile(r"--?(?:nproc_per_node|num_gpus|num_processes|ntasks-per-node|n)[= ](\d+)")
SHOWN = ("--help", "--version")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, comments and variables in front of them left out."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word not in ("&&", "&", ";", "|"):
                words.append(word)
                continue
            while words and re.match(r"[A-Z_][A-Z_0-9]*=", words[0]):
                words = words[1:]
            if words:
                yield words
            words = []


def fault(words: list[str], gpus: int, memory: str | None = None) -> str | None:
    """What is wrong with a command; None where it would start. memory: what it must fit into on each GPU."""
    if words[0] == "make":
        return None if f"\n{words[1]}:" in (ROOT / "Makefile").read_text() else f"there is no target {words[1]}"
    own = _own_words(words)
    if own is not None:
        return _composes(own, words, gpus, memory)
    if words[:2] == ["python", "-m"] and words[2] == "pytest":
        gone = [word for word in words if word.startswith("tests/") and not (ROOT / word.partition("::")[0]).exists()]
        return f"no such test: {gone[0]}" if gone else None
    if words[:3] == ["python", "-m", "glmexp.compare"]:
        return _compares(words[3:])
    if words[:2] == ["python", "-m"] and words[2].startswith(("glmexp.", "tests.")):
        file = ROOT / f"{words[2].replace('.', '/')}"
        return None if file.with_suffix(".py").exists() or (file / "__main__.py").exists() else f"no module {words[2]}"
    if words[0] == "python" and words[1].startswith("experiments/"):
        return _script(ROOT / words[1], words[2:])
    return f"{words[0]}: nobody here knows how to check this; mark the block run, or skip: WHY"


def _own_words(words: list[str]) -> list[str] | None:
    """The overrides of a command that starts glmexp, whatever launcher stands in front."""
    line = "\0".join(words)
    for start in ("-m\0glmexp", "--module\0glmexp"):
        if line.endswith(start):
            return []
        if f"{start}\0" in line:
            return line.partition(f"{start}\0")[2].split("\0")
    return None


def _composes(own: list[str], words: list[str], gpus: int, memory: str | None) -> str | None:
    if set(own) & set(SHOWN):
        return None
    outside = None
    if words[0] not in ("python",):
        found = RANKS.search(" ".join(words))
        outside = int(found[1]) if found else 2
    try:
        # More ranks than GPUs is what a launcher of several machines looks like from here.
        asked = request(parse(own), Machine(gpus, outside, cores=8))
        return next(filter(None, (_planned(one, memory) for one in asked.trials if gpus)), None)
    except UserError as error:
        return error.report()


def _planned(config: RunConfig, memory: str | None) -> str | None:
    """The plan of a training on GPUs, at the sizes that its option has, rows of full length; what does not fit."""
    if config.entry.name not in TRAINS or not shapes.knows(config):
        return None
    sized = replace(config, model=replace(config.model, init="random"))
    ranks = (config.launcher.nproc or 1) * config.launcher.nnodes
    planned = estimate.memory_of(sized, ranks, estimate.whole_batch(sized))
    if memory is None or planned.fits(cards.card(memory)):
        return None
    return (
        f"{planned.reserved() / 2**30:.1f} GiB do not fit into {memory}: {config.run.name} at stage {config.zero.stage}"
    )


def _compares(words: list[str]) -> str | None:
    """The comparison's own parser takes the words; what it would compare need not be there yet."""
    try:
        comparison.parser().parse_args(words)
    except SystemExit as ended:
        return None if ended.code == 0 else f"glmexp.compare does not take {' '.join(words)}"
    return None


def _script(file: Path, words: list[str]) -> str | None:
    """A script of experiments/ is there and knows the flags that it is given."""
    if not file.is_file():
        return f"no such script: {file.relative_to(ROOT)}"
    source = "".join(path.read_text(encoding="utf-8") for path in file.parent.glob("*.py"))
    unknown = [word for word in words if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source]
    return f"{file.name} does not know {', '.join(unknown)}" if unknown else None


def syntax(text: str) -> str | None:
    """What the shell says about a block that it only reads."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    return done.stderr.strip() or None
