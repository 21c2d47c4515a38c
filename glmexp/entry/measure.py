"""Times one generation after another: to the first token, for each further one, memory, bytes of keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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


def measure(sides: dict[str, Side], asked: Asked, runs: int, warm_up: int) -> Iterator[tuple[str, Cell | None]]:
    """Times every side with the same prompts: warmed up one after another, then measured in turns, so that a change of
    the machine's clocks meets all of them.

    Yields the side after each of its generations: with None, or with its whole cell after the last one.
    """
    cells = {name: Cell(name, *asked.ids.shape) for name in sides}
    for name, side in sides.items():
        for _ in range(warm_up):
            side(asked)
            yield name, None
    for run in range(1, runs + 1):
        for name, side in sides.items():
            cell = cells[name]
            _forget_peak()
            cell.runs.append(side(asked))
            cell.peak_bytes = _peak(cell.peak_bytes)
            yield name, cell if run == runs else None


def _forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak(before: int | None) -> int | None:
    return max(before or 0, torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None


@dataclass
class Pace:
    """How long a bench will take, from the generations that it has done. Call ``done`` after each.

    A side's first generation at a batch size also compiles and records: what that took longer than the next one is what
    each batch size to come is taken to cost. A generation is taken to last as long at any batch on a GPU, which mostly
    reads weights, and to grow with the root of the batch on the CPU: a guess, which each cell replaces.
    """

    sides: Sequence[str]
    batches: Sequence[int]
    """Batch of each question in order."""
    each: int
    """Generations of a side for one question."""
    grows: bool = field(default_factory=lambda: not torch.cuda.is_available())
    began: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.monotonic)
    """When the last generation was done."""
    question: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """Generations of each side at the present question."""
    first: dict[str, float] = field(default_factory=dict)
    """Seconds of each side's last generation that was the first at its batch size."""
    later: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Seconds of each side's last generation that was not, and its batch."""

    def done(self, side: str) -> None:
        """A generation of ``side`` is over."""
        now = time.monotonic()
        took, self.at = now - self.at, now
        count = self.counts.get(side, 0)
        if count == 0 and self._new_size(self.question):
            self.first[side] = took
        else:
            self.later[side] = took, self.batches[self.question]
        self.counts[side] = count + 1
        if all(self.counts.get(name) == self.each for name in self.sides):
            self.question, self.counts = self.question + 1, {}

    def known(self) -> bool:
        """Every side has been seen twice, so that its first generation is told from the others."""
        return all(side in self.later for side in self.sides)

    def words(self) -> str:
        """``20 s of about 110 s``: seconds since the beginning, and what it will have taken."""
        passed = time.monotonic() - self.began
        return f"{passed:.0f} s of about {passed + self.left_s():.0f} s"

    def left_s(self) -> float:
        """Seconds that what is left will take."""
        left = 0.0
        for number in range(self.question, len(self.batches)):
            for side in self.sides:
                count = self.each - (self.counts.get(side, 0) if number == self.question else 0)
                took, batch = self.later[side]
                left += count * took * ((self.batches[number] / batch) ** 0.5 if self.grows else 1.0)
                if count == self.each and self._new_size(number):
                    left += max(0.0, self.first[side] - took)
        return left

    def _new_size(self, number: int) -> bool:
        return number == 0 or self.batches[number] != self.batches[number - 1]


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
