"""``python -m glmexp.launcher.ops OP``: compile one of DeepSpeed's ops and load it (see ``needs.compiled``)."""

from __future__ import annotations

import sys

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder", "quantizer": "QuantizerBuilder"}


def main(op: str) -> None:
    """Raises what the compiler or the loader raises."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(BUILDERS[op]).load(verbose=False)


if __name__ == "__main__":
    main(sys.argv[1])
