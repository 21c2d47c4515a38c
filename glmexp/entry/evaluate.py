"""Evaluate: the eval hooks on an artifact, or on the base model where no artifact is named."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from glmexp.config.data_rules import needs_rows
from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.schema import ModelSection, RunConfig
from glmexp.data.prepare import Prepared, prepare
from glmexp.engine import distributed
from glmexp.engine.build import DTYPES
from glmexp.entry import artifact
from glmexp.entry.console import relative
from glmexp.entry.evaluation import Evaluation
from glmexp.entry.session import session
from glmexp.launcher.folder import write_json, write_status
from glmexp.model.build import announce_code, load_network, load_tokenizer
from glmexp.model.renderer import renderer


def run(config: RunConfig, run_folder: Path) -> int:
    """One rank of an evaluation; every rank holds the whole model. Returns the exit code."""
    section, dtype, folder = _subject(config)
    announce_code(section)
    tokenizer = load_tokenizer(section)
    if folder is not None:
        artifact.check_template(artifact.read_card(folder), section.family, tokenizer, str(section.path))
    template = renderer(section.family, tokenizer)
    # Rows that no hook reads are not prepared.
    data = (
        prepare(config.data, config.train.seed, template, train=False)
        if needs_rows(config.eval)
        else Prepared.nothing()
    )
    with session(config, run_folder) as here:
        model = _load(section, dtype, folder).to(distributed.device())
        if here.screen.active:
            write_json(run_folder / "data.json", data.record())
            here.start_tracker()
            here.screen.lines(data.report)
            here.screen.facts(
                "glmexp evaluate",
                {
                    "model": f"{section.name} ({section.family}) in {dtype}",
                    "artifact": relative(folder) if folder else "none: the base model alone",
                    "hooks": ", ".join(config.eval.hooks),
                    "ranks": f"{distributed.world_size()} on {distributed.device().type}",
                },
            )
        evaluation = Evaluation(
            settings=config.eval,
            model=model,
            network=model,
            synced=False,
            renderer=template,
            examples=data.eval,
            samples=run_folder / "samples",
            record=here.record,
            tracker=here.tracker,
            screen=here.screen,
        )
        here.tracker.summary(evaluation.run(0, all_hooks=True))
        if here.screen.active:
            lines = here.tracker.finish("finished")
            write_status(run_folder, "finished")
            here.screen.lines([f"everything lies in {relative(run_folder)}: metrics.jsonl, samples/", *lines])
    return 0


def _subject(config: RunConfig) -> tuple[ModelSection, str, Path | None]:
    """Model section, dtype and artifact folder: the artifact's own (in the dtype that it was trained in), or the
    run's.
    """
    if config.artifact.path is None:
        return config.model, config.precision.dtype, None
    folder = artifact.find(Path(config.artifact.path))
    card = artifact.read_card(folder)
    return artifact.section(card, folder, config.model.path), card.dtype, folder


def _load(section: ModelSection, dtype: str, folder: Path | None) -> nn.Module:
    if folder is None:
        return load_network(section, DTYPES[dtype]).eval()
    model, card = artifact.load(folder, DTYPES[dtype], section.path)
    faults = artifact.check(model, card)
    if faults:
        raise ArtifactError(
            *(Problem(str(folder), fault, "use the base and the files that the run left") for fault in faults)
        )
    return model
