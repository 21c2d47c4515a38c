"""An export judged by a fresh process (``python -m glmexp.entry.verify RUN_FOLDER``), which loads it as a user would.

The source is loaded the other way, with its adapter beside the base and nothing merged; both read the same
conversations and go on with the likeliest token. In float32 they must agree to rounding; in 16 bit merged weights are
rounded once more than those of the source, and how far that carries is said.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glmexp.config.errors import UserError
from glmexp.config.load import read
from glmexp.config.schema import RunConfig
from glmexp.engine.build import DTYPES
from glmexp.entry import artifact, sources
from glmexp.entry.proof import TOLERANCE_FULL16, ask_fresh
from glmexp.entry.sources import Source
from glmexp.model.build import load_network, load_tokenizer
from glmexp.model.renderer import renderer
from glmexp.plan import report

TOLERANCE_FP32 = 1e-5
"""Largest difference of logits, as a share of their largest size: merging adds up in another order."""
NEW_TOKENS = 16
_QUESTIONS = ("What can you do?", "请介绍一下你自己。", "12 + 30 = ?")


def run_fresh(run_folder: Path) -> list[str]:
    """Let the fresh process judge, write ``proof.json``; lines for the terminal. Raises ProofError with all faults."""
    result = ask_fresh("glmexp.entry.verify", run_folder, "export")
    host, gpu = result["peak_host_bytes"], result["peak_gpu_bytes"]
    peak = f"{report.size(host)} of the host" + (f", {report.size(gpu)} of the GPU" if gpu else "")
    return [
        f"proof: {result['tensors']} tensors reload exactly; a fresh process gives the source's logits to "
        f"{result['logits_difference']:.2g} in {result['dtype']} (mean {result['logits_mean_difference']:.2g}, "
        f"allowed {result['logits_allowed']:.2g}), and {result['greedy_equal']} of {result['greedy_total']} greedy "
        f"answers are the same (peak memory: {peak})",
    ]


def judge(run_folder: Path) -> dict[str, Any]:
    """Hold the export in the run folder against its source."""
    import resource

    config = read(run_folder / "config.yaml")
    folder = run_folder / artifact.FOLDER
    card = artifact.read_card(folder)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        export: Any = artifact.load(folder, DTYPES[card.dtype])[0].to(device)
        faults = artifact.check(export, card)
        where = artifact.section(card, folder)
        rows = _prompts(where.family, load_tokenizer(where))
        answers, logits = _speak(export, rows)
        del export
        source, others = _source(config, DTYPES[card.dtype], device)
        faults += others
        expected_answers, expected = _speak(source, rows)
    except UserError as error:
        return {"faults": [str(problem) for problem in error.problems]}
    largest = max(float(one.abs().max()) for one in expected)
    differences = [(one - other).abs() for one, other in zip(logits, expected, strict=True)]
    difference = max(float(one.max()) for one in differences)
    same = sum(one == other for one, other in zip(answers, expected_answers, strict=True))
    allowed = (TOLERANCE_FP32 if card.dtype == "fp32" else TOLERANCE_FULL16) * largest
    if not difference <= allowed:  # "not <=" so that nan is a fault too
        faults.append(f"logits differ from the source's by {difference:.3g}, allowed are {allowed:.3g}")
    if card.dtype == "fp32" and same < len(rows):
        faults.append(f"{len(rows) - same} of {len(rows)} greedy answers are not the source's")
    return {
        "faults": faults,
        "tensors": len(card.tensors),
        "dtype": card.dtype,
        "logits_difference": difference,
        "logits_mean_difference": float(torch.cat([one.flatten() for one in differences]).mean()),
        "logits_allowed": allowed,
        "greedy_equal": same,
        "greedy_total": len(rows),
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }


def _source(config: RunConfig, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, list[str]]:
    """The source's own model in ``dtype``, not merged, and what is wrong with it."""
    source: Source = sources.of(config)
    card = source.card
    if card is not None and card.gather != "sharded":  # as its user loads it, on the base that was merged
        model, _ = artifact.load(source.path, DTYPES[card.dtype], source.section.path, rounded=False)
        model.to(device)
        faults = artifact.check(model, card)  # before the change of format
        return model.to(dtype), faults
    return sources.live(source, load_network, dtype).to(device), []


def _prompts(family: Any, tokenizer: Any) -> list[list[int]]:
    template = renderer(family, tokenizer)
    return [template.prompt([{"role": "user", "content": text}]) for text in _QUESTIONS]


def _speak(model: Any, rows: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy answers, and the logits (length, vocabulary) of each prompt. Without a cache: nothing but the forward."""
    answers, logits = [], []
    device = next(model.parameters()).device
    with torch.no_grad():
        for row in rows:
            ids = list(row)
            for number in range(NEW_TOKENS):
                found = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
                if number == 0:
                    logits.append(found.float().cpu())
                ids.append(int(found[-1].argmax()))
            answers.append(ids[len(row) :])
    return answers, logits


if __name__ == "__main__":
    print(json.dumps(judge(Path(sys.argv[1]))))
