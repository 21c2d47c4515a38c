"""What answers under entry=evaluate, generate and bench: a base or what was trained on one; found, loaded, placed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.schema import ModelSection, RunConfig
from glmexp.engine import distributed, kv_cache
from glmexp.engine.build import DTYPES
from glmexp.engine.decode import GREEDY, Choosing, Follower, decode
from glmexp.engine.kv_cache import CacheShape
from glmexp.entry import artifact, placement, sources
from glmexp.entry.console import relative
from glmexp.entry.sources import Source
from glmexp.model import peer_sum
from glmexp.model.build import announce_code, load_network, load_tokenizer
from glmexp.model.decoder import Decoder
from glmexp.model.renderer import Renderer, renderer


@dataclass(frozen=True)
class Subject:
    """What will answer. Nothing is loaded yet but cards and names of tensors."""

    section: ModelSection
    """The network; its family decides the chat template."""
    speaker: ModelSection
    """Where the tokenizer comes from."""
    words: str
    folder: Path | None
    """Artifact folder: adapter, prefix, trained layers, partitions, or a whole model."""
    source: Source | None
    """A checkpoint, or a folder that another program wrote."""

    @property
    def steps(self) -> int | None:
        """Optimizer steps that it was trained for; None of a base, and where that is not known."""
        if self.folder is not None:
            return artifact.read_card(self.folder).steps
        return None if self.source is None else self.source.steps

    @cached_property
    def template(self) -> Renderer:
        """Chat template and tokenizer. Raises ArtifactError where they are not those that were trained with."""
        tokenizer = load_tokenizer(self.speaker)
        if self.folder is not None:
            card = artifact.read_card(self.folder)
            artifact.check_template(card, self.section.family, tokenizer, str(self.section.path))
        return renderer(self.section.family, tokenizer)

    def network(self, dtype: torch.dtype, merging: bool) -> nn.Module:
        """The model on the CPU in ``dtype``, in evaluation mode. Raises ArtifactError where it is not what was trained.

        Fingerprints are of the number format that was trained in, so it is loaded in that one first. A base that was
        trained on in fp8 is in fp8 again, but not where another format was chosen, nor for ``merging``: what is added
        to weights in fp8 would be rounded away.
        """
        if self.folder is not None:
            trained = DTYPES[artifact.read_card(self.folder).dtype]
            rounded = dtype == trained and not merging
            model, card = artifact.load(self.folder, trained, self.section.path, rounded=rounded)
            faults = artifact.check(model, card)
            if faults:
                way = "use the base and the files that the run left"
                raise ArtifactError(*(Problem(str(self.folder), fault, way) for fault in faults))
            return model.to(dtype)
        if self.source is not None:
            return sources.live(self.source, load_network, dtype)
        return load_network(self.section, dtype).eval()


def find(config: RunConfig) -> Subject:
    """What ``artifact.path`` means, or the base that ``model`` names without one. Raises ArtifactError, ConfigError."""
    announce_code(config.model)
    path = config.artifact.path
    if path is None:
        return Subject(config.model, config.model, f"none: the base {config.model.path} alone", None, None)
    if artifact.is_one(Path(path)):
        folder = artifact.find(Path(path))
        section = artifact.section(artifact.read_card(folder), folder, config.model.path)
        return Subject(section, section, relative(folder), folder, None)
    source = sources.of(config)
    return Subject(source.section, source.tokenizer or source.section, source.words, None, source)


@dataclass(frozen=True)
class Served:
    """A model that can be asked."""

    subject: Subject
    model: Any
    """Has ``generate``; on its device or devices, in evaluation mode."""
    dtype: torch.dtype
    placement: str
    decoder: Decoder | None
    """Writes tokens on a GPU; None: ``generate`` of transformers does."""

    @property
    def template(self) -> Renderer:
        """Chat template and tokenizer."""
        return self.subject.template

    @property
    def virtual_tokens(self) -> int:
        """Of a P-Tuning prefix that lies in the decoder's cache."""
        return getattr(self.model.config, "pre_seq_len", None) or 0

    @property
    def cache(self) -> CacheShape:
        """Keys and values of one token on one rank; a ChatGLM's prefix lies in the decoder's cache as PEFT's does."""
        shape = kv_cache.shape_of(self.model, self.dtype)
        if self.decoder is not None:
            shape = replace(shape, virtual_tokens=shape.virtual_tokens + self.virtual_tokens)
        shared = distributed.world_size() if self.placement == "tensor_parallel" else 1
        return replace(shape, groups=shape.groups // shared)

    @property
    def lane(self) -> tuple[int, int]:
        """(number, count) of those among whom rows are shared out: under tensor_parallel all ranks answer the same."""
        if self.placement == "tensor_parallel":
            return 0, 1
        return distributed.rank(), distributed.world_size()

    def write(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        max_new_tokens: int,
        choosing: Choosing = GREEDY,
        follower: Follower | None = None,
        length: int | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """New ids (batch, new): see ``engine.decode``. ``length``: tokens of prompt and answer that a row's cache has
        room for; ``rows``: prompts of the largest batch; with both the decoder records nothing anew.
        """
        template = self.template
        if self.decoder is None:
            return decode(
                self.model,
                input_ids,
                attention_mask,
                max_new_tokens=max_new_tokens,
                stop_ids=template.stop_ids,
                pad_id=template.pad_id,
                choosing=choosing,
                follower=follower,
            )
        return self.decoder.generate(
            input_ids,
            attention_mask,
            max_new_tokens,
            template.stop_ids,
            template.pad_id,
            choosing,
            slots=None if length is None else length + self.virtual_tokens,
            rows=rows,
            on_tokens=None if follower is None else lambda ids: _told(follower, ids),
        )

    @property
    def device(self) -> torch.device:
        """Where input ids belong."""
        return distributed.device()

    def facts(self) -> dict[str, str]:
        """For the terminal."""
        section = self.subject.section
        way = "plain" if self.decoder is None else self.decoder.way
        waits = " (the first answer waits some ten seconds for the compiler)" if way == "compiled" else ""
        sums = f", {peer_sum.words()}" if self.placement == "tensor_parallel" else ""
        return {
            "model": f"{section.name} ({section.family}) in {str(self.dtype).removeprefix('torch.')}",
            "artifact": self.subject.words,
            "placement": f"{self.placement}{sums}, decoding: {way}{waits}",
        }


def _told(follower: Follower, ids: list[int]) -> bool:
    follower.tokens(ids)
    return follower.enough()


def load(subject: Subject, config: RunConfig) -> Served:
    """The model where it is to answer, in ``precision.dtype``, which an artifact brings along. Collective."""
    dtype = DTYPES[config.precision.dtype]
    network = subject.network(dtype, placement.merges(config.placement, config.decoding))
    family, limit = subject.section.family, config.launcher.timeout_s
    model = placement.place(network, family, config.placement, config.decoding, limit)
    # A bench measures the way that it names, and ranks that share a network have to go the same one.
    falls_back = config.entry.name != "bench" and config.placement.name != "tensor_parallel"
    decoder = placement.decoder(model, config.decoding, falls_back)
    return Served(subject, model, dtype, config.placement.name, decoder)
