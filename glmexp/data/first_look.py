"""What is wrong with a file of rows, as its first block tells: no tokenizer is needed, so nothing has to be started."""

from __future__ import annotations

from glmexp.config.data_schema import DataSection
from glmexp.data import forms
from glmexp.data.files import parse_block, raise_all
from glmexp.data.opening import open_file, sample
from glmexp.data.readers import read_records, refuse_all_held_out, refuse_nothing


def look(path: str, data: DataSection) -> None:
    """Raise DataError for what preparing the file would find in its first block (1 MiB, or 1,000 records); what lies
    behind is found by the ranks. A file of one block has to hold a row to learn from, and more than data.holdout."""
    file = open_file(path, data.encoding)
    blocks, first = sample(file)
    found = forms.resolve(file.path, first, data.columns, data.format)
    rows, outcome = read_records(file, parse_block(next(blocks), file.line_encoding), found, data.on_error)
    raise_all(file.path, outcome.problems)
    if (not rows or data.holdout is not None) and next(blocks, None) is None:
        refuse_nothing(file, outcome)
        refuse_all_held_out(file.path, len(rows), data.holdout)
