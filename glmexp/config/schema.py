"""What a run may be: one dataclass a group, typed, each field with its meaning, unit and range.

The YAML files under ``conf/`` hold what is: no default stands here. ``Annotated[..., Bound(...)]`` gives the range that
``load`` checks, ``Literal`` the allowed words; ``X | None`` means that null (off, or derived) is allowed. The sections
``method`` and ``tracker`` and the hooks under ``eval`` have their dataclasses beside their code: see ``registry``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from glmexp.config.bounds import Bound as Bound
from glmexp.config.bounds import Count as Count
from glmexp.config.bounds import Elements as Elements
from glmexp.config.bounds import ElementsOrNone as ElementsOrNone
from glmexp.config.bounds import Rate as Rate
from glmexp.config.bounds import Seed as Seed
from glmexp.config.data_schema import DataSection
from glmexp.config.entries import (
    DoctorSection,
    ExportSection,
    GenerateSection,
    InspectSection,
    ParitySection,
    PlanSection,
    SmokeSection,
    TrainerSection,
)
from glmexp.config.inference_schema import BenchSection, DecodingSection, PlacementSection
from glmexp.config.launch_schema import LauncherSection, SlurmSection

Family = Literal["chatglm", "chatglm2", "chatglm3", "qwen2"]
AttentionKind = Literal["eager", "sdpa", "varlen"]


@dataclass
class Named:
    """Settings of an option that has code of its own."""

    name: str
    """Which option this is (set by the option's YAML file)."""


@dataclass
class RunSection:
    """Where a run lies and what it is called."""

    name: str
    """Name of the run: folder under outputs/ and title in the tracker."""
    dir: str | None
    """Run folder. Null: outputs/<name>/<time>, made so that no two runs share one."""
    overwrite: bool
    """Replace a run that already lies in run.dir. False: such a folder is refused."""


@dataclass
class ArtifactSection:
    """A trained artifact to start from."""

    path: str | None
    """Artifact folder or its run folder, for entry=evaluate, generate and export: model and method come from it. A
    checkpoint does as well: of a run, of DeepSpeed, of transformers.Trainer."""


@dataclass
class Sizes:
    """True sizes of a network, used with init=random. Null: the family has no such size."""

    vocab_size: Count | None
    """Rows of the embedding: at least the tokenizer's ids."""
    hidden_size: Count | None
    """Width of the residual stream."""
    intermediate_size: Count | None
    """Inner width of the MLP (of one of its two halves, where it has a gate)."""
    num_layers: Count | None
    """Transformer blocks."""
    num_attention_heads: Count | None
    """Query heads."""
    num_key_value_heads: Count | None
    """Key and value heads, each shared by as many query heads (not ChatGLM-6B)."""
    head_size: Count | None
    """Width of one head (ChatGLM2 and 3; elsewhere hidden_size / num_attention_heads)."""
    max_positions: Count | None
    """Positions that the network was made for, in tokens."""
    tied_embedding: bool | None
    """Embedding and output layer are one tensor (a choice in Qwen2 only)."""


@dataclass
class ModelSection:
    """The network and its tokenizer."""

    name: str
    """Which option this is (set by the option's YAML file)."""
    family: Family
    """Decides network, tokenizer, chat template and LoRA's default target modules."""
    path: str | None
    """Local folder, hub name, or builtin:<name> for the models that are shipped."""
    init: Literal["pretrained", "random"]
    """random: no weights are read, for dry runs and benchmarks; a small tokenizer where path is no folder."""
    init_seed: Seed
    """Seed of the random weights: the same on every device and for every number of ranks."""
    sizes: Sizes
    """Sizes of the network with init=random."""
    pad_token: str | None
    """Token that fills batches up: eos for the end token, or a token's text. Null: the tokenizer's own. Padding is told
    by its place and not by its id, so the end of an answer is learned all the same. The ChatGLMs have theirs fixed."""
    attention: AttentionKind | None
    """varlen: within each packed example, without a mask (not ChatGLM-6B). Null: varlen with data.packing where it
    applies, else sdpa."""
    trust_remote_code: bool
    """Run the Python files of a folder whose network is not known here. Known ones load without them."""
    add_tokens: list[str]
    """Words that become one token each. Their rows start as the mean of the pieces that spelled them before."""


@dataclass
class ZeroSection:
    """DeepSpeed ZeRO: what is partitioned over the ranks. Sizes are numbers of elements, not bytes."""

    stage: Annotated[int, Bound(low=0, high=3)]
    """0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."""
    reduce_bucket_size: Elements | None
    """Elements reduced at a time (stages 1 to 3)."""
    allgather_bucket_size: Elements | None
    """Elements of updated parameters gathered at a time (stages 1 and 2). DeepSpeed 0.19.8 takes it and gathers those
    of an optimizer group at once."""
    overlap_comm: bool | None
    """Reduce gradients while the backward pass goes on (stages 1 to 3)."""
    reduce_scatter: bool | None
    """Send gradients to the ranks that step on them alone. Stages 1 and 2: by all-reduce of a copy of each bucket, or
    by a message to each rank (use_multi_rank_bucket_allreduce=false); false: by all-reduce of the bucket itself. Stage
    3: by reduce-scatter; false: by all-reduce."""
    contiguous_gradients: bool | None
    """Copy gradients into one buffer as they are made (stages 1 to 3)."""
    round_robin_gradients: bool | None
    """Spread the copying of gradients over the ranks (stages 1 and 2)."""
    use_multi_rank_bucket_allreduce: bool | None
    """Join what goes to several ranks into one all-reduce: fewer messages with many ranks. Null: true (stages 1 and
    2)."""
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None
    """Number format in which gradients travel. Null: the run's dtype."""
    stage3_prefetch_bucket_size: ElementsOrNone | None
    """Elements fetched ahead of their use (stage 3)."""
    stage3_param_persistence_threshold: ElementsOrNone | None
    """Parameters smaller than this many elements are never partitioned (stage 3)."""
    stage3_model_persistence_threshold: ElementsOrNone | None
    """Elements that may stay unpartitioned on a GPU by the threshold above, all together (stage 3)."""
    stage3_max_live_parameters: Elements | None
    """Elements kept whole on a GPU before they are released (stage 3)."""
    stage3_max_reuse_distance: Elements | None
    """A parameter used again within this many elements is not released (stage 3)."""
    sub_group_size: Elements | None
    """Elements that the optimizer updates at a time (stage 3)."""
    stage3_module_granularity_threshold: ElementsOrNone | None
    """Modules with fewer elements per descendant are fetched as one piece; 0 is off (stage 3)."""
    stage3_use_all_reduce_for_fetch_params: bool | None
    """Fetch parameters by all-reduce in place of all-gather: less work on the host (stage 3)."""
    stage3_allgather_sequential: bool | None
    """Fetch parameters one by one, without a bucket: a lower peak of memory (stage 3)."""
    memory_efficient_linear: bool | None
    """DeepSpeed's linear layer, which keeps no whole weight for the backward pass. Null: false where blocks are fetched
    as one piece (zero.whole_blocks), else true (stage 3)."""
    leaf_modules: list[str] | None
    """Class names of modules whose parameters are fetched together, as mixtures of experts need it (stage 3)."""
    whole_blocks: bool | None
    """Fetch each block's weights in one collective while the block before it computes, and compile blocks as at stage
    2; two blocks are whole at a time. Null: true, unless another key fetches weights (offload.params, leaf_modules,
    module granularity, ZeRO++, ...) or model.trust_remote_code is set (stage 3)."""
    zero_hpz_partition_size: Count | None
    """ZeRO++ hpZ: ranks that share a second copy of the weights, such as the GPUs of one host (stage 3)."""
    zero_quantized_weights: bool | None
    """ZeRO++ qwZ: weights travel in 8 bit; needs a GPU (stage 3)."""
    zero_quantized_gradients: bool | None
    """ZeRO++ qgZ: gradients travel in 4 bit; needs a GPU (stage 3)."""


@dataclass
class OffloadSection:
    """What is kept in host memory, or on a disk, in place of GPU memory."""

    optimizer: Literal["cpu", "nvme"] | None
    """Optimizer states and their step on the host (stages 1 to 3); nvme: the states on a disk (stage 3)."""
    params: Literal["cpu", "nvme"] | None
    """Parameters on the host, or on a disk, between their uses (stage 3)."""
    pin_memory: bool | None
    """Page-locked host memory: faster copies, cannot be swapped out; buffers are rounded up to powers of two."""
    adam: Literal["deepspeed", "torch", "gpu"] | None
    """AdamW on the host. Null: DeepSpeedCPUAdam where there is a GPU and its op can be compiled, else torch's. gpu: the
    GPU steps, states pass through it, gradients stay there (stages 1 and 2, optimizer=cpu)."""
    gpu_places: Count | None
    """Groups of states (of up to 2**28 elements, 3.2 GB) that have room on the GPU at a time (adam=gpu). Null: 4. With
    more of them more of their way is hidden behind the passes."""
    nvme_path: str | None
    """Folder on a local disk for what is offloaded to nvme: a folder in it for each run, taken away at its end, or by
    the next run on this disk."""
    nvme_buffer_size: Elements | None
    """Elements of one buffer between disk and host: no partition of a parameter may be larger (params=nvme)."""
    nvme_buffer_count: Count | None
    """Such buffers (params=nvme)."""
    nvme_max_in_cpu: ElementsOrNone | None
    """Elements of parameters that stay in host memory (params=nvme)."""
    nvme_pipeline_read: bool | None
    """Read the next optimizer states while these are updated (optimizer=nvme)."""
    nvme_pipeline_write: bool | None
    """Write updated optimizer states while the next are updated (optimizer=nvme)."""
    aio_block_bytes: Count | None
    """Bytes of one request to the disk (nvme)."""
    aio_queue_depth: Count | None
    """Requests that wait at the disk at a time (nvme)."""
    aio_threads: Count | None
    """Threads a rank that work on one read or write (nvme)."""
    aio_single_submit: bool | None
    """Hand requests to the disk one by one in place of as many as the queue takes (nvme)."""
    aio_overlap_events: bool | None
    """Hand in new requests while others are still waited for (nvme)."""


@dataclass
class DeepSpeedSection:
    """The user's own DeepSpeed JSON."""

    config_file: str | None
    """File whose keys are mapped to options; a key that an option also sets must agree with it."""


@dataclass
class PrecisionSection:
    """Number format of weights and activations; fp16's loss scale."""

    dtype: Literal["bf16", "fp16", "fp32"]
    """Masters and optimizer states are float32 in each."""
    loss_scale: Annotated[float, Bound(low=0)] | None
    """fp16: 0 is dynamic, else the fixed scale."""
    initial_scale_power: Annotated[int, Bound(low=0, high=32)] | None
    """fp16: the dynamic scale starts at 2 to this power."""
    loss_scale_window: Count | None
    """fp16: steps without overflow before the scale is doubled."""
    hysteresis: Count | None
    """fp16: overflows in a row before the scale is halved."""
    min_loss_scale: Count | None
    """fp16: the scale never falls below this."""
    check_grad_overflow: bool | None
    """bf16: DeepSpeed looks for inf and nan in each gradient before a step, and waits for the GPU once a tensor. False:
    a gradient norm that is not finite ends the run all the same, after the step."""
    base: Literal["fp8"] | None
    """bf16: number format of the frozen linear layers in the blocks (LoRA, P-Tuning, the frozen blocks of freeze). fp8:
    e4m3 with a scale a row, activations and their gradients too where they meet these weights. Null: that of dtype."""
    base_transposed: bool | None
    """fp8: keep a second copy of each frozen weight, turned round for the backward pass: faster, and the base takes the
    memory that it takes in bf16. False: turn the weight in each backward pass, half the memory. Null: true with fp8."""


@dataclass
class OptimSection:
    """AdamW and its learning rate over the steps."""

    lr: Annotated[float, Bound(above=0)]
    """Top learning rate; by default the method's."""
    betas: list[Annotated[float, Bound(low=0, below=1)]]
    """AdamW's two decay rates."""
    eps: Annotated[float, Bound(above=0)]
    """AdamW's denominator term."""
    weight_decay: Rate
    """Decoupled weight decay; none on biases and norms."""
    schedule: Literal["cosine", "linear", "constant"]
    """After the warm-up: to zero along a half cosine, to zero in a line, or flat."""
    warmup_steps: Annotated[int, Bound(low=0)] | None
    """Optimizer steps from lr / warmup_steps up to lr. Null: warmup_ratio decides."""
    warmup_ratio: Annotated[float, Bound(low=0, high=1)] | None
    """Share of all steps that warm up. Null: no warm-up unless warmup_steps is set."""
    max_grad_norm: Annotated[float, Bound(above=0)] | None
    """Global gradient norm is clipped to this. Null: no clipping."""


@dataclass
class TrainSection:
    """How much, how often, how repeatable."""

    micro_batch_size: Count | None
    """Rows a rank passes at once. Null: derived from batch_size and grad_accum, else 8."""
    grad_accum: Count | None
    """Micro batches of an optimizer step. Null: derived from batch_size and micro_batch_size, else 1."""
    batch_size: Count | None
    """Rows of an optimizer step = micro_batch_size x grad_accum x ranks. Give two, the third is derived."""
    epochs: Annotated[float, Bound(above=0)] | None
    """Passes over the data. Without effect where max_steps is set."""
    max_steps: Count | None
    """Optimizer steps. Null: epochs decides."""
    seed: Seed
    """Order of rows, initial values of what is added, dropout."""
    gradient_checkpointing: bool
    """Compute activations again in the backward pass in place of storing them."""
    compile: bool | None
    """torch.compile on each block. Null: for packed rows of a large network (1e9 parameters) on a GPU; at stage 3 where
    blocks are fetched as one piece (zero.whole_blocks). All packed rows are filled up to one length then."""
    log_steps: Count
    """Optimizer steps between two lines of metrics."""
    save_steps: Count | None
    """Optimizer steps between checkpoints, and one at the end. Null: none but when the run is asked to stop."""
    keep_checkpoints: Count
    """Newest checkpoints that are kept."""
    keep_best: str | None
    """Metric such as eval/loss/loss: the checkpoint with its best value is kept beside the newest ones."""
    keep_best_mode: Literal["min", "max"]
    """Whether the lowest or the highest value of train.keep_best is the best."""
    resume: str | None
    """A run folder or a checkpoint in it: the run goes on there. auto: the newest unfinished run of this configuration
    under outputs/<name> (or in run.dir), else a new one. Null: a new run."""
    stop_after: Count | None
    """Optimizer step after which the run saves and stops as planned; train.resume goes on."""
    stop_after_s: Annotated[float, Bound(above=0)] | None
    """The same after so many seconds, counted from when the ranks have found each other."""
    deterministic: bool
    """The same bits from the same run on a GPU: torch's deterministic kernels, which are slower."""
    profile: bool
    """Keep where each step's time goes and a Chrome trace of three steps, in profile/ of the run folder. GPU steps wait
    for the device in the trace."""


@dataclass
class SweepSection:
    """How the trials of ``-m`` are chosen, and what becomes of those that an earlier start left behind."""

    name: Literal["grid", "search"]
    """grid: every combination; search: each trial is chosen by what the earlier ones gave (Optuna's TPE)."""
    metric: str | None
    """Metric of metrics.jsonl that trials are compared by, its last value. Null: the first of eval/loss/loss and
    train/loss that is there."""
    direction: Literal["minimize", "maximize"]
    """Whether a small or a large metric is good."""
    retry: list[Literal["failed", "out_of_memory", "non_finite"]]
    """When a sweep is taken up again: run trials that ended like this once more. Empty: their outcome stands."""
    trials: Count | None
    """Trials of a search, all starts of it together. Null in a grid, which has as many as it has combinations."""
    seed: Seed | None
    """Seed of the choices of a search. Null in a grid."""


@dataclass
class EntrySection:
    """What the run does."""

    name: Literal["train", "trainer", "evaluate", "generate", "export", "bench", "inspect", "plan", "doctor", "smoke"]
    """train; trainer: the same through transformers' Trainer; evaluate: hooks on an artifact or base; generate: answers
    to a file of prompts, or a chat; export: a whole model; bench: speed of answers; inspect: show data; plan: memory
    and time of a training run beforehand; doctor; smoke: a short run of this configuration, judged."""


@dataclass
class GatherSection:
    """How ZeRO-partitioned weights become files."""

    name: Literal["trainable", "full16", "sharded"]
    """trainable: what was trained; full16: the whole model in 16 bit; sharded: left in partitions."""


@dataclass
class EvalSection:
    """What is measured on held-out rows, and when."""

    batch_size: Count
    """Rows a rank evaluates at once."""
    hooks: dict[str, Any]
    """The chosen hooks with their settings (``eval.loss.every`` and so on)."""


@dataclass
class RunConfig:
    """All of one run, checked. Plain Python objects: no OmegaConf container leaves the config room."""

    run: RunSection
    artifact: ArtifactSection
    model: ModelSection
    method: Any
    zero: ZeroSection
    offload: OffloadSection
    deepspeed: DeepSpeedSection
    precision: PrecisionSection
    data: DataSection
    optim: OptimSection
    train: TrainSection
    entry: EntrySection
    inspect: InspectSection
    export: ExportSection
    generate: GenerateSection
    plan: PlanSection
    doctor: DoctorSection
    trainer: TrainerSection
    parity: ParitySection
    smoke: SmokeSection
    gather: GatherSection
    eval: EvalSection
    placement: PlacementSection
    decoding: DecodingSection
    bench: BenchSection
    tracker: Any
    launcher: LauncherSection
    sweep: SweepSection
    slurm: SlurmSection
