"""``python -m glmexp.tracker.workspace``: a saved wandb workspace with the three panels of a sweep.

By wandb's own library (``pip install 'glmexp[workspace]'``); docs/wandb.md tells how to add the panels by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from glmexp.config.errors import EXIT_USER_MISTAKE, ConfigError, Problem, UserError

LIBRARY = "wandb-workspaces"
_SPEED, _MEMORY = "perf/tokens_per_s", "mem/peak_bytes"


def main(argv: Sequence[str] | None = None) -> int:
    """Save the workspace and print where it is. Returns the exit code; needs a login."""
    options = _parser().parse_args(argv)
    try:
        made = workspace(options.entity, options.project, options.group, options.keys, options.metric)
        print(_saved(made))
    except UserError as error:
        print(error.report(), file=sys.stderr)
        return EXIT_USER_MISTAKE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m glmexp.tracker.workspace",
        description="Save a wandb workspace: parallel coordinates, grouped curves, quality against speed and memory.",
    )
    add = parser.add_argument
    add("--entity", required=True, help="user or team that the project belongs to")
    add("--project", default="glmexp", help="default: %(default)s")
    add("--group", help="only the runs of this group: the name of a sweep's folder")
    add("--keys", nargs="+", default=["method.rank", "zero.reduce_bucket_size"], metavar="KEY", help="swept keys")
    add("--metric", default="eval/loss/loss", help="what runs are judged by; default: %(default)s")
    return parser


def workspace(entity: str, project: str, group: str | None, keys: Sequence[str], metric: str) -> Any:
    """A ``Workspace`` that is not saved yet. Raises ConfigError where the library is missing."""
    try:
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports import v2
    except ModuleNotFoundError as error:
        fix = f"pip install {LIBRARY}, or add the panels by hand: docs/wandb.md"
        raise ConfigError(Problem(LIBRARY, "is not installed", fix)) from error
    columns = [v2.ParallelCoordinatesPlotColumn(metric=v2.Config(key)) for key in keys]
    columns += [v2.ParallelCoordinatesPlotColumn(metric=v2.SummaryMetric(name)) for name in (_SPEED, metric)]
    panels: list[Any] = [
        v2.ParallelCoordinatesPlot(columns=columns, layout=v2.Layout(x=0, y=0, w=24, h=8)),
        v2.LinePlot(
            x="step",
            y=[metric],
            groupby=v2.Config(keys[0]),
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
            layout=v2.Layout(x=0, y=8, w=12, h=8),
        ),
        v2.ScatterPlot(
            x=v2.SummaryMetric(_SPEED),
            y=v2.SummaryMetric(metric),
            z=v2.SummaryMetric(_MEMORY),
            layout=v2.Layout(x=12, y=8, w=12, h=8),
        ),
    ]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"{group or project}: {' x '.join(keys)}",
        sections=[workspaces.Section(name="sweep", panels=panels, is_open=True)],
        settings=workspaces.WorkspaceSettings(x_axis="step"),
        runset_settings=workspaces.RunsetSettings(
            filters=workspaces.And(workspaces.Metric("Group") == group) if group is not None else ""
        ),
    )


def _saved(made: Any) -> str:
    """The page's address. Raises ConfigError where nobody is logged in or the server refuses."""
    import wandb

    try:
        if not wandb.login(prompt=False, verify=False):  # it asks for a key on a terminal otherwise
            raise ConfigError(Problem("wandb", "nobody is logged in", "wandb login, or WANDB_API_KEY"))
        made.save()
    except wandb.Error as error:
        raise ConfigError(Problem("wandb", " ".join(str(error).split()), "check the login and the project")) from error
    return made.url
