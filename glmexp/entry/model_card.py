"""README.md of an export, and its generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glmexp.config.errors import ArtifactError
from glmexp.config.load import dump
from glmexp.config.load import read as read_config
from glmexp.config.redact import redacted
from glmexp.config.schema import RunConfig
from glmexp.entry.artifact import Card
from glmexp.entry.sources import Source, base_folder
from glmexp.tracker.metrics_file import read_metrics

GENERATION = "generation_config.json"
_SECTIONS = ("model", "method", "zero", "precision", "optim", "train", "data")


def write_generation_config(folder: Path, source: Source, config: Any) -> None:
    """That of the base, else one with the end and padding ids of the network's configuration."""
    found = [place / GENERATION for place in _places(source) if (place / GENERATION).is_file()]
    if found:
        (folder / GENERATION).write_text(found[0].read_text(encoding="utf-8"), encoding="utf-8")
        return
    from transformers import GenerationConfig

    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _places(source: Source) -> list[Path]:
    """Where files of the base may lie; none for a base that cannot be reached, of which the export needs no file."""
    if source.section.init == "random":
        return [source.path]
    try:
        return [source.path, base_folder(source.section)]
    except ArtifactError:
        return [source.path]


def write(folder: Path, source: Source, config: RunConfig, card: Card) -> None:
    """``README.md``: what this is, how to load it, what it was made from, data, metrics, configuration."""
    section = source.section
    method = "the weights of a checkpoint" if source.method is None else f"method={source.method.name}"
    base = source.base if source.partial else "none: the source holds every weight"
    lines = [
        "---",
        "library_name: transformers",
        f"base_model: {json.dumps(base, ensure_ascii=False)}",
        f"tags: [glmexp, {section.family}]",
        "---",
        "",
        f"# {config.run.name}",
        "",
        f"A {section.family} model in {card.dtype}, {config.export.layout} layout: {method}, merged into its base.",
        "",
        *_how_to_load(config, section.family),
        "",
        "## Made from",
        "",
        "| | |",
        "| --- | --- |",
        f"| source | {source.words} |",
        f"| base | {base} |",
        f"| fingerprint of the base | {card.base or 'not recorded'} |",
        f"| chat template | {card.template} |",
        f"| tokens added | {', '.join(section.add_tokens) or 'none'} |",
        "",
        *_data(source.run),
        *_metrics(source.run),
        *_configuration(source.run),
    ]
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _how_to_load(config: RunConfig, family: str) -> list[str]:
    if config.export.layout == "transformers" or family == "qwen2":
        code = "AutoModelForCausalLM.from_pretrained(FOLDER)"
    else:
        code = "import glmexp.model  # registers the network; no code of this folder is run"
        code += "\nAutoModelForCausalLM.from_pretrained(FOLDER)"
    evaluate = "python -m glmexp entry=evaluate artifact.path=FOLDER"
    return ["```python", "from transformers import AutoModelForCausalLM", code, "```", "", f"`{evaluate}` measures it."]


def _data(run: Path | None) -> list[str]:
    """What the run was trained on, with its fingerprint."""
    if run is None or not (run / "data.json").is_file():
        return ["## Data", "", "not recorded", ""]
    record = json.loads((run / "data.json").read_text(encoding="utf-8"))
    text = json.dumps(redacted(record), indent=1, ensure_ascii=False)
    return ["## Data", "", "```json", text, "```", ""]


def _metrics(run: Path | None) -> list[str]:
    """The last value of each metric."""
    if run is None or not (run / "metrics.jsonl").is_file():
        return ["## Metrics", "", "not recorded", ""]
    last: dict[str, tuple[int, float]] = {}
    for step, values in read_metrics(run / "metrics.jsonl").items():
        last |= {name: (step, value) for name, value in values.items()}
    rows = [
        f"| {name} | {value:.6g} | {step} |"
        for name, (step, value) in sorted(last.items())
        if name.startswith(("train/loss", "eval/"))
    ]
    return ["## Metrics", "", "| metric | value | step |", "| --- | --- | --- |", *rows, ""]


def _configuration(run: Path | None) -> list[str]:
    """The sections that decided the training."""
    if run is None:
        return []
    import yaml

    tree = dump(read_config(run / "config.yaml"))
    kept = redacted({name: tree[name] for name in _SECTIONS})
    return [
        "## Configuration",
        "",
        "```yaml",
        yaml.safe_dump(kept, sort_keys=False, allow_unicode=True).rstrip(),
        "```",
    ]
