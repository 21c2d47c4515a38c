"""The tutorials' way: transformers' Trainer, PEFT LoRA, DeepSpeed ZeRO-2, gradient checkpointing, padding, 4 x 4 rows.

    python experiments/bench/rivals/tutorial_recipe.py --model chatglm3 --ids FOLDER/ids.npz --metrics FILE

It trains until it is ended. LoRA has no dropout, as on the other sides. torch's AdamW in place of DeepSpeed's fused
one, which would be compiled first (40 s) and is as fast for so few parameters.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from typing import Any

import deepspeed.ops
import numpy as np
import torch
from common import DEVICE, IGNORED, Steps, arguments, network, rows, targets
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

BUCKET = {"chatglm3": 500_000_000, "qwen2": 200_000_000}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=2048, help="tokens that rows are padded to (longer ones are cut)")
    parser.add_argument("--dynamic", action="store_true", help="pad to the longest row of a micro batch instead")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--accum", type=int, default=4)
    asked = parser.parse_args()
    # A rehearsal on a CPU would compile DeepSpeed's shared-memory all-reduce first, for one rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=asked.micro,
        gradient_accumulation_steps=asked.accum,
        max_steps=1_000_000,
        learning_rate=1e-4,
        bf16=True,
        gradient_checkpointing=not asked.no_checkpointing,
        deepspeed=deepspeed_config(BUCKET[asked.model]),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
    )
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.0, target_modules=targets(asked))
    model = get_peft_model(network(asked, "sdpa"), adapters)
    held = rows(asked.ids)
    width = None if asked.dynamic else asked.width
    counter = RealTokens(asked.metrics, held, width)
    model.register_forward_pre_hook(counter.count, with_kwargs=True)
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=Rows(held),
        data_collator=lambda batch: padded(batch, width),
        callbacks=[counter],
    )
    trainer.train()


def deepspeed_config(bucket: int) -> dict[str, Any]:
    """As the tutorials' files have it."""
    return {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": bucket,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket,
            "contiguous_gradients": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 1_000_000_000,
    }


class Rows(torch.utils.data.Dataset):
    def __init__(self, held: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self._held = held

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._held[index]


def padded(batch: Sequence[tuple[np.ndarray, np.ndarray]], width: int | None) -> dict[str, torch.Tensor]:
    """input_ids, labels, attention_mask (rows, length), padded on the right."""
    shape = (len(batch), width or max(len(ids) for ids, _ in batch))
    made = {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": torch.full(shape, IGNORED)}
    made["attention_mask"] = torch.zeros(shape, dtype=torch.int64)
    for row, (ids, labels) in enumerate(batch):
        count = min(len(ids), shape[1])
        made["input_ids"][row, :count] = torch.from_numpy(ids[:count])
        made["labels"][row, :count] = torch.from_numpy(labels[:count])
        made["attention_mask"][row, :count] = 1
    return made


class RealTokens(TrainerCallback):
    """Counts real tokens where they enter the network: the loader may be ahead of it.

    Of rows padded to a fixed width each counts as the mean of all: its cost does not depend on its length, and the few
    rows of a window would say more about chance than about speed.
    """

    def __init__(self, metrics: Any, held: list[tuple[np.ndarray, np.ndarray]], width: int | None) -> None:
        self._metrics, self._counts = metrics, []
        self._mean = None if width is None else float(np.mean([min(len(ids), width) for ids, _ in held]))
        self._steps: Steps | None = None

    def count(self, module: object, given: object, named: dict[str, torch.Tensor]) -> None:
        mask = named["attention_mask"]
        self._counts.append(mask.sum() if self._mean is None else torch.tensor(len(mask) * self._mean))

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        self._steps = Steps(self._metrics)

    def on_step_end(self, *given: Any, **named: Any) -> None:
        assert self._steps is not None
        self._steps.done(float(torch.stack(self._counts).sum()))
        self._counts.clear()


if __name__ == "__main__":
    main()
