"""``method.rank>=8 and state=finished``: which rows are shown. The report's page understands the same words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glmexp.config.errors import ConfigError, Problem
from glmexp.config.nearest import nearest

HELP = "KEY OP VALUE, joined by 'and'; OP is one of = != > >= < <= ~ (contains)"
_CLAUSE = re.compile(r"\s*([^\s<>=!~]+)\s*(>=|<=|!=|==|=|~|>|<)\s*(.*?)\s*")
_VALUES = 8
"""Values of a key that a message names."""
_AND = re.compile(r"\s+and\s+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Clause:
    """One condition on one column."""

    key: str
    operator: str
    wanted: str

    def holds(self, value: Any) -> bool:
        """Of a cell; None is a row without a value, which only ``= null`` and ``!=`` take."""
        if self.operator == "~":
            return self.wanted.lower() in as_text(value).lower()
        if self.operator in ("=", "!="):
            return _equal(value, self.wanted) == (self.operator == "=")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        wanted = float(self.wanted)
        if self.operator.startswith(">"):
            return value > wanted or (self.operator == ">=" and value == wanted)
        return value < wanted or (self.operator == "<=" and value == wanted)


def parse(expressions: Collection[str], keys: Collection[str]) -> list[Clause]:
    """All conditions; a key may be shortened to its end where only one has it. Raises ConfigError."""
    problems: list[Problem] = []
    clauses: list[Clause] = []
    for text in (part for one in expressions for part in _AND.split(one.strip())):
        found = _CLAUSE.fullmatch(text)
        if found is None:
            problems.append(Problem(f"--where {text!r}", "is no condition", HELP))
            continue
        word, operator, wanted = found.groups()
        operator = "=" if operator == "==" else operator
        try:
            key = column(word, keys, "--where")
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if operator[0] in "<>" and not _NUMBER.fullmatch(wanted):
            problems.append(Problem(f"--where {text!r}", f"{wanted!r} is no number", "= != and ~ compare texts"))
            continue
        clauses.append(Clause(key, operator, wanted.strip("'\"") if len(wanted) > 1 else wanted))
    if problems:
        raise ConfigError(*problems)
    return clauses


def nothing_left(clauses: Sequence[Clause], rows: Sequence[Mapping[str, Any]]) -> ConfigError:
    """What to say where no row fits: the values that there are of the keys that rule all of them out."""
    alone = [one for one in clauses if not any(one.holds(row.get(one.key)) for row in rows)]
    problems = []
    for clause in alone or clauses:
        counts = Counter(as_text(row.get(clause.key)) for row in rows)
        words = [f"{value} ({count})" for value, count in counts.most_common(_VALUES)]
        more = f" and {len(counts) - _VALUES} more values" if len(counts) > _VALUES else ""
        found = "no row is left" if alone else "fits some rows, but none that the other conditions leave"
        where = f"--where '{clause.key}{clause.operator}{clause.wanted}'"
        problems.append(Problem(where, found, f"{clause.key} is {', '.join(words)}{more}"))
    return ConfigError(*problems)


def column(word: str, keys: Collection[str], where: str) -> str:
    """The key that ``word`` means: itself, or the only one that ends with it. Raises ConfigError with the nearest."""
    if word in keys:
        return word
    ending = [key for key in keys if key.endswith((f".{word}", f"/{word}"))]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ConfigError(
            Problem(f"{where} {word}", f"may be {', '.join(sorted(ending))}", "write one of them in full")
        )
    near = nearest(word, sorted(keys))
    fix = f"did you mean {' or '.join(near)}?" if near else "any key of config.yaml, or a column of the table"
    raise ConfigError(Problem(f"{where} {word}", "no row has such a key", fix))


def matches(clauses: Collection[Clause], row: Mapping[str, Any]) -> bool:
    """All conditions hold."""
    return all(clause.holds(row.get(clause.key)) for clause in clauses)


def as_text(value: Any) -> str:
    """A cell as YAML writes it, near enough to be compared."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_text, value))}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _equal(value: Any, wanted: str) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and _NUMBER.fullmatch(wanted):
        return value == float(wanted)
    return as_text(value) == wanted.replace(", ", ",")
