"""The training loop. Reads top to bottom; everything that it needs is handed in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from glmexp.engine import distributed, host, states
from glmexp.engine.flops import learned_rows
from glmexp.engine.gradients import GradientWatch
from glmexp.engine.loss import forward_loss, padded_inputs, supervised_tokens
from glmexp.engine.per_rank import PerRank
from glmexp.engine.perf import Speed, Stopwatch, peak_memory_bytes
from glmexp.engine.stop import StopPoint
from glmexp.launcher import positions

Batch = Mapping[str, Any]
Metrics = dict[str, float]


class NonFiniteError(RuntimeError):
    """Loss or gradients are nan or inf: going on would only spoil the weights further."""


FIXED_SCALE_OVERFLOWS = 10
"""Steps in a row that a fixed loss scale may overflow in; a dynamic one is halved until it is at its minimum."""


@dataclass(frozen=True)
class StepSize:
    """What all ranks together learned from in one optimizer step."""

    supervised_tokens: int
    tokens: int
    rows: int
    places: int
    """Tokens and padding."""
    operations: int
    """Useful floating-point operations; 0 where nobody counts them."""
    own_tokens: int
    """This rank's part of the tokens."""


@dataclass(frozen=True)
class Fetched:
    """A step before it is taken."""

    step: int
    micro_batches: list[dict[str, Any]]
    """On the device."""
    size: StepSize
    own_data_s: float
    """What this rank waited for its batches."""


@dataclass
class Loop:
    """One run of optimizer steps over ``engine``.

    steps: (step number from 1, this rank's micro batches) in order, on the CPU, as ``data.collate`` makes them.
    on_metrics gets every ``log_steps``-th step's metrics. after_step gets every step's number and why the run stops
    after it (None: it goes on), and returns the reason that stands, the same on all ranks.
    """

    engine: Any
    steps: Iterable[tuple[int, Sequence[Batch]]]
    log_steps: int
    on_metrics: Callable[[int, Metrics], None]
    after_step: Callable[[int, str | None], str | None]
    inputs: Callable[[Batch], dict[str, Any]] = padded_inputs
    """Batch on the device -> what the network gets; packed batches have masks and positions of their own."""
    per_rank: PerRank = field(default_factory=PerRank)
    stop: StopPoint = field(default_factory=StopPoint)
    notice: Callable[[str], None] = lambda line: None
    """Lines that a person should see."""
    fused_loss: bool = False
    """Compile the softmax of the loss: see ``loss.cross_entropy_sum``."""
    guard: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext()
    """Around each phase: says what to do where the memory does not suffice."""
    speed: Speed | None = None
    """Counts useful operations and knows the GPU's peak, for perf/mfu. None: not measured."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    grad_norm: float = field(default=math.nan, init=False)
    """Of the last step, before clipping."""
    _last_finite: float = field(default=math.nan, init=False)
    _scale_before: float = field(default=1.0, init=False)
    """Loss scale that the last step was taken with."""
    _early_norm: float | None = field(default=None, init=False)
    """Its gradient norm, where DeepSpeed keeps none."""
    _missing_scale: float = field(default=1.0, init=False)
    _overflows: int = field(default=0, init=False)
    """Steps in a row that fp16 has skipped."""

    def run(self) -> str | None:
        """Train until ``steps`` is used up (None) or a reason to stop is found (the reason).

        Raises NonFiniteError, naming the step and the last finite loss, and NoGradientError after the first step.
        """
        self.engine.train()
        self.watch.restart()
        batches = iter(self.steps)
        following = self._fetch(batches)
        first = True
        while following is not None:
            now = following
            positions.at("forward", now.step)  # the last word was of the step before
            summed = (self._first if first else self._forward_backward)(now.micro_batches, now.size)
            first = False
            self._update(now.step)
            # The device still has most of this step to do: the next one's batches are there when it is done.
            following = self._fetch(batches)
            reason = self.after_step(now.step, self._look(now.step, now.size, summed, now.own_data_s))
            if reason is not None:
                return reason
            self.watch.restart()
        return None

    def _fetch(self, batches: Iterator[tuple[int, Sequence[Batch]]]) -> Fetched | None:
        """The next step's batches on their way to the device; None behind the last."""
        began = time.perf_counter()
        with self._phase("data"):
            following = next(batches, None)
            if following is None:
                return None
            step, micro_batches = following
            positions.at("data: sums over ranks", step)
            own_data_s = time.perf_counter() - began
            # Counted before the copy: a count on a GPU would wait for all that was given to it.
            size = size_over_ranks(micro_batches, self.speed)
            return Fetched(step, [distributed.to_device(batch) for batch in micro_batches], size, own_data_s)

    def _update(self, step: int) -> None:
        """The optimizer step, given to the device. ``_look`` waits for it."""
        self._scale_before = self._loss_scale()
        with self._phase("optimizer"):
            self._early_norm, self._missing_scale = self._plain_grad_norm(), self._missing_loss_scale()
            self._step(step)

    def _look(self, step: int, size: StepSize, summed: torch.Tensor, own_data_s: float) -> str | None:
        """Wait for the step just taken, and look at its numbers. Returns why the run stops after it."""
        positions.at("records", step)
        with self.watch.phase("records"):
            total, *flags = distributed.sum_over_ranks([float(summed), *self.stop.flags()])
            loss = total / size.supervised_tokens
            early = self._early_norm
            self.grad_norm = float(self._ds_grad_norm() / self._missing_scale if early is None else early)
            self._check_finite(step, loss, self.grad_norm, self._scale_before)
            self._last_finite = loss
        seconds = self.watch.read()
        self.per_rank.add(size.own_tokens, seconds["step"], own_data_s + seconds["forward"])
        if step % self.log_steps == 0:
            with self.watch.phase("records"):
                self.on_metrics(step, self._metrics(step, loss, self.grad_norm, size, seconds))
        return self.stop.reason(step, flags)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.guard(name), self.watch.phase(name):
            yield

    def _first(self, micro_batches: Sequence[Batch], size: StepSize) -> torch.Tensor:
        """The first step's passes, with a look at what they reach."""
        with GradientWatch(self.engine.module) as reached:
            summed = self._forward_backward(micro_batches, size)
        with self.watch.phase("records"):
            reached.check()
        return summed

    def _forward_backward(self, micro_batches: Sequence[Batch], size: StepSize) -> torch.Tensor:
        """Add up gradients of all micro batches; this rank's loss sum, without waiting for the device."""
        summed = torch.zeros((), dtype=torch.float64, device=distributed.device())
        for number, batch in enumerate(micro_batches, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            with self._phase("forward"):
                loss = forward_loss(self.engine, self.inputs(batch), batch, self.fused_loss)
            with self._phase("backward"):
                # The mean over the step's supervised tokens: DeepSpeed averages over ranks, so the sum is scaled up
                # by their number, and its own division by the accumulation steps is off.
                scale = self._missing_loss_scale() * distributed.world_size() / size.supervised_tokens
                self.engine.backward(loss * scale, scale_wrt_gas=False)
            summed += loss.detach()
        return summed

    def _plain_grad_norm(self) -> float | None:
        """Gradient norm where DeepSpeed keeps none (stage 0 in fp32); taken before clipping and stepping. Else None."""
        engine = self.engine
        if engine.zero_optimization_stage() > 0 or engine.fp16_enabled() or engine.bfloat16_enabled():
            return None
        norms = [parameter.grad.norm() for parameter in engine.module.parameters() if parameter.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def _ds_grad_norm(self) -> float:
        """DeepSpeed's norm before clipping; it writes -1 for one that is not finite."""
        norm = float(self.engine.get_global_grad_norm())
        return norm if norm >= 0 else math.nan

    def _missing_loss_scale(self) -> float:
        """The factor that DeepSpeed (0.19.8) forgets at stage 0 in fp16: it divides gradients by the loss scale there
        and never multiplies the loss by it, which leaves them 65,536 times too small. Else 1."""
        config = getattr(self.engine.optimizer, "loss_scale_config", None)
        return float(config.cur_scale) if config is not None and self.engine.fp16_enabled() else 1.0

    def _step(self, step: int) -> None:
        """DeepSpeed's step; its bare Exception about the smallest loss scale in our words."""
        try:
            self.engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):
                raise
            raise self._no_scale_left(step, self._loss_scale()) from error

    def _check_finite(self, step: int, loss: float, grad_norm: float, scale: float) -> None:
        overflowed = self.engine.fp16_enabled() and bool(self.engine.optimizer.overflow)
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value) and not (overflowed and name != "loss"):
                raise NonFiniteError(
                    f"{name} of optimizer step {step} is {value}; the last finite loss was {self._last_finite:.6g}. "
                    "Usual causes: a learning rate that is too high (optim.lr), no clipping (optim.max_grad_norm), "
                    "fp16 where bf16 would do (precision)."
                )
        self._overflows = self._overflows + 1 if overflowed else 0
        if not overflowed:
            return
        now = self._loss_scale()
        self.notice(
            f"step {step}: gradients overflow fp16 at a loss scale of {scale:g}, the step is skipped "
            f"({self.engine.skipped_steps} so far); the scale is {now:g} now"
        )
        least = getattr(
            states.scaler(self.engine), "min_scale", getattr(states.scaler(self.engine), "min_loss_scale", None)
        )
        if (least is not None and scale <= least) or (least is None and self._overflows >= FIXED_SCALE_OVERFLOWS):
            raise self._no_scale_left(step, scale)

    def _no_scale_left(self, step: int, scale: float) -> NonFiniteError:
        return NonFiniteError(
            f"gradients of optimizer step {step} overflow fp16 at a loss scale of {scale:g}, which gets no smaller "
            f"({self.engine.skipped_steps} steps skipped); the last finite loss was {self._last_finite:.6g}. "
            "precision=bf16 has no such limit; else a lower optim.lr, or precision.min_loss_scale"
        )

    def _loss_scale(self) -> float:
        return float(states.scaler(self.engine).cur_scale) if self.engine.fp16_enabled() else 1.0

    def _metrics(self, step: int, loss: float, grad_norm: float, size: StepSize, seconds: Metrics) -> Metrics:
        step_s = seconds.pop("step")
        memory = {"process_bytes": float(host.process_bytes())}
        if torch.cuda.is_available():
            memory["device_bytes"] = float(torch.cuda.memory_allocated())
        metrics = {
            "train/loss": loss,
            "train/grad_norm": grad_norm,
            "train/lr": self._used_lr(),
            "train/supervised_tokens": float(size.supervised_tokens),
            "perf/step_s": step_s,
            "perf/tokens_per_s": size.tokens / step_s,
            "perf/supervised_tokens_per_s": size.supervised_tokens / step_s,
            "perf/samples_per_s": size.rows / step_s,
            "data/padding_share": 1 - size.tokens / size.places,
            "mem/peak_bytes": self.per_rank.gather(step, peak_memory_bytes(), memory),
            "mem/host_used_bytes": float(host.used_bytes()),
        }
        metrics |= {f"mem/{name}": value for name, value in memory.items()}
        metrics |= {f"perf/{phase}_s": spent for phase, spent in seconds.items()}
        if self.speed is not None:
            metrics |= self.speed.metrics(size.operations, step_s, distributed.world_size())
        if self.engine.fp16_enabled():
            metrics["train/loss_scale"] = float(self.engine.optimizer.loss_scale)
            metrics["train/skipped_steps"] = float(self.engine.skipped_steps)
        return metrics

    def _used_lr(self) -> float:
        """The rate that the step just taken used: the schedule has moved on since."""
        scheduler = self.engine.lr_scheduler
        factor = scheduler.lr_lambdas[0](max(0, scheduler.last_epoch - 1))
        return scheduler.base_lrs[0] * factor


def size_over_ranks(micro_batches: Sequence[Batch], speed: Speed | None) -> StepSize:
    """Sums over all ranks' micro batches. Rows without a label, which fill an epoch's last step up, are padding."""
    supervised = sum(supervised_tokens(batch["labels"]) for batch in micro_batches)
    tokens = sum(int(batch["lengths"][learned_rows(batch)].sum()) for batch in micro_batches)
    rows = sum(map(_examples, micro_batches))
    places = sum(batch["input_ids"].numel() for batch in micro_batches)
    operations = sum(map(speed.work.of, micro_batches)) if speed is not None else 0
    mine = (supervised, tokens, rows, places, operations)
    totals = distributed.sum_over_ranks([float(one) for one in mine])
    assert totals[0] > 0, "a step without a supervised token: the data room lets no such row through"
    return StepSize(*(int(total) for total in (*totals, tokens)))


def _examples(batch: Batch) -> int:
    """Examples that count: those of rows with a label."""
    learned = learned_rows(batch)
    return int((learned * batch["segments"].amax(dim=1)).sum() if "segments" in batch else learned.sum())
