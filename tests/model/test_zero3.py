"""Weights that ZeRO-3 partitions while they load: no forward may read one outside of its own module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.samples import small_batch, small_network
from tests.ranks import run_on_ranks

SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips to 1 unless told otherwise
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def train(
    folder: str, releases: list[str], prefixes: list[dict[str, torch.Tensor]]
) -> list[tuple[int, int, list[float]]]:
    """On a rank, for each release: partitioned parameters, all parameters, and the losses of three steps
    with gradient checkpointing and a loaded prefix."""
    return [
        train_one(str(Path(folder, release)), release, prefix)
        for release, prefix in zip(releases, prefixes, strict=True)
    ]


def train_one(folder: str, release: str, prefix: dict[str, torch.Tensor]) -> tuple[int, int, list[float]]:
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    from glmexp.model import load_prefix

    partitioning = HfDeepSpeedConfig(SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(folder, pre_seq_len=3, prefix_projection=True, dtype=torch.float32)
    load_prefix(model, prefix)
    parameters = list(without_dropout(model).parameters())
    partitioned = sum(hasattr(parameter, "ds_id") for parameter in parameters)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, config=SETTINGS, optimizer=optimizer)
    losses = []
    for _ in range(3):
        loss = engine(**small_batch(release)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    del partitioning
    return partitioned, len(parameters), losses


def plain_losses(model: PreTrainedModel, release: str) -> list[float]:
    optimizer, losses = torch.optim.AdamW(without_dropout(model).parameters(), lr=1e-3), []
    for _ in range(3):
        loss = model(**small_batch(release)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_partitioned_training_equals_plain_training(tmp_path: Path) -> None:
    releases, prefixes, wanted = ["chatglm", "chatglm3"], [], []
    for release in releases:
        small_network(release).save_pretrained(tmp_path / release)
        model = small_network(release)
        model.add_prefix_encoder(3, True)
        prefixes.append({n: t.clone() for n, t in model.state_dict().items() if "prefix_encoder" in n})
        wanted.append(plain_losses(model, release))
    for rank in run_on_ranks(train, str(tmp_path), releases, prefixes, folder=tmp_path):
        for (partitioned, count, losses), plain in zip(rank, wanted, strict=True):
            assert partitioned == count
            assert losses == pytest.approx(plain, abs=1e-5)
