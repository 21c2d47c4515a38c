"""Parameters of a run by name and shape, from config.json or the option's sizes and the method: no network is built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from glmexp.config.errors import ArtifactError, Problem
from glmexp.config.families import FAMILIES
from glmexp.config.folders import config_json, sizes_in, tokens_in
from glmexp.config.memory import split
from glmexp.config.schema import ModelSection, RunConfig

REST = -1
"""Layer number of what is in no block."""
HEADS = ("output_layer", "lm_head")
"""Modules that are output layers with a weight of their own, not the embedding's."""
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_attention_heads")
_BLOCK = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Parameter:
    """One tensor of the network as it is trained."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    layer: int = REST
    """Block that it is in, from 0."""

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    @property
    def module(self) -> str:
        """Last part of its module's name: ``query_key_value``; of an adapter that of the layer it is on."""
        name = self.name
        for mark in (".lora_A.", ".lora_B.", ".modules_to_save."):
            name = name.partition(mark)[0] + (".weight" if mark in name else "")
        return name.rpartition(".")[0].rpartition(".")[2]

    @property
    def is_matrix(self) -> bool:
        """Weight decay applies to it: DeepSpeed has one flat group of these, and one of the others."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class Network:
    """Sizes of a network, whatever its family calls them."""

    family: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    """Key and value heads."""
    head_size: int
    tied: bool
    linear_bias: bool
    """ChatGLM2/3 with add_bias_linear: a bias on every linear layer of a block."""
    qkv_bias: bool
    rms_norm: bool
    source: str
    """Where the sizes come from, for people."""

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.groups * self.head_size

    @property
    def gated(self) -> bool:
        """The MLP has a gate (all but ChatGLM-6B)."""
        return self.family != "chatglm"


@dataclass(frozen=True)
class Model:
    """A network and what of it is trained."""

    network: Network
    parameters: tuple[Parameter, ...]

    @cached_property
    def trained(self) -> list[Parameter]:
        """In the network's order."""
        return [one for one in self.parameters if one.trained]

    @cached_property
    def frozen(self) -> list[Parameter]:
        """In the network's order."""
        return [one for one in self.parameters if not one.trained]

    @cached_property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(one.elements for one in self.parameters)

    @cached_property
    def trained_elements(self) -> int:
        """Of those that are trained."""
        return sum(one.elements for one in self.trained)

    def groups(self, stage: int, passing: bool = False) -> list[list[Parameter]]:
        """The optimizer's groups (``engine.build.optimizer``): of matrices, then of the others."""
        both = ([one for one in self.trained if one.is_matrix], [one for one in self.trained if not one.is_matrix])
        return [
            [kind[place] for place in places]
            for kind in both
            for places in split([one.elements for one in kind], stage, passing)
        ]


def network_of(model: ModelSection) -> Network:
    """Sizes of the network that will be built.

    A checkpoint on a hub is not asked for: the sizes of its option hold, which are those of the released one.
    """
    content = config_json(model)
    sizes, source = model.sizes, "model.sizes"
    if content is None:
        content = {}
        if model.init == "pretrained":
            source = f"model.sizes, which are those of the released checkpoint ({model.path} is not on this machine)"
    else:
        sizes = sizes_in(content, model.family)
        source = f"config.json of {model.path}"
        names = FAMILIES[model.family].sizes
        absent = [names[name] for name in _NEEDED if getattr(sizes, name) is None]
        if absent:
            raise ArtifactError(
                Problem("model.path", f"{source} names no {', '.join(absent)}", "the file as it was released")
            )
    assert sizes.vocab_size is not None, "every option of the group model has its sizes"
    assert sizes.hidden_size is not None, "every option of the group model has its sizes"
    assert sizes.intermediate_size is not None, "every option of the group model has its sizes"
    assert sizes.num_layers is not None, "every option of the group model has its sizes"
    assert sizes.num_attention_heads is not None, "every option of the group model has its sizes"
    grouped = sizes.num_key_value_heads is not None and content.get("multi_query_attention", True)
    linear_bias = bool(content.get("add_bias_linear", False)) or model.family == "chatglm"
    return Network(
        family=model.family,
        vocab=max(sizes.vocab_size, _tokens(model)),
        hidden=sizes.hidden_size,
        inner=sizes.intermediate_size,
        layers=sizes.num_layers,
        heads=sizes.num_attention_heads,
        groups=sizes.num_key_value_heads if grouped and sizes.num_key_value_heads else sizes.num_attention_heads,
        head_size=sizes.head_size or sizes.hidden_size // sizes.num_attention_heads,
        tied=bool(sizes.tied_embedding) if model.family == "qwen2" else _tied(model.family, content),
        linear_bias=linear_bias,
        qkv_bias=linear_bias or bool(content.get("add_qkv_bias", True)),
        rms_norm=model.family != "chatglm" and bool(content.get("rmsnorm", True)),
        source=source,
    )


def _tied(family: str, content: dict[str, Any]) -> bool:
    return bool(content.get("tie_word_embeddings", family == "chatglm"))


def _tokens(model: ModelSection) -> int:
    """Ids of a tokenizer that model.add_tokens is added to; 0 where nothing is added or it is not here.

    Released embeddings are padded and mostly have room for a few more.
    """
    own = 0 if model.init == "random" or not model.add_tokens else tokens_in(model)
    return own and own + len(model.add_tokens)


def model_of(config: RunConfig) -> Model:
    """Parameters of a run in the order of ``named_parameters``; tied ones are there once."""
    network = network_of(config.model)
    base = [Parameter(name, shape, False, layer) for name, shape, layer in _base(network)]
    return Model(network, tuple(_with_method(config, network, base)))


def names_of(model: ModelSection) -> list[str]:
    """Names of a network's parameters, in its order, nothing added by a method."""
    return [name for name, *_ in _base(network_of(model))]


def elements_of(model: ModelSection) -> int:
    """Elements of a network's parameters, nothing added by a method."""
    return sum(prod(shape) for _, shape, _ in _base(network_of(model)))


def model_from(config: RunConfig, tensors: Iterable[tuple[str, Sequence[int], bool]]) -> Model:
    """The same from name, shape and whether it is trained of each tensor of a network that was built."""
    parameters = []
    for name, shape, trained in tensors:
        block = _BLOCK.search(name)
        parameters.append(Parameter(name, tuple(shape), trained, REST if block is None else int(block[1])))
    return Model(network_of(config.model), tuple(parameters))


def _base(network: Network) -> Iterator[tuple[str, tuple[int, ...], int]]:
    if network.family == "qwen2":
        yield from _qwen2(network)
    elif network.family == "chatglm":
        yield from _chatglm(network)
    else:
        yield from _chatglm2(network)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, width: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _chatglm(network: Network) -> Iterator[tuple[str, tuple[int, ...], int]]:
    hidden, inner = network.hidden, network.inner
    yield "transformer.word_embeddings.weight", (network.vocab, hidden), REST
    for layer in range(network.layers):
        block = f"transformer.layers.{layer}"
        for name, shape in (
            *_norm(f"{block}.input_layernorm", hidden, True),
            *_linear(f"{block}.attention.query_key_value", 3 * hidden, hidden, True),
            *_linear(f"{block}.attention.dense", hidden, hidden, True),
            *_norm(f"{block}.post_attention_layernorm", hidden, True),
            *_linear(f"{block}.mlp.dense_h_to_4h", inner, hidden, True),
            *_linear(f"{block}.mlp.dense_4h_to_h", hidden, inner, True),
        ):
            yield name, shape, layer
    for name, shape in _norm("transformer.final_layernorm", hidden, True):
        yield name, shape, REST
    if not network.tied:
        yield "lm_head.weight", (network.vocab, hidden), REST


def _chatglm2(network: Network) -> Iterator[tuple[str, tuple[int, ...], int]]:
    hidden, inner, bias = network.hidden, network.inner, network.linear_bias
    norm_bias = not network.rms_norm
    yield "transformer.embedding.word_embeddings.weight", (network.vocab, hidden), REST
    for layer in range(network.layers):
        block = f"transformer.encoder.layers.{layer}"
        fused = network.queries + 2 * network.keys
        for name, shape in (
            *_norm(f"{block}.input_layernorm", hidden, norm_bias),
            *_linear(f"{block}.self_attention.query_key_value", fused, hidden, network.qkv_bias),
            *_linear(f"{block}.self_attention.dense", hidden, network.queries, bias),
            *_norm(f"{block}.post_attention_layernorm", hidden, norm_bias),
            *_linear(f"{block}.mlp.dense_h_to_4h", 2 * inner, hidden, bias),
            *_linear(f"{block}.mlp.dense_4h_to_h", hidden, inner, bias),
        ):
            yield name, shape, layer
    for name, shape in _norm("transformer.encoder.final_layernorm", hidden, norm_bias):
        yield name, shape, REST
    if not network.tied:
        yield "transformer.output_layer.weight", (network.vocab, hidden), REST


def _qwen2(network: Network) -> Iterator[tuple[str, tuple[int, ...], int]]:
    hidden, inner = network.hidden, network.inner
    yield "model.embed_tokens.weight", (network.vocab, hidden), REST
    for layer in range(network.layers):
        block = f"model.layers.{layer}"
        for name, shape in (
            *_linear(f"{block}.self_attn.q_proj", network.queries, hidden, True),
            *_linear(f"{block}.self_attn.k_proj", network.keys, hidden, True),
            *_linear(f"{block}.self_attn.v_proj", network.keys, hidden, True),
            *_linear(f"{block}.self_attn.o_proj", hidden, network.queries, False),
            *_linear(f"{block}.mlp.gate_proj", inner, hidden, False),
            *_linear(f"{block}.mlp.up_proj", inner, hidden, False),
            *_linear(f"{block}.mlp.down_proj", hidden, inner, False),
            *_norm(f"{block}.input_layernorm", hidden, False),
            *_norm(f"{block}.post_attention_layernorm", hidden, False),
        ):
            yield name, shape, layer
    yield "model.norm.weight", (hidden,), REST
    if not network.tied:
        yield "lm_head.weight", (network.vocab, hidden), REST


def _with_method(config: RunConfig, network: Network, base: list[Parameter]) -> list[Parameter]:
    method = config.method
    if method.name == "full":
        return [replace(one, trained=True) for one in base]
    if method.name == "freeze":
        return _freeze(config, base)
    if method.name == "lora":
        return _lora(config, base)
    if method.name == "ptuning":
        return [*base, *_prefix(config, network)]
    return base  # a method of a plugin: what it trains is not known here


def knows(config: RunConfig) -> bool:
    """Whether what is trained is known without building anything: the methods of this project."""
    return config.method.name in ("full", "freeze", "lora", "ptuning")


def _freeze(config: RunConfig, base: list[Parameter]) -> list[Parameter]:
    method = config.method
    if method.num_layers is not None:
        layers = 1 + max(one.layer for one in base)
        return [replace(one, trained=one.layer >= layers - method.num_layers) for one in base]
    return [replace(one, trained=any(re.search(pattern, one.name) for pattern in method.patterns)) for one in base]


def _lora(config: RunConfig, base: list[Parameter]) -> list[Parameter]:
    """A and B beside each target, as PEFT names and puts them; modules_to_save are there a second time."""
    method = config.method
    targets = method.target_modules or FAMILIES[config.model.family].lora_targets
    found: list[Parameter] = []
    for one in base:
        module = one.name.rpartition(".")[0]
        found.append(one)
        if any(module == name or module.endswith(f".{name}") for name in method.modules_to_save):
            found.append(Parameter(f"{module}.modules_to_save.default.{one.name[len(module) + 1 :]}", one.shape, True))
        is_weight = one.name.endswith(".weight") and len(one.shape) == 2 and one.layer != REST
        if is_weight and any(module == name or module.endswith(f".{name}") for name in targets):
            rows, columns = one.shape
            adapter = [
                Parameter(f"{module}.lora_A.default.weight", (method.rank, columns), True, one.layer),
                Parameter(f"{module}.lora_B.default.weight", (rows, method.rank), True, one.layer),
            ]
            found += adapter
    return found


def _prefix(config: RunConfig, network: Network) -> list[Parameter]:
    method, tokens = config.method, config.method.num_virtual_tokens
    width = 2 * network.layers * network.keys
    native = FAMILIES[config.model.family].native_prefix
    place = "transformer.prefix_encoder" if native else "prompt_encoder.default"
    if not method.prefix_projection:
        return [Parameter(f"{place}.embedding.weight", (tokens, width), True)]
    narrow = network.hidden if network.family == "chatglm" else width if native else network.keys
    inner = f"{place}.trans" if native else f"{place}.transform"
    shapes = (
        *_linear(f"{inner}.0", network.hidden, narrow, True),
        *_linear(f"{inner}.2", width, network.hidden, True),
    )
    table = Parameter(f"{place}.embedding.weight", (tokens, narrow), True)
    return [table, *(Parameter(name, shape, True) for name, shape in shapes)]
