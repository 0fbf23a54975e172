"""The distributed optimizer: a user's torch optimizer, working on this rank's share of the parameters.

ZeRO stage 1 (https://arxiv.org/abs/1910.02054) in the shape of Megatron-LM's distributed optimizer: gradients are
reduce-scattered over data-parallel ranks, each rank updates fp32 main copies of its share, and the new values are
gathered. The optimizer object, its hyper-parameters and whatever schedules them stay the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffers.allgather import ParamGather
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.bucket_plan import default_bucket_size
from lightning_megatron.optim.buffers.buffer import FlatBuffer, Slot
from lightning_megatron.optim.buffers.edits import refuse_replaced, take_edited_grads, take_written_values
from lightning_megatron.optim.buffers.main_values import MainValues
from lightning_megatron.optim.buffers.overlap import GradReducer
from lightning_megatron.optim.buffers.unreached import OtherRanks
from lightning_megatron.optim.clip import any_nonfinite, counts_here, global_norm
from lightning_megatron.optim.held_state import HeldState
from lightning_megatron.optim.optimizer_state import pieces_of
from lightning_megatron.optim.param_groups import assign
from lightning_megatron.optim.reach import Reach, Vouched, has_modes, reach_of
from lightning_megatron.optim.stepping_groups import SteppingGroups
from lightning_megatron.params import ParamSpec


class ShardedOptimizer(HeldState):
    """Lets a torch optimizer step on flat main parameters and keeps them and the model's parameters together.

    A training step, by whoever owns the loop::

        zero.zero_grads()                     # the window of accumulation begins
        ...backward of all micro-batches but the last...
        with zero.last_backward():            # buckets are sent while this one runs
            loss.backward()
        zero.finish_grad_sync()               # mean gradients are now `.grad` of the main parameters
        zero.clip_by_norm(1.0)
        optimizer.step()                      # parameters begin to be gathered; modules of the next forward wait

    Between steps the optimizer's groups hold the user's parameters, and ``param.grad`` means what it does in plain
    torch: a parameter whose gradient is ``None`` (no backward reached it, it is frozen, or somebody cleared it) is left
    alone by the step. With several data-parallel ranks it is left alone if no rank has a gradient for it, see
    :class:`~lightning_megatron.optim.buffers.unreached.OtherRanks`.

    Parameters that begin to need a gradient, and groups that are added, join at the next step.

    Attributes:
        optimizer: the user's.
        buffers: flat parameters and gradients by kind.
        is_flat: whether main parameters are flat shares of buckets; else each has the shape of its parameter.
        grad_factor: what :meth:`finish_grad_sync` multiplies gradients with, for a loss whose denominator is known only
            after the last forward (a number of tokens); ``None`` for nothing. Forgotten where a window begins.
        compare_values: whether a step looks for values that somebody wrote through ``param.data``, which costs some
            passes over them; other writes are seen at no cost.

    Args:
        optimizer: a torch optimizer without state, over parameters of the model: any where each rank updates whole
            parameters, else an element-wise one.
        named_params: global name, parameter and spec of every parameter of the model (``params.named_specs``).
            Parameters in no group, and those that need no gradient, are left alone.
        mesh: of this rank; gradients are averaged over ``mesh.dp_cp``, and replicas of an expert are the ranks of
            ``mesh.edp``.
        shard: whether each of the ranks that share a parameter's gradient updates one share of it, or all.
        main_dtype: dtype of main parameters (fp32 for mixed precision); ``None`` updates parameters in their own. Where
            it is the dtype of the parameters, main parameters are views of them and take no memory.
        grad_dtype: gradients are accumulated in this dtype, or in the parameters' own where that is wider.
        reduce_dtype: gradients are summed over ranks in this dtype; ``None`` means ``grad_dtype``.
        overlap_grad_reduce: send gradients while the last backward is running.
        overlap_param_gather: gather parameters while the next forward is running; needs :meth:`install_gather_hooks`.
        bucket_size: elements sent at once; ``None`` means Megatron-LM's ``max(40e6, 1e6 x ranks)``.
        hold: names of parameters whose gradients are changed between backward and :meth:`finish_grad_sync` (tied over
            pipeline stages): they are not sent before.
        alias_grads: whether ``param.grad`` is a view of the flat gradient; ``None`` asks torch what it can.
        leave_grads: where it is not: leave gradients in ``param.grad``, added up in the parameter's dtype, until the
            step, so that the user can clear and replace them.
        elementwise: optimizers, beside those that are known, whose update of an element looks at that element alone.

    Raises:
        ConfigError: for an optimizer that looks further than to what a rank holds, that has taken steps, or whose
            groups do not match the model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_params: Iterable[tuple[str, nn.Parameter, ParamSpec]],
        mesh: ParallelMesh,
        *,
        shard: bool = True,
        main_dtype: torch.dtype | None = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype | None = None,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        bucket_size: int | None = None,
        hold: Collection[str] = (),
        alias_grads: bool | None = None,
        leave_grads: bool = False,
        elementwise: Sequence[Vouched] = (),
    ) -> None:
        # One that swaps values in train() and eval() finds its state at the parameters themselves.
        super().__init__(optimizer, reach_of(optimizer, elementwise) is Reach.ELEMENT and not has_modes(optimizer))
        self._mesh = mesh
        self._device = mesh.rng.device
        self.grad_factor: Tensor | None = None
        self.compare_values = False
        self._named = list(named_params)
        self._assign = partial(
            assign, mesh=mesh, hold=frozenset(hold), shard=shard, main_dtype=main_dtype, elementwise=elementwise
        )
        self._main_dtype = main_dtype
        self._make_buffer = partial(
            FlatBuffer,
            grad_dtype=grad_dtype,
            shard=shard,
            mean_over=mesh.dp_cp.size,
            alias_grads=alias_grads,
            leave_grads=leave_grads,
        )
        self._bucket_size = bucket_size
        self._known: set[int] = set()
        self._model: nn.Module | None = None
        self.buffers: list[FlatBuffer] = []
        self._reducer = GradReducer(mesh.tp, dtype=reduce_dtype, overlap=overlap_grad_reduce)
        self._gather = ParamGather(overlap=overlap_param_gather)
        self._others = OtherRanks()
        self._take_in()
        self._groups = SteppingGroups(optimizer, self._mains_by_group, self._before_step, self.start_param_gather)

    def take_in_newcomers(self) -> None:
        """Let parameters join that began to need a gradient, or came with a group that was added, in mid-run."""
        groups = self.optimizer.param_groups
        if any(p.requires_grad and id(p) not in self._known for group in groups for p in group["params"]):
            self._take_in()

    def _take_in(self) -> None:
        """Lay out the parameters that need a gradient and are in no buffer yet."""
        owned = self._assign(self.optimizer, self._named, known_already=self._known)
        axes = {key: self._mesh.edp if key.expert else self._mesh.dp_cp for key in owned}
        sizes = {key: self._bucket_size or default_bucket_size(axis.size) for key, axis in axes.items()}
        buffers = [self._make_buffer(key, params, axes[key], bucket_size=sizes[key]) for key, params in owned.items()]
        buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
        # Backward completes a bucket when it reaches the earliest parameter in it; forward needs it from there on.
        buckets.sort(key=lambda bucket: -min(slot.owned.order for slot in bucket.slots))
        self.buffers += buffers
        mains = {bucket: MainValues(bucket, self._main_dtype, whole=not self.is_flat) for bucket in buckets}
        self._mains |= mains
        self._known |= {id(slot.owned.param) for bucket in buckets for slot in bucket.slots}
        self._move_state(mains)
        self._reducer.add(buckets)
        self._gather.add(buckets[::-1])
        if self._model is not None:
            self._gather.install(self._model)

    def _slots(self) -> Iterator[tuple[Bucket, Slot]]:
        return ((bucket, slot) for bucket in self._mains for slot in bucket.slots)

    # Gradients

    @property
    def sync(self) -> bool:
        """True if the backward that runs now is the last of the step for the parameters that it reaches."""
        return self._reducer.sync

    @sync.setter
    def sync(self, last: bool) -> None:
        self._reducer.sync = last

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """The backward inside is the last of the step for the parameters it reaches: their buckets may be sent."""
        self.sync = True
        try:
            yield
        finally:
            self.sync = False

    @property
    def grads_are_complete(self) -> bool:
        """True if :meth:`finish_grad_sync` has run since gradients were last cleared or added to."""
        return self._reducer.complete

    def zero_grads(self) -> None:
        """Begin a window of accumulation: all gradients are zero, which ``param.grad`` says as ``None``."""
        self._reducer.reset()
        self.grad_factor = None
        for main in self._mains.values():
            for part in main.parts:
                part.param.grad = None
        for _, slot in self._slots():
            slot.begin()

    def reopen(self) -> None:
        """Before a backward whose gradients are to be added to what has not been cleared; once a batch at most."""
        self._reducer.reopen()

    @property
    def shows_grads(self) -> bool:
        """True if ``param.grad`` is the accumulated gradient; otherwise it is ``None`` between backwards."""
        return all(slot.aliased or slot.left_alone for _, slot in self._slots())

    @property
    def slots(self) -> list[Slot]:
        """The places of all parameters."""
        return [slot for _, slot in self._slots()]

    def main_grad(self, name: str) -> Tensor:
        """The accumulated gradient of a parameter, in its shape: complete before, own share only after the sync."""
        slot = next(slot for _, slot in self._slots() if slot.owned.name == name)
        slot.attach()
        return slot.grad

    def finish_grad_sync(self) -> None:
        """Complete the reduction; the mean gradient of each main parameter becomes its ``.grad``.

        Raises:
            RuntimeError: for a gradient that was replaced where it has to be averaged first.
        """
        self.take_in_newcomers()
        for bucket, slot in self._slots():
            shared = bucket.axis.size > 1
            if shared and slot.is_replaced:
                refuse_replaced(slot)
            slot.settle(sent=shared and bucket.reduce_started)
        self._reducer.complete = True
        if any(slot.filled or bucket.axis.size > 1 for bucket, slot in self._slots()):
            self._reducer.finish()
            self._others.ask(self._mains.values())
        for main in self._mains.values():
            main.take_grads(self.optimizer, lambda slot: slot.filled)
        if self.grad_factor is not None:
            self.scale_grads(self.grad_factor)

    def _take_edited_grads(self) -> None:
        """Heed gradients that a hook has replaced or set to ``None`` since they were complete."""
        for main in self._mains.values():
            take_edited_grads(main, self.optimizer)

    def gradients_of(self, wanted: Callable[[ParamSpec], bool]) -> list[tuple[str, Tensor]]:
        """Mean gradients ``[n]`` of ranges that this rank holds, with names; zeros where no backward has run.

        Args:
            wanted: whether a parameter of a spec is.
        """
        found: list[tuple[str, Tensor]] = []
        parts = ((main, part) for main in self._mains.values() for part in main.parts)
        for main, part in parts:
            grad = torch.zeros_like(part.param) if part.param.grad is None else part.param.grad
            pieces = pieces_of(main, part, {"grad": grad}, {})
            found += [(piece.piece.name, piece.state["grad"]) for piece in pieces if wanted(piece.piece.spec)]
        return found

    def _grads(self) -> list[Tensor]:
        return [main.grad for main in self.main_params if main.grad is not None]

    def on_local_grads(self, look: Callable[[Bucket], None]) -> None:
        """Have every bucket looked at when its gradients are complete and still this rank's own; maybe twice."""
        self._reducer.look = look

    def look_at_held(self) -> None:
        """Before other pipeline stages' gradients are added to those of tied parameters."""
        self._reducer.look_at_late()

    def stepped(self) -> Iterator[tuple[Bucket, nn.Parameter, int]]:
        """The tensors the optimizer updates: main parameters, their bucket, and the place of their first element."""
        for bucket, main in self._mains.items():
            yield from ((bucket, part.param, bucket.own_start + part.start) for part in main.parts)

    def grad_norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, each element counted once: fp32 scalar, equal on all ranks."""
        self._take_edited_grads()
        mains = (main for bucket, main in self._mains.items() if counts_here(bucket, self._mesh))
        counted = [part.param.grad for main in mains for part in main.parts if part.param.grad is not None]
        return global_norm(counted, self._mesh.world, self._device, self.norm_dtype)

    @property
    def norm_dtype(self) -> torch.dtype:
        """Dtype of norms, the same on all ranks."""
        is_double = any(buffer.grads.dtype == torch.float64 for buffer in self.buffers)
        return torch.float64 if is_double else torch.float32

    def counted_grads(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank counts of gradients in a sum over all ranks, parameter by parameter with their names."""
        for bucket, main in self._mains.items():
            if counts_here(bucket, self._mesh):
                yield from main.grad_pieces()

    def clip_by_norm(self, max_norm: float) -> Tensor:
        """Scale gradients so that their norm is at most ``max_norm``; as ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping.
        """
        norm = self.grad_norm()
        self.scale_grads(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def clip_by_value(self, limit: float) -> None:
        """Clamp every element of the gradient to ``[-limit, limit]``."""
        self._take_edited_grads()
        for grad in self._grads():
            grad.clamp_(-limit, limit)

    def scale_grads(self, factor: float | Tensor) -> None:
        """Multiply all gradients (``1 / loss_scale`` undoes a loss scale)."""
        for grad in self._grads():
            grad.mul_(factor)
        for buffer in self.buffers:
            buffer.clear_gaps()

    def found_inf(self) -> bool:
        """True if any rank's gradient has an infinity or a NaN; agreed by all ranks."""
        return any_nonfinite(self._grads(), self._mesh.world, self._device)

    # Parameters

    def install_gather_hooks(self, model: nn.Module) -> None:
        """Let the modules of ``model`` wait for their parameters; without it :meth:`start_param_gather` waits."""
        self._model = model
        self._gather.install(model)

    def _before_step(self) -> None:
        if self.grads_are_complete:
            self._take_edited_grads()
        else:
            self.finish_grad_sync()
        self.take_written_values()

    def recover(self) -> None:
        """Put the user's parameters back into the groups after a step that raised an exception."""
        self._groups.recover()

    def start_param_gather(self) -> None:
        """After a step: main values into the parameters, and everybody's shares to everybody."""
        for main in self._mains.values():
            main.to_params()
        self._gather.start()

    def finish_uncalled_gather(self) -> None:
        """Wait for what no hook waits for: parameters that are read without a call of the module that owns them."""
        self._gather.finish_uncalled()

    def finish_param_gather(self) -> None:
        """Wait until all parameters have their new values (before they are saved, compared or used otherwise)."""
        self._gather.finish()

    def main_values(self) -> dict[nn.Parameter, Tensor]:
        """Main values of whole parameters, on the host; all ranks call this, and gather one bucket at a time."""
        found = (pair for main in self._mains.values() for pair in main.values())
        return {slot.owned.param: value.detach().cpu().clone() for slot, value in found}

    def take_written_values(self) -> None:
        """Heed values that somebody has written into parameters since the last step: before they are used or saved."""
        for main in self._mains.values():
            take_written_values(main, everywhere=self.compare_values)

    def refresh_params(self) -> None:
        """Parameters from main values, on all ranks: after optimizer state was loaded."""
        for main in self._mains.values():
            main.unite(self.optimizer)
        self.start_param_gather()
        self.finish_param_gather()

    def refresh_main(self) -> None:
        """Main values from parameters: after weights were loaded."""
        self.finish_param_gather()
        for main in self._mains.values():
            main.from_params()

    def close(self) -> None:
        """Take everything apart: hooks removed, parameters in storage of their own and back in the groups.

        The optimizer's state, which belonged to the shards, is gone.
        """
        self._groups.close()
        self._reducer.close()
        self._gather.close()
        self.take_written_values()
        for _, slot in self._slots():
            slot.release()
        self.optimizer.state.clear()
        self._mains.clear()
        self.buffers.clear()
        self._named.clear()
        self._known.clear()
        self._model = None
