"""LoRA (Hu et al. 2021, arXiv:2106.09685) through PEFT: W x + (alpha / rank) B A x with W frozen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from glmexp.config.families import FamilyFacts
from glmexp.config.registry import register
from glmexp.config.schema import Bound, Count, Named
from glmexp.method import peft_files

if TYPE_CHECKING:
    import torch
    from torch import nn

    from glmexp.method.base import Merge


@register("method", "lora")
@dataclass
class Lora(Named):
    """Low-rank adapters on linear layers; the base is frozen."""

    rank: Count
    """Inner width of each adapter."""
    alpha: Count
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Bound(low=0, below=1)]
    """Dropout on the adapter's input."""
    target_modules: list[str] | None
    """Names of linear layers. Null: the model family's attention projections."""
    modules_to_save: list[str]
    """Modules trained whole and saved beside the adapter."""
    lr: Annotated[float, Bound(above=0)]
    """Default of optim.lr under this method."""

    def apply(self, model: Any, family: FamilyFacts) -> nn.Module:
        """Put adapters on ``model``: B starts at zero, so the model starts as the base. Raises ConfigError on wrong
        names.
        """
        from peft import LoraConfig

        return peft_files.wrap(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=self.rank,
                lora_alpha=self.alpha,
                lora_dropout=self.dropout,
                target_modules=list(self.target_modules or family.lora_targets),
                modules_to_save=list(self.modules_to_save) or None,
            ),
        )

    def must_move(self, names: list[str], steps: int) -> list[str]:
        """B moves in the first step. A's gradient is B^T times something, zero while B is: A moves from the second
        on.
        """
        return [name for name in names if "lora_A" not in name or steps > 1]

    def write(self, folder: Path, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A PEFT folder: adapter_config.json and adapter_model.safetensors."""
        return peft_files.write(folder, model, tensors)

    def load(self, folder: Path, model: Any, family: FamilyFacts) -> nn.Module:
        """The base with the adapter from ``folder``. Raises ArtifactError where file and model do not fit exactly."""
        loaded = peft_files.load(folder, model)
        peft_files.check_scale(folder, loaded, self.alpha / self.rank)
        return loaded

    def merged(self, model: Any) -> Iterator[tuple[str, list[tuple[str, nn.Parameter]], Merge]]:
        """See ``method.base.Method.merged``: W + (alpha / rank) B A for each adapted layer, added up in float32."""
        from peft.tuners.lora import LoraLayer

        adapted = {
            f"{name}.base_layer.weight": (name, module)
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer)
        }
        for name, parameter in model.named_parameters():
            if "lora_" in name or ".original_module." in name:
                continue
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            plain = plain.replace(".modules_to_save.default.", ".")
            if name in adapted:
                prefix, layer = adapted[name]
                module: Any = layer
                scale = module.scaling["default"]
                factors = [
                    (f"{prefix}.lora_A.default.weight", module.lora_A["default"].weight),
                    (f"{prefix}.lora_B.default.weight", module.lora_B["default"].weight),
                ]
                yield (
                    plain,
                    [(name, parameter), *factors],
                    lambda w, a, b, s=scale: w.float() + s * (b.float() @ a.float()),
                )
            else:
                yield plain, [(name, parameter)], lambda w: w
