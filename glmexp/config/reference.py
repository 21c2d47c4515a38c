"""``python -m glmexp.config.reference FILE``: every option of every group as a page, from schema and YAML files.

Nothing in the page is written by hand: a field's annotation gives type and range, its docstring the meaning, the files
under conf/ the defaults. ``docs/options.md`` is this page; a test holds that it is not stale.
"""

from __future__ import annotations

import functools
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

from glmexp.config import registry
from glmexp.config.compose import run_config
from glmexp.config.ds_config import TABLE
from glmexp.config.explain import defaults_of, hint_of, unit_of
from glmexp.config.help import groups_in_order
from glmexp.config.load import describe
from glmexp.config.nearest import conf_folder, keys, shipped_options
from glmexp.config.schema import RunConfig

HEAD = """# Every option

Written by `python -m glmexp.config.reference docs/options.md` from the schema and the files under `conf/`; do not edit
it, run that line after a change.
One option with the value that your own line gives it, and who set it:
`python -m glmexp entry=doctor doctor.explain=zero.reduce_bucket_size`.

A group's option is chosen as `group=option`, a value inside as `group.key=value`. `null` switches off.
"""
BY_CODE = ("method", "tracker", "eval")
"""Groups whose options have settings of their own, beside their code."""
NO_GROUP = "Keys that belong to no choice of option; their defaults stand in `conf/config.yaml`."


def page() -> str:
    """The whole page, in Markdown."""
    groups = dict(groups_in_order())
    sections = [section for section in typing.get_type_hints(RunConfig) if section not in groups]
    parts = [HEAD, _contents([*groups, *sections])]
    parts.extend(_group(group, comment) for group, comment in groups.items())
    parts.extend(_section(section) for section in sections)
    return "\n".join(parts)


@functools.cache
def _defaults() -> RunConfig:
    return run_config([])


def _contents(names: list[str]) -> str:
    return " · ".join(f"[{name}](#{name})" for name in names) + "\n"


def _group(group: str, comment: str) -> str:
    default, _, words = comment.partition("] ")
    default = f"[{default[1:].replace(', ', ',')}]" if "," in default else default[1:]
    lines = [f"## {group}", "", f"{words[:1].upper()}{words[1:]}. Default: `{group}={default}`.", ""]
    lines += ["| option | |", "| --- | --- |"]
    lines += [f"| `{group}={option}` | {_headline(group, option)} |" for option in shipped_options()[group]]
    if group not in (*BY_CODE, *(key.split(".")[0] for key in keys() if _told(key))):
        lines += ["", hint_of(f"{group}.name", _defaults())[1]]
    return "\n".join([*lines, "", *_table(group)])


def _section(section: str) -> str:
    doc = (typing.get_type_hints(RunConfig)[section].__doc__ or "").strip()
    return "\n".join([f"## {section}", "", f"{doc} {NO_GROUP}" if doc else NO_GROUP, "", *_table(section)])


def _headline(group: str, option: str) -> str:
    """The comment at the top of an option's file, else the first sentence of its code's docstring."""
    first = (conf_folder() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()[0]
    if first.startswith("#") and "@package" not in first:
        return _cell(first.lstrip("# "))
    if group in BY_CODE and registry.known(group, option):
        return _cell((registry.option(group, option).__doc__ or "").split("\n")[0])
    return ""


def _table(section: str) -> Iterator[str]:
    known = {key: options for key, options in keys().items() if key.split(".")[0] == section and _told(key)}
    if not known:
        return
    yield from ("| key | allowed | unit | default | meaning |", "| --- | --- | --- | --- | --- |")
    config = _defaults()
    for key, options in known.items():
        hint, doc = hint_of(key, config)
        deepspeed = ", ".join(f"`{row.path}`" for row in TABLE if row.key == key)
        only = f"Only with {' or '.join(options)}. " if options and section != "eval" else ""
        meaning = f"{only}{' '.join(doc.split())}{f' DeepSpeed: {deepspeed}.' if deepspeed else ''}"
        cells = (f"`{key}`", describe(hint), unit_of(key, hint), _default(key), meaning)
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    yield ""


def _told(key: str) -> bool:
    """An option's own name is the table above."""
    section, _, leaf = key.partition(".")
    return leaf != "name" or section == "run"


def _default(key: str) -> str:
    """``16``, or ``1024 (alpaca, squad), 2048 (sharegpt)`` where options differ."""
    found = defaults_of(key)
    values = list(dict.fromkeys(found.values()))
    if len(values) < 2:
        return "".join(values) or "set by no file"
    return ", ".join(f"{one} ({', '.join(name for name in found if found[name] == one)})" for one in values)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(argv: list[str]) -> int:
    """Write the page to the file that is named."""
    if len(argv) != 1:
        print("usage: python -m glmexp.config.reference FILE", file=sys.stderr)
        return 2
    Path(argv[0]).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
