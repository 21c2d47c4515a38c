"""``--help``: what can be chosen and how, without Hydra and without anything heavy. Field docs for everyone."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from functools import cache
from pathlib import Path
from typing import Any

from glmexp.config.nearest import conf_folder, shipped_options
from glmexp.config.schema import RunConfig

TEXT = """glmexp: fine-tuning of ChatGLM and Qwen2 on DeepSpeed, composed from groups of options.

  python -m glmexp [GROUP=OPTION ...] [KEY=VALUE ...]

Without arguments: a tiny shipped model is tuned with LoRA on shipped rows. A group's option brings its values, and any
value inside is KEY=VALUE, such as optim.lr=1e-4. Everything is checked before anything heavy is loaded; all mistakes
are shown at once.

Groups, [the default], and their options:
{groups}

Examples:
  python -m glmexp method=ptuning zero=stage3                        another method, another ZeRO stage
  python -m glmexp model=qwen2_0_5b data=alpaca data.train_file=FILE  your own rows; FILE is relative to this folder
  python -m glmexp train.batch_size=64 train.micro_batch_size=4      gradient accumulation is computed
  python -m glmexp -m method.rank=4,8 optim.lr=1e-3,5e-3             a sweep: four runs; launcher.slots=2: two at a time
  python -m glmexp -m sweep=search 'method.rank=choice(4,8,16)'      each run chosen by what the earlier ones gave
  python -m glmexp -m +experiments=rank_and_bucket                   a study from experiments/
  python -m glmexp entry=evaluate artifact.path=outputs/NAME/TIME    measure what was trained
  python -m glmexp entry=generate artifact.path=outputs/NAME/TIME    ask what was trained, in a chat
  python -m glmexp entry=plan model=chatglm3 plan.gpu=24GB           memory and time of a run, and what would fit
  python -m glmexp entry=smoke method=lora zero=stage3               a short run, judged, before a long one
  python -m glmexp entry=doctor doctor.explain=zero.stage            what an option means, its unit, and who set it

{studies}

What a run does is the group entry. A run lies in outputs/<run.name>/<time>, a sweep in outputs/<run.name>/sweep-<time>,
both below this folder; run.dir=FOLDER and hydra.sweep.dir=FOLDER choose another one. A sweep that was interrupted goes
on with the same line and its hydra.sweep.dir: what has finished is kept.

Values: null switches off; lists are [a,b]; text with = , ( ) [ ] # or spaces stands in quotes inside of the shell's:
"data.train_file='my file, part(1).jsonl'".

Flags:
  --cfg job             print the composed configuration and stop (--resolve, --package method)
  --multirun, -m        run the grid of all KEY=A,B,C
  --config-dir DIR      options and experiments of your own: DIR/<group>/<option>.yaml
  --info [WHAT]         where the configuration comes from: all config defaults defaults-tree plugins searchpath
  --version --hydra-help --shell-completion
"""


def meaning(key: str) -> str:
    """The first sentence of a field's docstring, by its dotted key."""
    *path, leaf = key.split(".")
    cls: Any = RunConfig
    for part in path:
        cls = typing.get_type_hints(cls).get(part, Any)
    if not dataclasses.is_dataclass(cls):
        return "it has no default"
    return field_docs(typing.cast(type, cls))[leaf].split(". ")[0].rstrip(".")


def field_docs(cls: type) -> dict[str, str]:
    """Field name to the docstring below it, of a settings dataclass and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is not object:
            docs.update(_docs_of_module(base.__module__).get(base.__name__, {}))
    return docs


@cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    """Class name to field name to docstring, parsed from the module's source (a string below an annotated name)."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    classes: dict[str, dict[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            classes[node.name] = {
                field.target.id: inspect.cleandoc(text.value.value)
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    return classes


def overview(words: list[str]) -> str:
    """The text of ``--help``; ``words`` are the command line, for the options of its ``--config-dir``."""
    rows = []
    own = folder_of(words)
    for group, comment in groups_in_order():
        options = [*shipped_options()[group], *(path.stem for path in sorted((own or Path()).glob(f"{group}/*.yaml")))]
        first = f"  {group:<10} {comment:<52} "
        rows.append(textwrap.fill(" ".join(options), 119, initial_indent=first, subsequent_indent=" " * len(first)))
    names = ", ".join(shipped_options().get("experiments", ()))
    studies = textwrap.fill(f"Studies, run as above: {names}.", 119)
    return TEXT.format(groups="\n".join(rows), studies=studies)


def groups_in_order() -> list[tuple[str, str]]:
    """(group, comment) in the order of config.yaml's defaults list, which is the table of contents."""
    lines = (conf_folder() / "config.yaml").read_text(encoding="utf-8").splitlines()
    rows = [re.fullmatch(r"  - (\w+): (.*?)(?: # (.*))?", line) for line in lines]
    return [(row[1], f"[{row[2].strip('[]')}] {row[3] or ''}") for row in rows if row is not None]


def versions() -> str:
    """The text of ``--version``."""
    from importlib.metadata import version

    import glmexp

    return f"glmexp {glmexp.__version__} (hydra-core {version('hydra-core')}, omegaconf {version('omegaconf')})"


def folder_of(words: list[str]) -> Path | None:
    """The folder after ``--config-dir``, if it is given."""
    for number, word in enumerate(words):
        if word in ("--config-dir", "-cd") and number + 1 < len(words):
            return Path(words[number + 1])
        if word.startswith("--config-dir="):
            return Path(word.partition("=")[2])
    return None
