"""Decoding over a cache of fixed size: greedy or sampled, with one CUDA graph a token where there is a GPU.

The prompts go through the network as always. Then each token is one call of ``Step.run``, in which shapes and addresses
stay the same and nothing waits for the host: that can be recorded once as a CUDA graph and replayed. What was written
and whether all rows have ended is read two tokens later, so the GPU always has work. With ``compiled`` the small
kernels of a block become few (``torch.compile``); blocks share their code, so it is compiled once a batch size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from glmexp.config.errors import ConfigError, Problem
from glmexp.model.base import ChatGLMPreTrainedModel
from glmexp.model.chatglm import ChatGLMForConditionalGeneration
from glmexp.model.choosing import Choosing, choose
from glmexp.model.one_row import one_row, takes_rows
from glmexp.model.positions import derive_positions
from glmexp.model.prefix import prefix_states
from glmexp.model.slots import SLOTS, LayerSlots, SlotCache
from glmexp.model.token_reader import OnTokens, Reader

log = logging.getLogger(__name__)

Way = Literal["static", "graph", "compiled"]
"""static: call by call; graph: one CUDA graph a token; compiled: the same with compiled blocks."""
_ROUNDED = 256
"""Slots that a cache is rounded up to, so that the next call finds it large enough."""
_WARM_UP = 3
"""Steps before a graph is recorded: libraries set themselves up in them, and blocks are compiled."""


def applies(network: Any) -> bool:
    """The network is one whose decoding step is known here: ChatGLM 1, 2, 3, Qwen2 without a sliding window."""
    if isinstance(network, ChatGLMPreTrainedModel):
        return True
    kinds = getattr(getattr(network, "config", None), "layer_types", None) or ()
    return type(network).__name__ == "Qwen2ForCausalLM" and "sliding_attention" not in kinds


def best_way(network: nn.Module) -> Way | None:
    """How a network is decoded where nobody says: None is the plain way, ``generate`` of transformers."""
    if not applies(network) or next(network.parameters()).device.type != "cuda":
        return None
    if len({parameter.device for parameter in network.parameters()}) > 1 or hasattr(network, "hf_device_map"):
        return None
    return "compiled" if sum(p.numel() for p in network.parameters()) >= WORTHWHILE_PARAMETERS else "graph"


WORTHWHILE_PARAMETERS = 1_000_000_000
"""Below this an answer is too short to win back the seconds that compiling takes."""


class Decoder:
    """Generation with one network; keeps the cache and graph of the last shape for the next call."""

    def __init__(
        self, network: PreTrainedModel, way: Way, options: dict[str, Any] | None = None, falls_back: bool = False
    ) -> None:
        """``options``: torch.compile's. ``falls_back``: where the compiler fails, the way is graph from then on."""
        assert applies(network), f"{type(network).__name__} has no decoding step here"
        self.network, self.falls_back = network, falls_back
        self.way: Way = way
        self.run_layer: Callable[..., Tensor] = _plain_layer
        if way == "compiled":
            self.run_layer = torch.compile(_plain_layer, dynamic=False, fullgraph=True, options=options)
        self.step: Step | None = None

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        pad_id: int,
        choosing: Choosing | None = None,
        slots: int | None = None,
        rows: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Tensor:
        """New ids (batch, new): each row up to its end token, pads behind it.

        ``input_ids`` (batch, length), pads of shorter rows in front, named by ``attention_mask`` (1 = real). ``slots``:
        size of the cache in tokens, prefix and new tokens counted; None: that of the last call, or a larger one where
        this call needs it. ``rows``: a smaller batch is filled up to so many. A call with the same rows, slots, end
        tokens and ``choosing`` as the last one records nothing anew.
        """
        batch = input_ids.shape[0]
        if rows is not None and rows > batch:
            input_ids = _filled_up(input_ids, rows)
            attention_mask = None if attention_mask is None else _filled_up(attention_mask, rows)
        lengths, attention_mask = self._lengths(input_ids, attention_mask)
        prefix = self._prefix(input_ids.shape[0])
        virtual = prefix[0][0].shape[2] if prefix else 0
        needed = virtual + input_ids.shape[1] + max_new_tokens
        if slots is not None and slots < needed:
            raise ValueError(
                f"{virtual} virtual tokens, {input_ids.shape[1]} of the prompt and {max_new_tokens} new ones are "
                f"{needed}, and the cache has {slots} slots"
            )
        key = (input_ids.shape[0], tuple(stop_ids), pad_id, choosing)
        there = None if self.step is None or self.step.key != key else self.step.cache.slots
        if slots is None:
            slots = there if there is not None and there >= needed else -(-needed // _ROUNDED) * _ROUNDED
        if self.step is None or there != slots:
            self.step = None  # its memory is given back before the next one takes its own
            if self.way == "compiled":
                # What was compiled for the last shape is recorded and not called again; eight shapes are torch's limit.
                torch.compiler.reset()
            self.step = Step(self.network, self.run_layer, slots, *key)
        logits, start, each = self._prompt(input_ids, attention_mask, prefix, lengths)
        shown = input_ids if attention_mask is None else input_ids.where(attention_mask.ne(0), input_ids[:, -1:])
        self.step.begin(shown, logits, start, each, batch)
        if self.way != "static" and self.step.graph is None and max_new_tokens > 1:
            self._record(self.step)
        return self._write(self.step, batch, max_new_tokens, on_tokens)

    def _record(self, step: Step) -> None:
        """Raises ConfigError where the compiler fails and nothing else may be done."""
        try:
            step.record()
        except TorchDynamoException as error:
            why = " ".join(str(error).split("\n\n")[0].split())[:300]
            if not self.falls_back:
                way_out = "decoding.way=graph; TORCHDYNAMO_VERBOSE=1 and the rank's log say more"
                raise ConfigError(Problem("decoding.way", f"compiled: the compiler fails: {why}", way_out)) from error
            log.warning("decoding.way: graph instead of compiled", exc_info=True)
            if os.environ.get("RANK", "0") == "0":
                print(f"decoding: graph, since the compiler fails (all of it is in the log): {why}", flush=True)
            self.way, self.run_layer = "graph", _plain_layer
            step.run_layer = _plain_layer
            step.record()

    def _write(self, step: Step, batch: int, most: int, on_tokens: OnTokens | None) -> Tensor:
        """Steps until all rows have ended, ``most`` tokens stand there, or the reader has enough."""
        reader = Reader(step, batch)
        stopped = False
        with step.ready() if step.graph is None else _nothing():
            for _ in range(most - 1):
                stopped = reader.behind(on_tokens)
                if stopped:
                    break
                step.replay()
                reader.note()
        while reader.waiting and not stopped:
            stopped = reader.read(on_tokens)
        counts = step.counts if not stopped else step.counts.clamp(max=reader.seen)
        return step.written[:batch, : int(counts.max())].clone()

    @staticmethod
    def _lengths(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Real tokens of each row (batch,), and the mask where there is a pad at all."""
        batch, length = input_ids.shape
        if attention_mask is None:
            return torch.full((batch,), length, device=input_ids.device), None
        real = attention_mask.ne(0)
        columns = torch.arange(length, device=real.device)
        lengths = real.sum(dim=1)
        if not bool((real == (columns >= (length - lengths)[:, None])).all()):
            raise ValueError("attention_mask: pads stand in front of a row and nowhere else")
        return lengths, None if bool(real.all()) else attention_mask

    def _prefix(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        """A P-Tuning prefix by layer, which goes into the slots once and not into every step."""
        transformer = getattr(self.network, "transformer", None)
        encoder = getattr(transformer, "prefix_encoder", None)
        like = torch.empty(batch, 0, 0, dtype=self.network.dtype, device=self.network.device)
        return prefix_states(encoder, like)  # type: ignore[return-value]  # pairs of None only without an encoder

    def _prompt(
        self, input_ids: Tensor, attention_mask: Tensor | None, prefix: list[tuple[Tensor, Tensor]], lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the last token (batch, vocabulary), the next position and what it grows by with each token."""
        assert self.step is not None, "a step has the cache"
        start, each, given = _positions(self.network, input_ids, attention_mask, lengths)
        output = self.network(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=given,
            use_cache=True,
            logits_to_keep=1,
        )
        filled = self.step.cache.fill(output.past_key_values, input_ids.shape[1] - lengths, prefix)
        for one in self.step.cache.filled:
            one.begin(filled)
        return output.logits[:, -1], start, each


def _positions(
    network: Any, input_ids: Tensor, attention_mask: Tensor | None, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Next position (batch, ..., 1), its growth a token, and the prompt's (None: the network finds them)."""
    if isinstance(network, ChatGLMForConditionalGeneration):
        # The network's own rule, asked about two tokens that are not there yet.
        pad = input_ids[:, -1:].expand(-1, 2)
        real = None if attention_mask is None else torch.nn.functional.pad(attention_mask, (0, 2), value=1)
        more = derive_positions(torch.cat((input_ids, pad), dim=1), real, network.config)
        return more[..., -2:-1].clone(), more[..., -1:] - more[..., -2:-1], None
    start = lengths[:, None].clone()
    given = None if attention_mask is None else (attention_mask.ne(0).cumsum(dim=1) - 1).clamp_(min=0)
    return start, torch.ones_like(start), given


_recorded: WeakSet[Step] = WeakSet()


def forget_recordings() -> None:
    """Call before the process group is left: NCCL waits at its end, without a limit, for every graph that holds one of
    its collectives (``commDestroySync`` in its src/init.cc)."""
    for step in list(_recorded):
        if step.graph is not None:
            step.graph.reset()
            step.graph = None


class Step:
    """One token for every row of a batch: all that it reads and writes has one place."""

    def __init__(
        self,
        network: Any,
        run_layer: Callable[..., Tensor],
        slots: int,
        batch: int,
        stop_ids: tuple[int, ...],
        pad_id: int,
        choosing: Choosing | None,
    ) -> None:
        self.key = (batch, stop_ids, pad_id, choosing)
        self.network, self.run_layer, self.pad_id, self.choosing = network, run_layer, pad_id, choosing
        device = network.device
        self.cache = SlotCache(batch, slots)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.counts = torch.zeros(batch, dtype=torch.int64, device=device)
        self.written = torch.full((batch, slots), pad_id, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.stops = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self.position = self.growth = self.token
        self.seen: Tensor | None = None
        self.logits: Tensor | None = None
        """Of the last step, (batch, vocabulary)."""
        self.graph: torch.cuda.CUDAGraph | None = None

    def begin(self, shown: Tensor, logits: Tensor, start: Tensor, growth: Tensor, rows: int) -> None:
        """A new generation: the first token comes from the prompt's ``logits`` (batch, vocabulary). ``shown``: ids of
        the prompt (batch, length), of which the first ``rows`` are asked for."""
        if self.choosing is not None and self.choosing.repetition_penalty is not None:
            if self.seen is None:
                self.seen = torch.zeros_like(logits, dtype=torch.bool)
            self.seen.zero_().scatter_(1, shown, True)
        if self.position.shape != start.shape or self.position is self.token:
            self.position, self.growth = start.clone(), growth.clone()
        else:
            self.position.copy_(start)
            self.growth.copy_(growth)
        self.ended.zero_()
        self.ended[rows:] = True
        self.counts.zero_()
        self.written.fill_(self.pad_id)
        self.at.zero_()
        self.take(logits)

    def take(self, logits: Tensor) -> None:
        """Choose a token a row, write it down, note which rows have ended."""
        token = torch.where(self.ended, self.pad_id, choose(logits, self.choosing, self.seen))
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], True)
        self.written.index_copy_(1, self.at, token[:, None])
        self.at.add_(1)
        self.counts.add_(~self.ended)
        self.ended.logical_or_(torch.isin(token, self.stops))
        self.token.copy_(token[:, None])

    def run(self) -> None:
        """One step, inside of ``ready``: the last token through the network, and the next one chosen."""
        qwen2 = not isinstance(self.network, ChatGLMPreTrainedModel)
        output = self.network(
            input_ids=self.token,
            attention_mask={"full_attention": None} if qwen2 else None,
            position_ids=self.position,
            past_key_values=self.cache.layers[0],
            use_cache=True,
        )
        self.logits = output.logits[:, -1]
        self.take(self.logits)
        self.position.add_(self.growth)
        for filled in self.cache.filled:
            filled.advance()

    def replay(self) -> None:
        """One step: the recorded one where there is one."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.run()

    def record(self) -> None:
        """Warm up, then record ``run`` as a CUDA graph. What warming up wrote is taken back or written over."""
        state = [self.token, self.ended, self.counts, self.written, self.at, self.position]
        state += [tensor for filled in self.cache.filled for tensor in (filled.place, filled.used, filled.visible)]
        state += [self.seen] if self.seen is not None else []
        kept = [tensor.clone() for tensor in state]
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with self.ready():
            try:
                with torch.cuda.stream(side):
                    for _ in range(_WARM_UP):
                        self.run()
            finally:
                torch.cuda.current_stream().wait_stream(side)
                for tensor, value in zip(state, kept, strict=True):
                    tensor.copy_(value)
            torch.cuda.synchronize()
            # NCCL's watchdog asks about events meanwhile, from a thread of its own: only this one must not.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.run()
        self.graph = graph
        _recorded.add(self)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The network as a step needs it: attention over slots, each layer with its own, the prefix in them."""
        network = self.network
        layers = _layers(network)
        attentions = [module for module in network.modules() if hasattr(module, "layer_idx")]
        numbers, kind = [module.layer_idx for module in attentions], network.config._attn_implementation
        transformer: Any = getattr(network, "transformer", None)
        encoder = getattr(transformer, "prefix_encoder", None)
        plain = list(layers)
        try:
            network.config._attn_implementation = SLOTS
            for module in attentions:
                module.layer_idx = 0  # it would be part of what a block is compiled for
            if encoder is not None:
                transformer.prefix_encoder = None
            for index, layer in enumerate(plain):
                layers[index] = _Layer(layer, self.run_layer, self.cache.layers[index])
            with one_row(layers) if self.key[0] == 1 and takes_rows(network) else _nothing():
                yield
        finally:
            for index, layer in enumerate(plain):
                layers[index] = layer
            if encoder is not None:
                transformer.prefix_encoder = encoder
            for module, number in zip(attentions, numbers, strict=True):
                module.layer_idx = number
            network.config._attn_implementation = kind


class _Layer(nn.Module):
    """A block that is handed its own slots."""

    def __init__(self, layer: nn.Module, run: Callable[..., Tensor], slots: LayerSlots) -> None:
        super().__init__()
        self.layer, self.run, self.slots = layer, run, slots

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the block's."""
        slots = {"past_key_values": self.slots, "filled": self.slots.filled}
        return self.run(self.layer, hidden, *args, **{**kwargs, **slots})


def _plain_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return layer(*args, **kwargs)


def _layers(network: Any) -> nn.ModuleList:
    kinds = set(network._no_split_modules or ())
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) and type(module[0]).__name__ in kinds:
            return module
    raise AssertionError(f"{type(network).__name__} has no list of blocks")


def _filled_up(rows: Tensor, count: int) -> Tensor:
    """The last row again and again, up to ``count``."""
    return torch.cat((rows, rows[-1:].expand(count - rows.shape[0], -1)))


@contextmanager
def _nothing() -> Iterator[None]:
    yield
