"""What is wrong with a file of rows, as its beginning tells: no tokenizer is needed, so nothing has to be started."""

from __future__ import annotations

from glmexp.config.data_schema import DataSection
from glmexp.data import forms
from glmexp.data.files import parse_block, raise_all
from glmexp.data.opening import open_file, sample
from glmexp.data.readers import Outcome, read_records, refuse_all_held_out, refuse_nothing


def look(path: str, data: DataSection) -> None:
    """Raise DataError for what preparing the file would find in its first blocks (1 MiB, or 1,000 records, each): as
    many as hold a row to learn from beside data.holdout, mostly one. What lies behind is found by the ranks."""
    file = open_file(path, data.encoding)
    blocks, first = sample(file)
    found = forms.resolve(file.path, first, data.columns, data.format)
    outcome = Outcome(file.unit)
    for block in blocks:
        _, more = read_records(file, parse_block(block, file.line_encoding), found, data.on_error)
        raise_all(file.path, more.problems)
        outcome.add(more)
        if outcome.used > (data.holdout or 0):
            return
    refuse_nothing(file, outcome)
    refuse_all_held_out(file.path, outcome.used, data.holdout)
