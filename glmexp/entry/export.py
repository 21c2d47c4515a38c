"""Export: a whole model from an artifact or a checkpoint, one tensor at a time, judged by a fresh process."""

from __future__ import annotations

import copy
import math
import os
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from glmexp.config.errors import ArtifactError, ConfigError, Problem
from glmexp.config.schema import RunConfig
from glmexp.engine import fingerprint
from glmexp.engine.build import DTYPES, trainable
from glmexp.entry import artifact, model_card, sources, verify
from glmexp.entry.console import Screen, relative
from glmexp.entry.sources import Reader, Source
from glmexp.launcher.folder import write_json, write_status
from glmexp.method import weight_files
from glmexp.model.build import announce_code, load_tokenizer
from glmexp.plan import report

if TYPE_CHECKING:
    from glmexp.method.base import Whole

SOURCE = "source.json"


@dataclass(frozen=True)
class Unit:
    """A tensor of the whole model: its released name, what it is made of, and what becomes of it."""

    name: str
    parts: list[str]
    """Live parameters."""
    merge: Any
    outputs: list[tuple[str, tuple[int, ...]]]
    """Names and shapes in the layout that is written."""


def run(config: RunConfig, run_folder: Path) -> int:
    """Write ``artifact/`` and let a fresh process judge it. One process, no GPU needed. Returns the exit code."""
    if os.environ.get("RANK", "0") != "0":  # an outside launcher's other ranks have nothing to do
        return 0
    write_status(run_folder, "running")
    announce_code(config.model)
    screen = Screen(active=True)
    source = sources.of(config)
    screen.lines([f"export of {source.words}"])
    folder = run_folder / artifact.FOLDER
    folder.mkdir(exist_ok=True)
    if config.export.form == "trained":
        count = assemble(source, folder)
        screen.lines([f"{count} trained tensors assembled in {relative(folder)}"])
    else:
        try:
            facts = write_whole(source, config, folder)
        except BaseException:
            shutil.rmtree(folder)
            raise
        screen.facts("glmexp export", {**facts, "folder": relative(folder)})
        if config.export.verify:
            screen.lines(verify.run_fresh(run_folder))
    write_status(run_folder, "finished")
    return 0


def assemble(source: Source, folder: Path) -> int:
    """What ``gather=trainable`` would have written, from partitions. Returns the number of tensors."""
    card = source.card
    if card is None or card.gather != "sharded":
        found = source.words if card is None else f"{source.path} was written by gather={card.gather}"
        raise ConfigError(
            Problem("export.form", f"trained, and {found}", "export.form=whole; trained assembles gather=sharded")
        )
    model, _ = artifact.load(source.path, DTYPES[card.dtype], source.section.path, rounded=False)
    _refuse(source.path, artifact.check(model, card))
    held = card.method_settings().write(folder, model, {name: p.detach() for name, p in trainable(model)})
    prints = {name: fingerprint.of_tensor(tensor) for name, tensor in held.items()}
    load_tokenizer(source.section).save_pretrained(folder)
    replace(card, gather="trainable", tensors=prints).write(folder)
    return len(prints)


def _refuse(path: Path, faults: list[str]) -> None:
    if faults:
        raise ArtifactError(
            *(Problem(str(path), fault, "use the base and the files that the run left") for fault in faults)
        )


def write_whole(source: Source, config: RunConfig, folder: Path) -> dict[str, str]:
    """The whole model in ``folder``: weights, configurations, tokenizer, cards. Returns facts for the terminal.

    Peak memory: the largest tensor and what it is merged from, in float32. Raises ArtifactError where source and base
    do not fit, or are not what the card says.
    """
    started = time.perf_counter()
    wanted = config.export
    dtype = DTYPES[wanted.dtype or source.dtype or config.precision.dtype]
    tokenizer = load_tokenizer(source.tokenizer or source.section)
    if source.card is not None:
        artifact.check_template(source.card, source.section.family, tokenizer, str(source.section.path))
    model = source.model(torch.float32)
    reader = Reader(source, model)
    layout = _Layout(model, wanted.layout)
    units = list(_units(source.whole(model), layout))
    plan = [output for unit in units for output in unit.outputs]
    prints: dict[str, int] = {}
    checks = _Checks(source)
    # Where there is a GPU it does the sums: a tensor at a time fits beside anything.
    place = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for unit in units:
            values = [checks.seen(name, reader.read(name).to(place), reader.is_trained(name)) for name in unit.parts]
            merged = unit.merge(*values)
            del values
            for name, tensor in layout.renamed(unit.name, merged.to(dtype)):
                prints[name] = fingerprint.of_tensor(tensor)
                yield name, tensor.cpu()

    weight_files.stream(folder, plan, tensors(), dtype, wanted.max_shard_bytes)
    checks.rest(reader, model)
    _refuse(source.path, checks.faults())
    weight_files.write_config(folder, layout.config, prints, dtype)
    model_card.write_generation_config(folder, source, layout.config)
    tokenizer.save_pretrained(folder)
    _write_cards(folder, source, config, prints, str(dtype).removeprefix("torch."), tokenizer)
    size = sum(file.stat().st_size for file in weight_files.files(folder))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = {
        "source": source.words,
        "layout": wanted.layout,
        "dtype": str(dtype),
        "write_s": round(time.perf_counter() - started, 2),
        "written_bytes": size,
        "largest_tensor_bytes": max(math.prod(shape) for _, shape in plan) * dtype.itemsize,
        "peak_resident_bytes": resident,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }
    write_json(folder.parent / SOURCE, facts)
    return {
        "source": source.words,
        "base": f"{source.base}: {len(reader.base_names)} of {len(checks.names)} parameters come from it",
        "written": f"{len(prints)} tensors in {wanted.layout} layout, {dtype}, {report.size(size)} in "
        f"{len(weight_files.files(folder))} file(s)",
        "checked": checks.words(),
        "time": f"{facts['write_s']} s",
        "peak host memory": f"{report.size(resident)} resident, pages of mapped files included",
    }


def _units(whole: Whole, layout: _Layout) -> Iterator[Unit]:
    for name, parts, merge in whole:
        shape = tuple(parts[0][1].shape)
        outputs = [(one, tuple(t.shape)) for one, t in layout.renamed(name, torch.empty(shape, device="meta"))]
        yield Unit(name, [part for part, _ in parts], merge, outputs)


class _Layout:
    """Released names, or those of transformers' GlmForCausalLM."""

    def __init__(self, model: nn.Module, name: str) -> None:
        network: Any = model
        self._released: Any = network.config
        self._glm = name == "transformers"
        plain = network.get_base_model() if hasattr(network, "get_base_model") else network
        self.config: Any = copy.deepcopy(self._released)
        self.config.architectures = [type(plain).__name__]
        if self._glm:
            from glmexp.model.glm_layout import glm_config

            self.config = glm_config(self._released)
            self.config.architectures = ["GlmForCausalLM"]

    def renamed(self, name: str, tensor: Tensor) -> Sequence[tuple[str, Tensor]]:
        """What a tensor of the released layout becomes."""
        if not self._glm:
            return [(name, tensor)]
        from glmexp.model.glm_layout import to_glm

        return list(to_glm({name: tensor}, self._released).items())


class _Checks:
    """Fingerprints of all that is read, against those that the run left in the artifact's card."""

    def __init__(self, source: Source) -> None:
        self._card = source.card
        self._dtype = None if source.card is None else DTYPES[source.card.dtype]
        self._trained: dict[str, int] = {}
        self._base: dict[str, int] = {}
        self.names: set[str] = set()

    def seen(self, name: str, tensor: Tensor, trained: bool) -> Tensor:
        """Take note of a parameter and hand it on."""
        if self._dtype is not None and name not in self.names:
            (self._trained if trained else self._base)[name] = fingerprint.of_tensor(tensor.to(self._dtype))
        self.names.add(name)
        return tensor

    def rest(self, reader: Reader, model: nn.Module) -> None:
        """Parameters that no tensor was made of, such as the originals of modules_to_save."""
        for name, _ in model.named_parameters():
            if self._dtype is not None and name not in self.names:
                self.seen(name, reader.read(name), reader.is_trained(name))

    def faults(self) -> list[str]:
        """What is not as the card says, in words."""
        if self._card is None:
            return []
        return artifact.faults({**self._base, **self._trained}, self._card)

    def words(self) -> str:
        """What was checked."""
        if self._card is None:
            return "names and shapes (no fingerprints in the source)"
        return "fingerprints of the base and of what was trained are those of the run"


def _write_cards(
    folder: Path, source: Source, config: RunConfig, prints: dict[str, int], dtype: str, tokenizer: Any
) -> None:
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    settings: Any = source.method or config.method
    method = asdict(settings) if source.card is None else source.card.method
    card = artifact.Card(
        gather="exported",
        stage=0,
        dtype=words[dtype],
        model=asdict(source.section),
        method=method,
        tensors=prints,
        base=source.card.base if source.card is not None else "",
        template=artifact.template_digest(source.section.family, tokenizer),
        steps=source.steps,
        network=artifact.network_settings(folder),
    )
    card.write(folder)
    model_card.write(folder, source, config, card)
