"""Times one generation after another: to the first token, for each further one, memory, bytes of keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from glmexp.model.decoder import Decoder
from glmexp.model.slots import keys_and_values

_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_COPIES = 10


@dataclass(frozen=True)
class Asked:
    """What every side is asked: prompts of one length, without pads."""

    ids: Tensor
    new_tokens: int
    slots: int
    """Size of the fixed cache in tokens, the same for all prompt lengths: a size of its own would be compiled anew."""
    stop_ids: Sequence[int]
    pad_id: int


@dataclass
class Run:
    """One generation."""

    first_s: float
    """Seconds until the first token of every row is on the host (TTFT)."""
    whole_s: float
    steps: int
    """Tokens of the longest answer."""
    tokens: int
    """Tokens of all answers, end tokens counted, pads behind them not."""
    cache_bytes: int
    """Keys and values, as they lie there at the end."""

    @property
    def token_s(self) -> float:
        """Seconds for each token after the first (TPOT)."""
        return (self.whole_s - self.first_s) / max(1, self.steps - 1)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were written a second, the prompt's time included."""
        return self.tokens / self.whole_s


@dataclass
class Cell:
    """One side at one batch size and prompt length."""

    side: str
    batch: int
    prompt: int
    runs: list[Run] = field(default_factory=list)
    peak_bytes: int | None = None
    """Most memory of the device meanwhile; None on the CPU."""

    def spread(self, name: str) -> tuple[float, float, float]:
        """Median, least and most of a value of the runs."""
        values = sorted(getattr(run, name) for run in self.runs)
        middle = len(values) // 2
        median = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
        return median, values[0], values[-1]


Side = Callable[[Asked], Run]


def ours(decoder: Decoder) -> Side:
    """The decoder of this project."""

    def run(asked: Asked) -> Run:
        clock = _Clock()
        new = decoder.generate(
            asked.ids,
            None,
            asked.new_tokens,
            asked.stop_ids,
            asked.pad_id,
            slots=asked.slots,
            on_tokens=lambda _: clock.tick(),
        )
        assert decoder.step is not None
        return clock.run(new, asked, decoder.step.cache.bytes())

    return run


def transformers_generate(network: Any) -> Side:
    """``generate`` of transformers on the same network."""

    def run(asked: Asked) -> Run:
        settings = GenerationConfig(
            max_new_tokens=asked.new_tokens,
            do_sample=False,
            eos_token_id=list(asked.stop_ids),
            pad_token_id=asked.pad_id,
            return_dict_in_generate=True,
        )
        clock = _Clock()
        with torch.no_grad():
            output = network.generate(
                input_ids=asked.ids,
                attention_mask=torch.ones_like(asked.ids),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([_FirstToken(clock)]),
            )
        states = [tensor for pair in keys_and_values(output.past_key_values) for tensor in pair]
        cache_bytes = sum(tensor.numel() * tensor.element_size() for tensor in states)
        return clock.run(output.sequences[:, asked.ids.shape[1] :], asked, cache_bytes)

    return run


class _Clock:
    """Starts when the device is idle and stops when it is again."""

    def __init__(self) -> None:
        synchronize()
        self.began = time.perf_counter()
        self.first: float | None = None

    def tick(self) -> bool:
        """A token is on the host; the first one is noted. Goes on: False."""
        if self.first is None:
            self.first = time.perf_counter()
        return False

    def run(self, new: Tensor, asked: Asked, cache_bytes: int) -> Run:
        synchronize()
        ended = time.perf_counter()
        assert self.first is not None, "a generation has a first token"
        lengths = answer_lengths(new, asked.stop_ids)
        return Run(self.first - self.began, ended - self.began, max(lengths), sum(lengths), cache_bytes)


class _FirstToken(StoppingCriteria):
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        if self.clock.first is None:
            synchronize()
            self.clock.tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def answer_lengths(new: Tensor, stop_ids: Sequence[int]) -> list[int]:
    """Tokens of each row of ``new`` (batch, new), up to its end token."""
    lengths = []
    for row in new.tolist():
        ends = [place for place, token in enumerate(row) if token in stop_ids]
        lengths.append(ends[0] + 1 if ends else len(row))
    return lengths


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(sides: dict[str, Side], asked: Asked, runs: int, warm_up: int) -> list[Cell]:
    """A cell of each side: warmed up one after another, then measured in turns, so that a change of the machine's
    clocks meets all of them."""
    cells = {name: Cell(name, *asked.ids.shape) for name in sides}
    on_gpu = torch.cuda.is_available()
    for name, side in sides.items():
        for _ in range(warm_up):
            side(asked)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            side(asked)
            cells[name].peak_bytes = torch.cuda.max_memory_allocated()
    for _ in range(runs):
        for name, side in sides.items():
            cells[name].runs.append(side(asked))
    return list(cells.values())


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads and writes, the best of ten: what memory bandwidth allows."""
    source = torch.ones(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(_COPIES):
        synchronize()
        began = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronize()
        best = min(best, (time.perf_counter() - began) / 4)
    return 2 * source.numel() / best


def weights_read(network: Any) -> int:
    """Bytes of weights that one decoding step reads on this rank: all but the embedding, of which it reads a row, and
    the encoder of a prefix, whose states lie in the cache."""
    embedding = network.get_input_embeddings().weight
    tied = network.get_output_embeddings().weight is embedding
    total = 0
    for name, parameter in network.named_parameters():
        if ".prefix_encoder." not in name and (tied or parameter is not embedding):
            total += parameter.numel() * parameter.element_size()
    return total
