"""The overview and the field docs: every group, option and field is in them."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

from glmexp.config import registry
from glmexp.config.help import field_docs, overview
from glmexp.config.nearest import shipped_options
from glmexp.config.schema import RunConfig


def test_overview_names_every_group_and_option_in_one_screen_width() -> None:
    text = overview([])
    for group, options in shipped_options().items():
        if group != "experiments":
            row = text.partition(f"\n  {group} ")[2].split()
            place = row.index(options[0], row.index(next(word for word in row if word.endswith("]"))))
            assert row[place : place + len(options)] == list(options)
        else:
            assert all(option in text for option in options)
    assert text.count("\n  python -m glmexp ") == 12, "the usage and eleven examples"
    assert max(map(len, text.splitlines())) <= 120


def test_overview_names_the_users_own_options(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").touch()
    for words in (["--help", "--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}", "-h"]):
        assert "lora ptuning mine" in overview(words)


def test_every_field_of_every_section_has_a_docstring() -> None:
    sections = [hint for hint in typing.get_type_hints(RunConfig).values() if dataclasses.is_dataclass(hint)]
    options = [
        registry.option(group, name) for group in ("method", "tracker", "eval") for name in registry.names(group)
    ]
    for cls in [*sections, *options]:
        docs = field_docs(typing.cast(type, cls))
        for field in dataclasses.fields(cls):
            assert docs.get(field.name), f"{cls.__name__}.{field.name}"


def test_field_docs_are_the_docstrings_below_the_fields() -> None:
    docs = field_docs(registry.option("method", "lora"))
    assert docs["rank"] == "Inner width of each adapter."
    assert docs["name"] == "Which option this is (set by the option's YAML file).", "inherited from Named"
