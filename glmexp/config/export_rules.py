"""Rules of the export section: layouts that a family has, methods that can be merged, keys without effect."""

from __future__ import annotations

from collections.abc import Iterator

from glmexp.config.errors import Problem
from glmexp.config.facts import Facts
from glmexp.config.families import FAMILIES
from glmexp.config.schema import RunConfig

_WHOLE_ONLY = ("export.dtype", "export.layout", "export.max_shard_bytes", "export.verify")


def check(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """All of them."""
    if config.entry.name != "export":
        return
    family, export = config.model.family, config.export
    if config.artifact.path is None:
        yield Problem("artifact.path", "is null, and entry=export needs an artifact", "artifact.path=FOLDER")
    if export.form == "trained":
        for key in _WHOLE_ONLY:
            if key in facts.explicit:
                yield Problem(key, "without effect with export.form=trained", "leave it out, or export.form=whole")
        return
    if config.method.name == "ptuning" and not FAMILIES[family].native_prefix:
        yield Problem(
            "export.form",
            f"whole, but method=ptuning on {family} trains keys and values in front of each layer's own: they are no "
            "part of the weights and cannot be merged into them",
            "use the artifact as it is: a PEFT folder beside its base",
        )
    if export.layout == "transformers" and family == "chatglm":
        yield Problem("export.layout", "transformers has no network for chatglm (the first)", "export.layout=released")
    elif export.layout == "transformers" and family == "qwen2":
        yield Problem("export.layout", "qwen2's released layout is that of transformers", "export.layout=released")
    elif export.layout == "transformers" and config.method.name == "ptuning":
        yield Problem("export.layout", "GlmForCausalLM has no place for a prefix", "export.layout=released")
