"""transformers' Trainer over the batches, the loss, the optimizer and the step metrics of our own loop.

What the Trainer does itself: its outer loop and its callbacks, the division by the supervised tokens of the whole step
(``num_items_in_batch`` over all ranks), the preparation of the DeepSpeed engine through accelerate, its checkpoints.
Written against transformers 5.17 to 5.23: the two name the same arguments and methods, apart from
``activation_checkpointing`` (5.23) for ``gradient_checkpointing``, which is switched on before the Trainer gets the
model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from glmexp.config.schema import RunConfig
from glmexp.engine import build, distributed, rng
from glmexp.engine.gradients import GradientWatch
from glmexp.engine.loop import Batch, Loop, StepSize, size_over_ranks
from glmexp.engine.loss import forward_loss
from glmexp.launcher import positions


def arguments(config: RunConfig, output: Path, ds_config: dict[str, Any], total_steps: int) -> TrainingArguments:
    """The Trainer's arguments for a derived configuration. All that DeepSpeed reads stands in ``ds_config``."""
    train, optim, dtype = config.train, config.optim, config.precision.dtype
    assert train.micro_batch_size is not None, "derived before the run starts"
    assert train.grad_accum is not None, "derived before the run starts"
    return TrainingArguments(
        output_dir=str(output),
        # The Trainer and accelerate write into it.
        deepspeed=copy.deepcopy(ds_config),
        use_cpu=not torch.cuda.is_available(),
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        per_device_train_batch_size=train.micro_batch_size,
        gradient_accumulation_steps=train.grad_accum,
        average_tokens_across_devices=True,
        max_steps=total_steps,
        seed=train.seed,
        # Told to the Trainer for its records and callbacks; optimizer and schedule are built here.
        learning_rate=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        max_grad_norm=optim.max_grad_norm or 0.0,
        logging_steps=train.log_steps,
        logging_nan_inf_filter=False,  # a loss of nan is an error here, and never the mean of those before it
        save_strategy="no" if train.save_steps is None else "steps",
        save_steps=train.save_steps or total_steps,
        save_total_limit=train.keep_checkpoints,
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_timeout=int(config.launcher.timeout_s),
    )


class MicroBatches(Dataset[Batch]):
    """One epoch of this rank's micro batches, as often as the Trainer walks over it.

    ``stream``: (step from 0, its micro batches), from the step on that the run begins with. The Trainer asks in order
    (without worker processes and after skipping what a checkpoint has done), so the stream decides what comes.
    """

    def __init__(self, steps_per_epoch: int, grad_accum: int, stream: Iterator[tuple[int, Sequence[Batch]]]) -> None:
        self._count, self._accum, self._stream = steps_per_epoch * grad_accum, grad_accum, stream
        self._waiting: list[tuple[int, Batch]] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Batch:
        if not self._waiting:
            step, micro_batches = next(self._stream)
            first = step * self._accum
            self._waiting = [(first + number, batch) for number, batch in enumerate(micro_batches)]
        number, batch = self._waiting.pop(0)
        following = number % self._count
        assert following == place, f"the Trainer asks for micro batch {place}, {following} is next"
        return batch


@dataclass
class Steps(Loop):
    """The numbers of our loop for steps whose passes the Trainer makes; ``steps`` of the loop is not used."""

    scheduler: Any = None
    reason: str | None = field(default=None, init=False)
    """Why the run stops after the step just taken."""
    _number: int = field(default=0, init=False)
    _size: StepSize | None = field(default=None, init=False)
    _summed: torch.Tensor = field(default_factory=lambda: torch.zeros(()), init=False)
    _own_data_s: float = field(default=0.0, init=False)
    _reached: GradientWatch | None = field(default=None, init=False)

    def begin(self, step: int, fetch: Callable[[], list[Batch]]) -> tuple[list[Batch], int]:
        """The micro batches that ``fetch`` gets for ``step`` (from 1); supervised tokens of the step over all ranks."""
        self.watch.restart()
        with self._phase("data"):
            micro_batches = fetch()
            positions.at("data: sums over ranks", step)
            self._own_data_s = self.watch.so_far()
            self._size = size_over_ranks(micro_batches, self.speed)
        if self._number == 0:
            self._reached = GradientWatch(self.engine.module).__enter__()
        self._number = step
        self._summed = torch.zeros((), dtype=torch.float64, device=distributed.device())
        return micro_batches, self._size.supervised_tokens

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """One forward pass: the sum over the batch's supervised tokens."""
        with self._phase("forward"):
            loss = forward_loss(self.engine, self.inputs(batch), batch, self.fused_loss)
        self._summed += loss.detach()
        return loss

    def backward(self, loss: torch.Tensor, last: bool, **settings: Any) -> None:
        """One backward pass; after the ``last`` of a step also the optimizer's."""
        self.engine.set_gradient_accumulation_boundary(last)
        with self._phase("backward"):
            self.engine.backward(loss * self._missing_loss_scale(), **settings)
        if not last:
            return
        if self._reached is not None:
            self._reached.__exit__(None, None, None)
            with self.watch.phase("records"):
                self._reached.check()
            self._reached = None
        assert self._size is not None, "begin() comes first"
        self._update(self._number)
        self.reason = self._look(self._number, self._size, self._summed, self._own_data_s)

    def _used_lr(self) -> float:
        """The Trainer steps the schedule, after this is asked."""
        return float(self.scheduler.get_last_lr()[0])


class _Wrapper(DeepSpeedEngineWrapper):
    """What accelerate calls in place of the engine: the same calls, through ``Steps``."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps.engine)
        self._steps = steps

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **settings: Any) -> None:
        """See ``DeepSpeedEngineWrapper``."""
        self._steps.backward(loss, sync_gradients, **settings)

    def get_global_grad_norm(self) -> float:
        """Also where DeepSpeed keeps none (stage 0 in fp32)."""
        return self._steps.grad_norm


def _mean_over_step(summed: torch.Tensor, labels: None, num_items_in_batch: int) -> torch.Tensor:
    """The share of the step's mean loss; times the ranks, since DeepSpeed averages gradients over them."""
    return summed * distributed.world_size() / num_items_in_batch


class StepTrainer(Trainer):
    """The Trainer with batches, loss, optimizer and schedule of ``config``."""

    steps: Steps

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        args: TrainingArguments,
        rows: MicroBatches,
        callbacks: list[TrainerCallback],
        on_engine: Callable[[Any], None],
    ) -> None:
        self._config, self._on_engine = config, on_engine
        use_cache, kept = model.config.use_cache, rng.state()
        super().__init__(
            model=model, args=args, train_dataset=rows, callbacks=callbacks, compute_loss_func=_mean_over_step
        )
        # It has set the seed anew and switched the cache off, which generation would miss.
        rng.set_state(*kept)
        model.config.use_cache = use_cache
        self.remove_callback(PrinterCallback)

    def measure(self, steps: Steps) -> None:
        """From here on the passes go through ``steps``."""
        self.steps = steps
        self.accelerator.deepspeed_engine_wrapped = _Wrapper(steps)

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer tells accelerate an accumulation of 1; accelerate would warn, and take DeepSpeed's."""
        super().create_accelerator_and_postprocess()
        self.accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps

    def get_train_dataloader(self) -> DataLoader:
        """Not prepared by accelerate: the rows are this rank's already."""
        assert isinstance(self.train_dataset, MicroBatches), "handed in"
        # A generator of its own: a loader draws a seed for worker processes, which dropout would then miss.
        own = torch.Generator()
        return DataLoader(self.train_dataset, batch_size=1, shuffle=False, collate_fn=itemgetter(0), generator=own)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The same AdamW as in our own loop."""
        if self.optimizer is None:
            assert self.model is not None, "handed in"
            build.make_ready(self.model, self._config)
            self.optimizer = build.optimizer(self.model, self._config)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The same schedule. Called when the engine is there and no checkpoint is loaded yet."""
        chosen = optimizer or self.optimizer
        assert chosen is not None, "created before"
        self.lr_scheduler = build.schedule(chosen, self._config, num_training_steps)
        self._created_lr_scheduler = True
        engine = self.accelerator.deepspeed_engine_wrapped.engine
        build.set_right(engine, self._config)
        self._on_engine(engine)
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], num_batches: int, device: Any) -> tuple[list, int]:
        """The next step's micro batches, and what its loss is divided by."""
        step = self.state.global_step + 1
        return self.steps.begin(step, lambda: [next(epoch_iterator) for _ in range(num_batches)])

    def _save_checkpoint(self, *args: Any) -> None:
        """As it is, with a clock around it."""
        with self.steps.watch.phase("save"):
            super()._save_checkpoint(*args)

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """See ``_mean_over_step``."""
        assert not return_outputs, "the eval hooks measure what is held out"
        return _mean_over_step(self.steps.summed_loss(inputs), None, num_items_in_batch)
