"""``model.add_tokens``: tokens that the checkpoint's vocabulary lacks, and the rows they start with.

A new row is the mean of the rows of the pieces that spelled the token before, added up in float32 in their order. So
the base is the same bits in every process that makes it again: on the CPU or a GPU, whole or partitioned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glmexp.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch import Tensor

Pieces = dict[int, list[int]]
"""Id of a new token to the ids that spelled it before."""


def add_tokens(tokenizer: Any, tokens: list[str]) -> Pieces:
    """Add ``tokens`` to the tokenizer, as words of a text (no special tokens). Raises ConfigError for one it has."""
    if not tokens:
        return {}
    from transformers import AddedToken

    known = [token for token in tokens if token in tokenizer.get_vocab()]
    if known:
        raise ConfigError(
            Problem("model.add_tokens", f"{', '.join(map(repr, known))}: in the vocabulary already", "leave them out")
        )
    before = {token: tokenizer(token, add_special_tokens=False)["input_ids"] for token in tokens}
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
    return {int(tokenizer.convert_tokens_to_ids(token)): ids for token, ids in before.items()}


def rows(held: int, pieces: Pieces) -> int:
    """Rows of the embedding with the new tokens: released ones are padded, and often hold more than the vocabulary."""
    return max(held, *(index + 1 for index in pieces))


def extended(weight: Tensor, pieces: Pieces) -> Tensor:
    """A copy of ``weight`` (rows, hidden) with the rows of the new tokens set."""
    result = weight.new_zeros((rows(weight.shape[0], pieces), weight.shape[1]))
    result[: weight.shape[0]] = weight
    for index, ids in pieces.items():
        total = weight[ids[0]].float()
        for other in ids[1:]:
            total = total + weight[other].float()
        result[index] = (total / len(ids)).to(weight.dtype)
    return result


def extend(network: Any, pieces: Pieces) -> None:
    """The same for a network, its embedding and an output layer that is not tied to it. Collective under ZeRO-3."""
    import torch

    from glmexp.model.prefix import whole_parameters

    weight = network.get_input_embeddings().weight
    held = getattr(weight, "ds_shape", weight.shape)[0]
    assert held >= min(pieces), f"the tokenizer's first new id is {min(pieces)}, the embedding has {held} rows"
    wanted = rows(held, pieces)
    if wanted > held:
        network.resize_token_embeddings(wanted, mean_resizing=False)
    weights = {id(module.weight): module.weight for module in embeddings(network)}
    for weight in weights.values():
        with torch.no_grad(), whole_parameters([weight]):
            if weight.device.type != "meta":
                weight.copy_(extended(weight, pieces))


def embeddings(network: Any) -> list[Any]:
    """The modules whose rows are tokens."""
    found = [network.get_input_embeddings(), network.get_output_embeddings()]
    return [module for module in found if module is not None]
