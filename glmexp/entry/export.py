"""Export: a sharded artifact, assembled into the files that ``gather=trainable`` would have written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from glmexp.config.errors import ArtifactError, ConfigError, Problem
from glmexp.config.schema import RunConfig
from glmexp.engine import fingerprint
from glmexp.engine.build import DTYPES, trainable
from glmexp.entry import artifact
from glmexp.entry.console import relative
from glmexp.entry.session import session
from glmexp.launcher.folder import write_status
from glmexp.model.build import load_tokenizer


def run(config: RunConfig, run_folder: Path) -> int:
    """Assemble on one rank. Returns the exit code."""
    with session(config, run_folder) as here:
        count = assemble(config, run_folder)
        write_status(run_folder, "finished")
        here.screen.lines([f"{count} tensors assembled in {relative(run_folder / artifact.FOLDER)}"])
    return 0


def assemble(config: RunConfig, run_folder: Path) -> int:
    """Write ``artifact/`` and return its number of tensors. Raises where partitions are absent or were changed."""
    assert config.artifact.path is not None, "the rules ask for artifact.path"
    source = artifact.find(Path(config.artifact.path))
    card = artifact.read_card(source)
    if card.gather != "sharded":
        raise ConfigError(
            Problem("artifact.path", f"{source} was written by gather={card.gather}", "it is whole: use it as it is")
        )
    model, _ = artifact.load(source, DTYPES[card.dtype])
    faults = artifact.check(model, card)
    if faults:
        raise ArtifactError(*(Problem(str(source), fault, "train again") for fault in faults))
    folder = run_folder / artifact.FOLDER
    folder.mkdir(exist_ok=True)
    held = card.method_settings().write(folder, model, {name: p.detach() for name, p in trainable(model)})
    prints = {name: fingerprint.of_tensor(tensor) for name, tensor in held.items()}
    load_tokenizer(card.model_section()).save_pretrained(folder)
    replace(card, gather="trainable", tensors=prints).write(folder)
    return len(prints)
