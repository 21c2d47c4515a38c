"""Evaluate: the eval hooks on an artifact, or on the base model where no artifact is named."""

from __future__ import annotations

from pathlib import Path

from glmexp.config.data_rules import needs_rows
from glmexp.config.schema import RunConfig
from glmexp.data.prepare import Prepared, prepare
from glmexp.engine import distributed
from glmexp.entry import serving
from glmexp.entry.console import relative
from glmexp.entry.evaluation import Evaluation
from glmexp.entry.session import session
from glmexp.launcher.folder import write_json, write_status


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank of an evaluation. Returns the exit code."""
    subject = serving.find(config)
    # Rows that no hook reads are not prepared.
    data = (
        prepare(config.data, config.train.seed, subject.template, train=False)
        if needs_rows(config.eval)
        else Prepared.nothing()
    )
    with session(config, run_folder) as here:
        served = serving.load(subject, config)
        if here.screen.active:
            write_json(run_folder / "data.json", data.record())
            here.start_tracker()
            here.screen.lines(data.report)
            here.screen.facts(
                "glmexp evaluate",
                {
                    **served.facts(),
                    "hooks": ", ".join(config.eval.hooks),
                    "ranks": f"{distributed.world_size()} on {distributed.device().type}",
                },
            )
        evaluation = Evaluation(
            settings=config.eval,
            model=served.model,
            network=served.model,
            synced=False,
            renderer=subject.template,
            examples=data.eval,
            samples=run_folder / "samples",
            record=here.record,
            tracker=here.tracker,
            screen=here.screen,
            served=served,
        )
        evaluation.run(subject.steps, all_hooks=True)
        if here.screen.active:
            lines = here.close_tracker("finished")
            write_status(run_folder, "finished")
            here.screen.lines([f"everything lies in {relative(run_folder)}: metrics.jsonl, samples/", *lines])
    return 0
