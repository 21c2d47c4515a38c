"""The page of all options is what the schema and the YAML files say today."""

from __future__ import annotations

import functools
from pathlib import Path

from glmexp.config import reference
from glmexp.config.nearest import keys, shipped_options
from glmexp.config.reference import main

page = functools.cache(reference.page)
PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_page_of_options_is_not_stale(tmp_path: Path) -> None:
    assert main([str(tmp_path / "options.md")]) == 0
    fresh = (tmp_path / "options.md").read_text(encoding="utf-8")
    assert fresh == PAGE.read_text(encoding="utf-8"), "run: python -m glmexp.config.reference docs/options.md"


def test_the_page_names_every_key_and_every_option() -> None:
    text = page()
    named = [key for key in keys() if not key.endswith(".name") or key == "run.name"]
    assert [key for key in named if f"| `{key}` |" not in text] == []
    options = [f"{g}={o}" for g, found in shipped_options().items() if g != "experiments" for o in found]
    assert [option for option in options if f"| `{option}` |" not in text] == []


def test_what_differs_between_options_is_told_by_option() -> None:
    row = next(line for line in page().splitlines() if line.startswith("| `data.max_length` |"))
    assert "1024 (adgen, alpaca, cmrc2018, squad), 128 (demo), 2048 (messages, sharegpt)" in row
    row = next(line for line in page().splitlines() if line.startswith("| `zero.reduce_bucket_size` |"))
    assert "DeepSpeed: `zero_optimization.reduce_bucket_size`" in row
    assert "| elements |" in row
