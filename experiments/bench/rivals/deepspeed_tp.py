"""DeepSpeed's tensor parallel inference on the shipped networks, two CPU ranks: does it split them, and rightly?

    PYTHONPATH=. torchrun --nproc-per-node 2 experiments/bench/rivals/deepspeed_tp.py

For each network the largest error of its logits against one process, or why it was not split. Measured with DeepSpeed
0.19.8: Qwen2 is split and right; the ChatGLMs are refused («Not able to determine model policy automatically»).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from glmexp.config.compose import run_config
from glmexp.engine.distributed import avoid_op_builds
from glmexp.model.build import load_network, load_tokenizer
from glmexp.model.renderer import renderer


def main() -> None:
    """One line a network."""
    import deepspeed

    avoid_op_builds()
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", dist_init_required=False, auto_mpi_discovery=False)
    for name in ("tiny_chatglm", "tiny_chatglm2", "tiny", "tiny_qwen2"):
        model = run_config([f"model={name}"]).model
        ids = torch.tensor(
            [renderer(model.family, load_tokenizer(model)).prompt([{"role": "user", "content": "1 + 1?"}])]
        )
        whole: Any = load_network(model, torch.float32).eval()
        with torch.no_grad():
            exact = whole(input_ids=ids).logits
        try:
            engine = deepspeed.init_inference(whole, tensor_parallel={"tp_size": 2}, dtype=torch.float32)
            with torch.no_grad():
                found = f"error {(engine.module(input_ids=ids).logits - exact).abs().max():.1e}"
        except AssertionError as error:
            found = f"refused: {error}"
        if dist.get_rank() == 0:
            print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main()
