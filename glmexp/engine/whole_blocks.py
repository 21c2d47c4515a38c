"""ZeRO-3: the weights of a transformer block as one piece, gathered while the block before it computes.

DeepSpeed (0.19.8) gathers parameter by parameter: for each one the host walks over the block's modules, formats names,
records events, waits for all but the last two of them, and copies what has come (``partitioned_param_coordinator.py``,
``partition_parameters.py``). With the 20 tensors of a block of Qwen2-7B with an adapter the GPU waits for the host.
Here one collective brings a block's tensors from their partitions to where they are read, nothing is copied, and the
host waits for nothing. Partitions (``ds_tensor``), states (``ds_status``) and all outside of blocks stay DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from glmexp.config.memory import BLOCK_ALIGNMENT
from glmexp.engine import distributed
from glmexp.engine.compiled import blocks


def mark(model: Any) -> None:
    """Let DeepSpeed fetch each block of ``model`` as one piece."""
    from deepspeed.utils import set_z3_leaf_module

    for block in blocks(model.get_base_model() if hasattr(model, "get_base_model") else model):
        set_z3_leaf_module(block, True)


def gather(engine: Any) -> None:
    """Take over the leaf modules of ``engine`` (a new one, of stage 3)."""
    from deepspeed.utils import z3_leaf_module

    _Blocks(engine, [module for module in engine.module.modules() if z3_leaf_module(module)])


class _Blocks:
    """All blocks in their order, and the hooks on them."""

    def __init__(self, engine: Any, modules: list[nn.Module]) -> None:
        self.optimizer = engine.optimizer
        self.offload = self.optimizer.parameter_offload
        self.blocks = [_Block(module) for module in modules]
        self.kept = _Kept(self.optimizer.persistent_parameters)
        own = {id(one) for block in self.blocks for one in block.fetched}
        others = [one for one in engine.module.parameters() if id(one) not in own and not one.ds_persist]
        self.others = _Others(others)
        self._replace(modules)
        for place, block in enumerate(self.blocks):
            self._hook(place, block)

    def _replace(self, modules: list[nn.Module]) -> None:
        """DeepSpeed's hooks, its release of all parameters before a step, and the gathering of small ones after it."""
        places = {id(hooks) for one in modules for hooks in (one._forward_pre_hooks, one._forward_hooks)}
        for handles in (self.offload.forward_hooks, self.offload.backward_hooks):
            for handle in [one for one in handles if id(one.hooks_dict_ref()) in places]:
                handle.remove()
                handles.remove(handle)
        self.optimizer.persistent_parameters = []
        self.offload.partition_all_parameters = self.partition_all
        for name in ("_post_step", "checkpoint_event_epilogue"):
            setattr(self.optimizer, name, self._then_renewed(getattr(self.optimizer, name)))
        self.kept.renew()

    def _then_renewed(self, call: Any) -> Any:
        def both(*args: Any) -> None:
            call(*args)
            self.kept.renew()

        return both

    def _hook(self, place: int, block: _Block) -> None:
        block.module.register_forward_pre_hook(lambda module, inputs: self.before_forward(place, inputs))
        block.module.register_forward_hook(lambda module, inputs, output: self.after_forward(place, output))
        block.module.register_full_backward_pre_hook(lambda *_: self.before_backward(place))
        # After DeepSpeed's hook, which takes the gradients: hooks are called in their order.
        block.module.register_full_backward_hook(lambda *_: self.after_backward(place))

    def before_forward(self, place: int, inputs: tuple[Any, ...]) -> None:
        again = _in_backward()  # gradient checkpointing
        if place == 0 and not again:
            for block in self.blocks:  # what the pass before has left
                block.release()
        if not again:
            self.blocks[place].passes_on = _any_learns(inputs)
        self._have(place, place - 1 if again else place + 1)

    def after_forward(self, place: int, output: Any) -> None:
        if _in_backward():
            return
        block = self.blocks[place]
        block.learns = _any_learns(output if isinstance(output, (tuple, list)) else (output,))
        if not (block.learns and place == len(self.blocks) - 1):  # the backward pass begins with the last one
            block.release()

    def before_backward(self, place: int) -> None:
        self._have(place, place - 1 if place and self.blocks[place - 1].learns else -1)

    def after_backward(self, place: int) -> None:
        # Where no input needs a gradient (prefixes over frozen embeddings) torch calls this before the backward pass:
        # such a block waits for the step, or for the next pass.
        if self.blocks[place].passes_on:
            self.blocks[place].release()

    def _have(self, place: int, following: int) -> None:
        """Let the block at ``place`` have its weights, and those of ``following`` (if there is one) come meanwhile."""
        block = self.blocks[place]
        block.start()
        if 0 <= following < len(self.blocks):
            self.blocks[following].start()
        block.ready()
        if not _are_whole(block.kept):
            self.kept.renew()

    def partition_all(self) -> None:
        """In place of ``partition_all_parameters``. Small parameters stay: a frozen one does not change, and a trained
        one is renewed after the step."""
        for block in self.blocks:
            block.release()
        self.offload.get_param_coordinator().release_and_reset_all(self.others)


class _Block:
    """The parameters of one block: ``fetched`` ones, which are whole while it computes, and ``kept`` ones, which stay
    whole (DeepSpeed's persistent ones)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parameters: list[Any] = list(module.parameters())
        self.fetched = [one for one in parameters if not one.ds_persist]
        self.kept = [one for one in parameters if one.ds_persist]
        self.learns = False
        """The forward pass before was one that a backward pass follows."""
        self.passes_on = False
        """An input of that pass needs a gradient."""
        self._started = self._whole = False
        self._work: Any = None
        self._lay_out()

    def _lay_out(self) -> None:
        """One memory for all that is fetched, and its parts: as they are gathered and as they are read.

        It is a storage that loses its memory and gets some again, as FSDP's: what autograd or a compiled block has
        saved is a view of it, which holds no memory between the passes and has the right values in the backward pass.
        """
        ranks, starts, end = distributed.world_size(), [], 0
        for one in self.fetched:
            assert one.dtype == one.ds_tensor.dtype, f"{one.dtype} is partitioned as {one.ds_tensor.dtype}"
            starts.append(end)
            end += -(-one.ds_tensor.nbytes * ranks // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
        self._memory = torch.empty(end, dtype=torch.uint8, device=distributed.device()).untyped_storage()
        self._gathered, self._read = [], []
        for one, start in zip(self.fetched, starts, strict=True):
            part = torch.empty(0, dtype=one.dtype, device=distributed.device())
            part.set_(self._memory, start // one.element_size(), (one.ds_tensor.numel() * ranks,), (1,))
            self._gathered.append(part)
            self._read.append(part[: one.ds_numel].view(one.ds_shape))
        self.size_bytes, self._nothing = end, {one.dtype: one.new_empty(0).detach() for one in self.fetched}
        self._memory.resize_(0)

    @property
    def held_bytes(self) -> int:
        """Of whole weights, at this moment."""
        return self._memory.nbytes()

    def start(self) -> None:
        """Begin to gather, unless that has begun."""
        if self._whole and not _are_whole(self.fetched):
            self.release()  # somebody has partitioned them
        if self._started or not self.fetched:
            return
        # From the memory of the stream that computes: the collective waits for what has been given to that stream so
        # far, which is all that may still use this memory. Nothing of the block that computes next is among it.
        self._memory.resize_(self.size_bytes)
        with dist._coalescing_manager(async_ops=True) as self._work:
            for part, one in zip(self._gathered, self.fetched, strict=True):
                dist.all_gather_into_tensor(part, one.ds_tensor)
        self._started = True

    def ready(self) -> None:
        """Let the stream that computes wait for what was begun; the host goes on."""
        if self._whole or not self._started:
            return
        self._work.wait()
        self._work = None
        for one, whole in zip(self.fetched, self._read, strict=True):
            one.data = whole
            one.ds_status = _available()
        self._whole = True

    def release(self) -> None:
        """Give the memory back."""
        if not self._started:
            return
        self.ready()
        for one in self.fetched:
            one.data = self._nothing[one.dtype]
            one.ds_status = _not_available()
        self._memory.resize_(0)
        self._started = self._whole = False


class _Kept:
    """Small parameters, which stay whole: those outside of blocks too."""

    def __init__(self, parameters: list[Any]) -> None:
        self.frozen = [one for one in parameters if not one.requires_grad]
        self.trained = [one for one in parameters if one.requires_grad]
        ranks, device = distributed.world_size(), distributed.device()
        dtypes = {one.dtype for one in self.trained}
        assert len(dtypes) <= 1, f"trained parameters have one dtype, not {dtypes}"
        self.parts = [one.ds_tensor.numel() for one in self.trained]
        dtype = next(iter(dtypes), torch.float32)
        wholes = torch.empty(ranks * sum(self.parts), dtype=dtype, device=device).split([ranks * n for n in self.parts])
        self.gathered = [whole.view(ranks, -1) for whole in wholes]
        self.read = [whole[: one.ds_numel].view(one.ds_shape) for whole, one in zip(wholes, self.trained, strict=True)]

    @torch.no_grad()
    def renew(self) -> None:
        """Trained ones from their partitions, in one collective; frozen ones where somebody has partitioned them."""
        missing = [one for one in self.frozen if one.ds_status is not _available()]
        if missing:
            missing[0].all_gather_coalesced(missing).wait()
        if not self.trained:
            return
        own = torch.cat([one.ds_tensor for one in self.trained])
        rows = own.new_empty(distributed.world_size(), own.numel())
        dist.all_gather_into_tensor(rows.view(-1), own)
        torch.split_with_sizes_copy(rows, self.parts, dim=1, out=self.gathered)
        for one, whole in zip(self.trained, self.read, strict=True):
            one.data = whole
            one.ds_status = _available()


class _Others:
    """As much of a module as DeepSpeed's ``release_and_reset_all`` asks for."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    def named_parameters(self, recurse: bool) -> Iterator[tuple[str, Any]]:
        return (("", one) for one in self.parameters)

    def ds_external_parameters(self) -> tuple[()]:
        return ()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _any_learns(values: Any) -> bool:
    return any(torch.is_tensor(one) and one.requires_grad for one in values)


def _are_whole(parameters: list[Any]) -> bool:
    available = _available()
    return all(one.ds_status is available for one in parameters)


def _available() -> Any:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return ZeroParamStatus.AVAILABLE


def _not_available() -> Any:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return ZeroParamStatus.NOT_AVAILABLE
