"""P-Tuning v2 (Liu et al. 2021, arXiv:2110.07602): trained keys and values in front of every layer's own.

ChatGLM networks hold the prefix themselves, as the releases do; for Qwen2 it is PEFT's prefix tuning.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.families import FamilyFacts
from glmexp.config.registry import register
from glmexp.config.schema import Bound, Count, Named
from glmexp.method import peft_files
from glmexp.method.base import check_keys, check_shapes, own_weights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from glmexp.method.base import Whole

# The released P-Tuning scripts look for this name and read only the keys below transformer.prefix_encoder.
RELEASED_FILE = "pytorch_model.bin"
_PREFIX = "transformer.prefix_encoder."


@register("method", "ptuning")
@dataclass
class PTuning(Named):
    """A trained prefix in every layer; the base is frozen."""

    num_virtual_tokens: Count
    """Length of the prefix in tokens."""
    prefix_projection: bool
    """Make the prefix through a small network (embedding, linear, tanh, linear) in place of a table."""
    dropout: Annotated[float, Bound(low=0, below=1)]
    """Dropout on the prefix (ChatGLM only; its release trained with 0.1)."""
    lr: Annotated[float, Bound(above=0)]
    """Default of optim.lr under this method."""

    def apply(self, model: Any, family: FamilyFacts) -> nn.Module:
        """Freeze the base and give every layer a prefix."""
        if not family.native_prefix:
            return peft_files.wrap(model, self._peft_config(model))
        model.requires_grad_(False)
        model.add_prefix_encoder(self.num_virtual_tokens, self.prefix_projection)
        model.transformer.prefix_encoder.dropout.p = self.dropout
        return model

    def _peft_config(self, model: Any) -> Any:
        from peft import PrefixTuningConfig

        return PrefixTuningConfig(
            task_type="CAUSAL_LM",
            num_virtual_tokens=self.num_virtual_tokens,
            prefix_projection=self.prefix_projection,
            **({"encoder_hidden_size": model.config.hidden_size} if self.prefix_projection else {}),
        )

    def must_move(self, names: list[str], steps: int) -> list[str]:
        """All of the prefix."""
        return names

    def write(self, folder: Path, model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """ChatGLM: the released prefix file and config.json. Qwen2: a PEFT folder."""
        if hasattr(model, "peft_config"):
            return peft_files.write(folder, model, tensors)
        import torch

        torch.save(tensors, folder / RELEASED_FILE)
        model.config.save_pretrained(folder)
        return tensors

    def load(self, folder: Path, model: Any, family: FamilyFacts) -> nn.Module:
        """The base with the prefix from ``folder``. Raises ArtifactError where they do not fit exactly."""
        if (folder / peft_files.CONFIG).exists():
            return peft_files.load(folder, model)
        import torch

        file = folder / RELEASED_FILE
        if not file.exists():
            raise ArtifactError(Problem(str(folder), f"holds no {RELEASED_FILE}", "name a folder that ptuning wrote"))
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            # torch's own message tells how to switch the guard off: not to be passed on.
            raise ArtifactError(
                Problem(str(file), "is no whole file of tensors; nothing in it was run", "train again, or copy it anew")
            ) from error
        model.add_prefix_encoder(self.num_virtual_tokens, self.prefix_projection)
        own = {name: p for name, p in model.named_parameters() if name.startswith(_PREFIX)}
        check_keys(file, set(state), set(own))
        check_shapes(
            file, {name: tuple(t.shape) for name, t in state.items()}, {n: tuple(p.shape) for n, p in own.items()}
        )
        model.load_state_dict(state, strict=False)
        return model

    def merged(self, model: Any) -> Whole:
        """The network with its prefix (ChatGLM); PEFT's prefix has no place in Qwen2's own files."""
        assert not hasattr(model, "peft_config"), "the rules refuse gather=full16 with ptuning on qwen2"
        return own_weights(model)
