"""Where a run begins: anew, or from a checkpoint that is held against the configuration, the data and the base."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glmexp.config import inherit
from glmexp.config.errors import ArtifactError, ConfigError, DataError, Problem
from glmexp.config.load import dump
from glmexp.config.redact import redacted
from glmexp.data.batches import StepPlan
from glmexp.data.prepare import Prepared
from glmexp.engine import checkpoint, checkpoint_files, distributed, per_rank
from glmexp.engine.checkpoint import Found, Saver
from glmexp.entry.artifact import digest
from glmexp.entry.evaluation import Evaluation
from glmexp.entry.proof import Before
from glmexp.entry.session import Session
from glmexp.launcher import positions
from glmexp.launcher.folder import ENVIRONMENT
from glmexp.tracker.metrics_file import MetricsFile, read_metrics

TRACKER = "tracker.json"
_SAMPLED = 256


@dataclass
class Keeper:
    """What a run keeps and how it is taken up again. ``done``: optimizer steps that a checkpoint brought."""

    here: Session
    saver: Saver
    plan: StepPlan
    fixed: dict[str, Any]
    """Parts of ``state.json`` that are the same at every step."""
    done: int = 0
    saved: int = 0
    """Step of the last checkpoint; 0: none."""
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds that training waited for the last save: goes into the next line of metrics."""

    def save(self, step: int, evaluation: Evaluation) -> None:
        """A checkpoint of ``step``, unless there is one. Collective."""
        if step == self.saved:
            return
        positions.at("checkpoint", step)
        here, plan = self.here, self.plan
        about = {
            **self.fixed,
            "position": {"step": step, "rows": step * plan.batch_size, "epoch": plan.epoch(step)},
            "batch_size": plan.batch_size,
            "tracker": _json_or_none(here.folder / TRACKER),
            "evaluation": {"history": evaluation.history, "train_losses": evaluation.train_losses},
        }
        seconds = self.saver.save(step, about)
        self.saved = step
        self.spent |= {f"perf/save_{name}_s": value for name, value in seconds.items()}

    def check_metric(self, metrics: dict[str, float]) -> None:
        """Raise ConfigError where no hook gives ``train.keep_best``. ``metrics``: of all hooks."""
        metric = self.here.config.train.keep_best
        if metric is not None and metric not in metrics:
            known = ", ".join(sorted(metrics))
            raise ConfigError(Problem("train.keep_best", f"{metric} is not measured", f"metrics that are: {known}"))

    def judge(self, step: int, metrics: dict[str, float]) -> None:
        """Hand the value of ``train.keep_best`` on, where it was measured at a checkpoint."""
        metric = self.here.config.train.keep_best
        if metric is not None and metric in metrics and step == self.saved and distributed.rank() == 0:
            self.saver.judge(step, metric, metrics[metric])


def begin(
    here: Session, engine: Any, plan: StepPlan, data: Prepared, template: Any, start: Before, evaluation: Evaluation
) -> Keeper:
    """Load the checkpoint that ``train.resume`` means and cut the records back to it. Collective.

    Raises ArtifactError, ConfigError and DataError where the checkpoint does not belong to this run.
    """
    config = here.config
    fixed = told(here, data, template, start)
    saver = Saver(
        engine=engine,
        run_folder=here.folder,
        keep=config.train.keep_checkpoints,
        token=distributed.from_first(secrets.token_hex(4)),
        lowest_is_best=config.train.keep_best_mode == "min",
    )
    keeper = Keeper(here, saver, plan, fixed)
    if config.train.resume is None:
        return keeper
    found = _found(here)
    done = found.step if found is not None else 0
    if found is not None:
        same_run(found, fixed)
        within(found, plan.total_steps(config.train.epochs, config.train.max_steps))
        assert config.train.grad_accum is not None, "derived before the run starts"
        checkpoint.load(engine, found, config.train.seed, config.train.grad_accum)
        evaluation.history[:] = [tuple(one) for one in found.state["evaluation"]["history"]]
        evaluation.train_losses[:] = found.state["evaluation"]["train_losses"]
        here.screen.lines(_changes(found, fixed, here))
    if here.screen.active:
        here.screen.lines(checkpoint.forget_after(here.folder, done))
        if here.metrics is not None:
            here.metrics.truncate_after(done if found is not None else -1)
            MetricsFile(here.folder / per_rank.FILE).truncate_after(done if found is not None else -1)
        tracker = here.folder / TRACKER
        if found is not None and not tracker.exists() and found.state["tracker"] is not None:
            checkpoint_files.write_json(tracker, found.state["tracker"])
    distributed.barrier()
    keeper.done = keeper.saved = done
    return keeper


def told(here: Session, data: Prepared, template: Any, start: Before) -> dict[str, Any]:
    """What a checkpoint is held against: the parts of its state that are the same at every step."""
    return {
        "config": redacted(dump(here.config)),
        "environment": _json_or_none(here.folder / ENVIRONMENT),
        "data": fingerprint(data, template),
        "base": digest(start.frozen),
    }


def _found(here: Session) -> Found | None:
    """The checkpoint, with what a person should know about it said. Raises ArtifactError where none is and must be."""
    resume = here.config.train.resume
    assert resume is not None, "asked for a resume"
    named = None
    if resume != inherit.AUTO and Path(resume).absolute() != here.folder:
        relative = Path(resume).absolute().relative_to(here.folder)
        if len(relative.parts) > 1 and relative.parts[0] == checkpoint_files.FOLDER:
            named = relative.parts[1]
    found = checkpoint.find(here.folder, named)
    if found is None and resume != inherit.AUTO:
        raise ArtifactError(
            Problem(
                "train.resume",
                f"{here.folder} holds no checkpoint: no {checkpoint_files.FOLDER}/step-<n> with its "
                f"{checkpoint_files.STATE}",
                "runs write them with train.save_steps=N; train.resume=auto would begin anew",
            )
        )
    if found is not None:
        here.screen.lines([*found.notes, f"going on from {found.folder.name} of {here.folder}"])
    return found


def fingerprint(data: Prepared, template: Any) -> dict[str, Any]:
    """What the training rows are: the files' digests, and a digest of tokens and labels of rows spread over all."""
    examples = data.train
    hashed = hashlib.sha256(np.asarray(examples.lengths, dtype="<i8").tobytes())
    for place in np.linspace(0, len(examples) - 1, min(_SAMPLED, len(examples))).astype(int):
        example = examples[int(place)]
        hashed.update(np.asarray(example.input_ids, dtype="<i8").tobytes())
        hashed.update(np.asarray(example.labels, dtype="<i8").tobytes())
    return {
        "files": data.sha256,
        "examples": len(examples),
        "rows": hashed.hexdigest()[:24],
        "template": template.fingerprint,
    }


def same_run(found: Found, now: dict[str, Any]) -> None:
    """The checkpoint continues what it began: everything that differs is named with both values."""
    before = found.state
    wanted = inherit.changed(before["config"], now["config"])
    if wanted:
        raise ConfigError(
            *(
                Problem(line, f"the checkpoint {found.folder} was trained otherwise", "leave it as it was")
                for line in wanted
            )
        )
    if before["data"]["rows"] != now["data"]["rows"]:
        raise DataError(Problem("data.train_file", _data_differs(before["data"], now["data"]), "restore it"))
    if before["base"] != now["base"]:
        raise ArtifactError(
            Problem(
                "model.path",
                f"the base is another one: its frozen weights have the digest {now['base']}, those of {found.folder} "
                f"had {before['base']}",
                "name the model that the run began with",
            )
        )


def within(found: Found, total: int) -> None:
    """A run of ``total`` steps cannot go on from a later one: its results would be those of other weights."""
    if found.step > total:
        raise ConfigError(
            Problem(
                "train.resume",
                f"{found.folder} has {found.step} steps behind it, and this run ends after {total}",
                f"train.max_steps={found.step} or more, or train.resume=FOLDER/checkpoints/step-<n> of an earlier one",
            )
        )


def _data_differs(before: dict[str, Any], now: dict[str, Any]) -> str:
    files = [
        f"{path} has sha256 {now['files'].get(path, 'of no file')[:12]} now, {digest_before[:12]} in the checkpoint"
        for path, digest_before in before["files"].items()
        if now["files"].get(path) != digest_before
    ]
    if files and set(now["files"].values()) != set(before["files"].values()):
        what = "the training rows have changed: " + "; ".join(files)
    else:
        what = (
            "the rows are the same and are rendered otherwise: chat template and tokenizer have the fingerprint "
            f"{now['template'][:12]} now, {before['template'][:12]} in the checkpoint"
        )
    return f"{what} ({now['examples']} examples now, {before['examples']} then)"


def _changes(found: Found, now: dict[str, Any], here: Session) -> list[str]:
    """What may differ and is worth a line."""
    lines = []
    ranks = distributed.world_size()
    stage_before, stage = found.state["config"]["zero"]["stage"], here.config.zero.stage
    if (found.state["ranks"], stage_before) != (ranks, stage):
        lines.append(
            f"saved with {found.state['ranks']} ranks at ZeRO stage {stage_before}, now {ranks} at stage {stage}: "
            "masters and moments are the same bits; dropout draws other numbers on other ranks"
        )
    versions = (found.state["environment"] or {}).get("versions", {})
    later = (now["environment"] or {}).get("versions", {})
    other = [f"{name} {versions[name]} -> {later.get(name)}" for name in versions if versions[name] != later.get(name)]
    if other:
        lines.append(f"other versions than when it was saved: {', '.join(other)}")
    return lines


def evaluate(here: Session, evaluation: Evaluation, step: int) -> dict[str, float]:
    """Metrics of the evaluation that was due at ``step``, whose checkpoint the run goes on from: taken from the
    records, or run now where the run was ended before it. Collective."""
    found = _evaluated(here, step)
    if not found:
        return evaluation.run(step, all_hooks=False)
    evaluation.recall(step, found)
    return found


def _evaluated(here: Session, step: int) -> dict[str, float]:
    """What the records hold of an evaluation of ``step``; nothing where they hold none. Collective."""
    known: dict[str, float] = {}
    if here.metrics is not None and here.metrics.path.exists():
        line = read_metrics(here.metrics.path).get(step, {})
        known = {name: value for name, value in line.items() if name.startswith("eval/")}
    return distributed.from_first(known)


def _json_or_none(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
