"""Masters and moments that are kept on the host and pass through the GPU for their step, at ZeRO stages 1 and 2.

DeepSpeed's own offload (0.19.8, ``stage_1_and_2.py`` with cpu_offload) steps on the host: a step reads and writes 42
bytes of host memory a parameter with the cores, and each further micro batch takes the gradients over the bus three
times. Here DeepSpeed is told of no offload: gradients stay on the GPU and are added there, AdamW runs there, and what
lies on the host is 12 bytes a parameter, which come and go by the bus in both directions at once. The numbers are those
of a run without offload, since the kernels are.

A group's master and moments lie in one stretch of page-locked memory. On the GPU there are ``offload.gpu_places``
places of a group's size: group n uses place n mod places, and is fetched piece by piece as soon as what was there
before has gone back. The last groups go back, and the first ones are fetched, beside the next forward and backward
pass: the more places, the less is left for the step. They begin with that pass and not before: a small copy (the next
batch, the loss that is read) waits until the bus has done all that was given to it earlier, 0.2 s where that was
measured. Nobody may wait for the whole device in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import zip_longest
from typing import Any

import torch

from glmexp.config.memory import passing_bytes
from glmexp.engine.host_copy import Chunk

KINDS = ("exp_avg", "exp_avg_sq")
"""Adam's names of the moments, which lie behind the master."""
PIECE = 2**26
"""Elements of a copy, which takes 5 ms: what comes into a place is that far behind what goes. (With an eighth of it the
bus did 41 GB/s each way, with whole groups 49: each wait of one copy for another costs something.)"""


def make_without_gradients() -> None:
    """Before DeepSpeed's optimizer of stage 1 or 2 is made: it (0.19.8) makes float32 gradients of everything, a third
    of all that stands on the GPU then, and takes them away again. Those of its own offload stay, and are made."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    plain = DeepSpeedZeroOptimizer.initialize_optimizer_states
    if not hasattr(plain, "__wrapped__"):

        @wraps(plain)
        def lean(optimizer: Any) -> None:
            if optimizer.cpu_offload:
                plain(optimizer)

        DeepSpeedZeroOptimizer.initialize_optimizer_states = lean


def keep_on_host(engine: Any, places: int, pinned: bool) -> None:
    """Move the states of DeepSpeed's optimizer of stage 1 or 2 to the host, and let its step fetch them."""
    passing = engine.optimizer.passing = Passing(engine.optimizer, places, pinned)
    engine.module.register_forward_pre_hook(lambda module, inputs: passing.go_on())


def settle(optimizer: Any) -> None:
    """Before states are read or written on the host: wait for copies, and let the next step fetch them anew."""
    passing = getattr(optimizer, "passing", None)
    if passing is not None:
        passing.settle()


@dataclass
class _Group:
    """One of the optimizer's flat partitions."""

    flat: torch.Tensor
    """What DeepSpeed holds as the master."""
    state: dict[str, Any]
    host: torch.Tensor
    """(3, elements, rounded up) float32."""
    chunk: Chunk | None
    device: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The same on the GPU, in its place."""

    def put(self, on_host: bool) -> None:
        """Let DeepSpeed and Adam see the states on the host, or in their place on the GPU."""
        rows = (self.host if on_host else self.device)[:, : self.flat.numel()]
        self.flat.data = rows[0]
        for kind, row in zip(KINDS, rows[1:], strict=True):
            self.state[kind] = row


class Lane:
    """Copies one after another, beside computation where there is a GPU."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]) -> list[Any]:
        """Piece by piece; ``after``: events that must have come, by piece. Returns the event behind each."""
        events = []
        for to, of, event in zip_longest(target.view(-1).split(PIECE), source.view(-1).split(PIECE), after):
            if to is None:  # what was there before is larger: its last pieces lie where nothing comes
                break
            events.append(self.piece(to, of, event))
        return events

    def piece(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """One copy; the event behind it."""
        if self._stream is None:
            target.copy_(source)
            return None
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self) -> None:
        """Until all copies are whole."""
        if self._stream is not None:
            self._stream.synchronize()

    @staticmethod
    def hold(event: Any) -> None:
        """Let computation wait for a copy."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    @staticmethod
    def now() -> list[Any]:
        """An event behind the computation that has been given to the GPU so far."""
        return [torch.cuda.current_stream().record_event()] if torch.cuda.is_available() else []


class Passing:
    """Stands before two methods of the optimizer."""

    @torch.no_grad()
    def __init__(self, optimizer: Any, places: int, pinned: bool) -> None:
        self._down, self._up = Lane(), Lane()
        self._groups = [_on_host(optimizer, number, pinned) for number in range(len(optimizer.bit16_groups))]
        self._held: dict[int, int] = {}
        """Group whose states are in a place, or on their way to it."""
        self._fetched: list[list[Any]] = [[] for _ in self._groups]
        self._stored: dict[int, list[Any]] = {}
        """Events behind the last copy out of a place, by piece."""
        self._stepped: int | None = None
        """Group that has stepped last, and whose weights are not rounded yet."""
        self._left: list[int] = []
        """Groups that have stepped and whose places nobody waits for: they go back with the next forward pass."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the masters as DeepSpeed made them
        widest = max(group.host.numel() for group in self._groups)
        self._places = min(places, len(self._groups))
        room = [torch.empty(widest, dtype=torch.float32, device=optimizer.device) for _ in range(self._places)]
        for number, group in enumerate(self._groups):
            group.device = room[number % self._places][: group.host.numel()].view_as(group.host)
        self._step, self._step_group = optimizer.step, optimizer._optimizer_step
        optimizer.step, optimizer._optimizer_step = self.step, self.step_group

    def step(self, closure: Any = None) -> None:
        """In place of ``step``: DeepSpeed sees the states on the GPU while it runs."""
        self.go_on()
        for group in self._groups:
            group.put(on_host=False)
        try:
            self._step(closure)
            self._store()
        finally:
            for group in self._groups:
                group.put(on_host=True)

    def step_group(self, number: int) -> None:
        """In place of ``_optimizer_step``. The group before has been rounded to the weights by now, and goes back."""
        self._store()
        self._fetch(number)
        self._down.hold(self._fetched[number][-1])
        self._step_group(number)
        self._stepped = number

    def settle(self) -> None:
        """See the function of this name."""
        self._send_left()
        self._down.wait()
        self._up.wait()
        self._held.clear()

    def go_on(self) -> None:
        """With a forward pass: the last groups of the step before go back, and the first ones of the next come."""
        self._send_left()
        for number in range(self._places):
            self._fetch(number)

    def _send_left(self) -> None:
        for number in self._left:
            self._send(number)
        self._left.clear()

    def _fetch(self, number: int) -> None:
        place = number % self._places
        if self._held.get(place) != number:
            group = self._groups[number]
            self._fetched[number] = self._down.copy(group.device, group.host, self._stored.get(place, []))
            self._held[place] = number

    def _store(self) -> None:
        """Send the group that stepped last back, and fetch the one that comes into its place."""
        number, self._stepped = self._stepped, None
        if number is None:
            return
        if number + self._places < len(self._groups):
            self._send(number)
            self._fetch(number + self._places)
        else:
            self._left.append(number)

    def _send(self, number: int) -> None:
        group = self._groups[number]
        self._stored[number % self._places] = self._up.copy(group.host, group.device, self._up.now())


def _on_host(optimizer: Any, number: int, pinned: bool) -> _Group:
    """The states of a group in a stretch of host memory: its master as it is, moments of zeros."""
    flat = optimizer.single_partition_of_fp32_groups[number]
    size = passing_bytes(flat.numel())
    chunk = Chunk(size) if pinned else None
    memory = torch.empty(size, dtype=torch.uint8) if chunk is None else chunk.bytes
    host = memory.view(torch.float32).view(3, -1)
    host[0, : flat.numel()].copy_(flat)
    host[1:].zero_()
    base = optimizer.optimizer
    fused = base.param_groups[number].get("fused")
    state = base.state[flat]
    state["step"] = torch.zeros((), dtype=torch.float32, device=optimizer.device if fused else "cpu")
    group = _Group(flat, state, host, chunk)
    group.put(on_host=True)
    for parameter in optimizer.bit16_groups[number]:
        place = parameter._hp_mapping
        if place is not None:  # DeepSpeed's own views, of which ``gather.masters`` reads
            start, count = place.hp_fragment_address.start, place.hp_fragment_address.numel
            place.hp_fragment = host[0, start : start + count]
            place.set_optim_state_fragment(flat, state)
    optimizer._hp_optimizer_states_linked = True
    return group
