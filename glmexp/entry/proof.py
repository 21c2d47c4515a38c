"""A run proves itself: what was trained moved, what was frozen did not, and the artifact gives the live model's logits.

The last part is judged by a fresh process without DeepSpeed (``python -m glmexp.entry.proof RUN_FOLDER``), which has
only
the folder: ``engine.module.save_pretrained`` under stage 3 writes tensors of shape (0,), PEFT loads keys that match
nothing without an error, and neither shows in the process that trained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glmexp.config.errors import UserError
from glmexp.engine import distributed, fingerprint, gather
from glmexp.engine.build import DTYPES, frozen, trainable
from glmexp.entry import artifact
from glmexp.launcher.folder import write_json
from glmexp.method.base import Method
from glmexp.model.build import load_network

PROBE = "probe.safetensors"
RESULT = "proof.json"
_PROBE_ROWS = 2
_PROBE_POSITIONS = 16
# Largest difference of logits, as a share of their largest size. fp32: other order of summation. bf16 and fp16: a few
# units in the last place through all layers. full16 also rounds merged weights that the live model never rounded.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 4e-3}
TOLERANCE_FULL16 = 5e-2


class ProofError(RuntimeError):
    """The run's own proof failed: do not use its artifact."""


@dataclass(frozen=True)
class Before:
    """Fingerprints from before the first step: masters of what is trained, values of what is frozen."""

    trained: dict[str, int]
    frozen: dict[str, int]


def before(engine: Any) -> Before:
    """Take the fingerprints. Collective."""
    return Before(_masters(engine), fingerprint.of_parameters(frozen(engine.module)))


def _masters(engine: Any) -> dict[str, int]:
    # float32 masters, not the 16-bit copies: a small step may vanish in bf16's rounding and yet be kept in the master.
    masters = gather.masters(trainable(engine.module), engine.optimizer)
    return {name: fingerprint.of_tensor(value) for name, value in masters}


def changes(engine: Any, start: Before, method: Method, steps: int) -> list[str]:
    """What moved and should not have, or did not and should. Collective."""
    now = _masters(engine)
    still = [name for name in method.must_move(list(now), steps) if now[name] == start.trained[name]]
    faults = []
    if still:
        faults.append(f"{len(still)} of {len(now)} trained tensors did not move: {', '.join(still[:3])}")
    end = fingerprint.of_parameters(frozen(engine.module))
    moved = [name for name, value in end.items() if value != start.frozen[name]]
    if moved:
        faults.append(f"{len(moved)} of {len(end)} frozen tensors changed: {', '.join(moved[:3])}")
    return faults


def write_probe(engine: Any, rows: Sequence[Sequence[int]], run_folder: Path) -> None:
    """Keep the live model's logits for the last positions of the shortest rows. Collective; rank 0 writes."""
    from safetensors.torch import save_file

    content: dict[str, torch.Tensor] = {}
    for number, row in enumerate(sorted(rows, key=len)[:_PROBE_ROWS]):
        ids = torch.as_tensor(row, dtype=torch.int64)[None]
        content[f"{number}.input_ids"] = ids
        content[f"{number}.logits"] = _logits(engine, ids.to(distributed.device()))
    if distributed.rank() == 0:
        save_file(content, run_folder / PROBE)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return logits[0, -_PROBE_POSITIONS:].float().cpu().contiguous()


def run_fresh(run_folder: Path, faults: list[str]) -> dict[str, Any]:
    """Let a fresh process judge the artifact; write and return ``proof.json``. Raises ProofError with all faults."""
    return ask_fresh("glmexp.entry.proof", run_folder, "artifact", faults)


def ask_fresh(module: str, run_folder: Path, judged: str, faults: Sequence[str] = ()) -> dict[str, Any]:
    """What ``python -m module RUN_FOLDER`` says of what is ``judged``, behind the ``faults`` found before; written as
    ``proof.json``. Raises ProofError with all faults."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(run_folder)],
        env=fresh_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        result: dict[str, Any] = {"faults": [f"the fresh process failed:\n{done.stderr.strip()}"]}
    else:
        result = json.loads(done.stdout.splitlines()[-1])
    result["faults"] = [*faults, *result["faults"]]
    result["passed"] = not result["faults"]
    write_json(run_folder / RESULT, result)
    if result["faults"]:
        raise ProofError(f"the proof of the {judged} failed:\n  - " + "\n  - ".join(result["faults"]))
    return result


def read_faults(run_folder: Path) -> list[str]:
    """What ``run_fresh`` found last."""
    return json.loads((run_folder / RESULT).read_text(encoding="utf-8"))["faults"]


def fresh_environment() -> dict[str, str]:
    """This process's variables without a rank's and the tracker's."""
    world = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in world and not name.startswith(("TORCHELASTIC_", "WANDB_"))
    }


def judge(run_folder: Path) -> dict[str, Any]:
    """Load the artifact as a user would and hold it against the live model's fingerprints and logits."""
    from safetensors.torch import load_file

    folder = artifact.find(run_folder)
    card = artifact.read_card(folder)
    dtype = DTYPES[card.dtype]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    probe = load_file(run_folder / PROBE)
    base = load_network(card.model_section(), dtype).eval().to(device)
    base_logits = {n: _logits(base, probe[f"{n}.input_ids"].to(device)) for n in _numbers(probe)}
    del base
    try:
        model, _ = artifact.load(folder, dtype)
    except UserError as error:
        return {"faults": [str(problem) for problem in error.problems]}
    faults = artifact.check(model, card)
    model.to(device)
    largest = difference = effect = 0.0
    for number in _numbers(probe):
        live = probe[f"{number}.logits"]
        here = _logits(model, probe[f"{number}.input_ids"].to(device))
        largest = max(largest, float(live.abs().max()))
        difference = max(difference, float((here - live).abs().max()))
        effect = max(effect, float((base_logits[number] - live).abs().max()))
    allowed = (TOLERANCE_FULL16 if card.gather == "full16" else TOLERANCES[card.dtype]) * largest
    # "not <=" so that nan is a fault too.
    if not difference <= allowed:
        faults.append(f"logits differ from the live model's by {difference:.3g}, allowed are {allowed:.3g}")
    return {
        "faults": faults,
        "tensors": len(card.tensors),
        "logits_difference": difference,
        "logits_allowed": allowed,
        "logits_effect_of_training": effect,
    }


def _numbers(probe: dict[str, torch.Tensor]) -> list[int]:
    return sorted({int(name.split(".")[0]) for name in probe})


if __name__ == "__main__":
    print(json.dumps(judge(Path(sys.argv[1]))))
