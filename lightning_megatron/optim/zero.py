"""The distributed optimizer: a user's torch optimizer on this rank's share of the parameters.

ZeRO stage 1 (https://arxiv.org/abs/1910.02054) in the shape of Megatron-LM's distributed optimizer: gradients are
reduce-scattered over data-parallel ranks, each rank updates fp32 main copies of its share, and the new values are
gathered. The optimizer object, its hyper-parameters and their schedulers stay the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.buffer import FlatBuffer
from lightning_megatron.optim.buffers.edits import copy_edited_grads, copy_written_values, raise_replaced_grad
from lightning_megatron.optim.buffers.main_values import MainValues
from lightning_megatron.optim.buffers.overlap import GradReducer, ParamGather
from lightning_megatron.optim.buffers.slot import Slot
from lightning_megatron.optim.buffers.unused_params import UnusedParams
from lightning_megatron.optim.clip import any_nonfinite, counts_here, global_norm
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.core.update_scope import UpdateScope, has_train_eval_modes, update_scope
from lightning_megatron.optim.main_param_groups import MainParamGroups
from lightning_megatron.optim.optimizer_state import shards_of
from lightning_megatron.optim.param_groups import assign
from lightning_megatron.optim.sharded_state import ShardedState
from lightning_megatron.params import ParamSpec
from lightning_megatron.weight_grad_store import GradPlace


class ShardedOptimizer(ShardedState):
    """Lets a torch optimizer step on flat main parameters, and keeps the model's parameters equal to them.

    A training step::

        zero.zero_grads()                     # gradient accumulation begins
        ...backward of all micro-batches but the last...
        zero.declare_last()                   # buckets are sent while the coming backward runs
        loss.backward()
        zero.finish_grad_sync()               # mean gradients are now `.grad` of the main parameters
        zero.clip_by_norm(1.0)
        optimizer.step()                      # parameters begin to be gathered; modules of the next forward wait

    Between steps the optimizer's groups and state have the user's parameters, and ``param.grad`` has its meaning in
    plain torch: a parameter whose gradient is ``None`` (no backward reached it, it is frozen, or the user cleared it)
    is skipped by the step. With several data-parallel ranks it is skipped if no rank has a gradient for it, see
    :class:`~lightning_megatron.optim.buffers.unused_params.UnusedParams`.

    Parameters that are unfrozen, and groups that are added, join at the next step.

    Attributes:
        buffers: flat parameters and gradients, one buffer for each kind of parameter.
        grad_factor: factor on the gradients in :meth:`finish_grad_sync`, for a loss whose denominator is known only
            after the last forward (a number of tokens); ``None`` for no factor. Reset at the start of an accumulation.
        compare_values: True if a step searches for values written in place through ``param.data``, which costs some
            passes over them; other writes are detected for free.
        grads_are_unscaled: True if the caller has taken a loss scale from the complete gradients; it sets this itself.

    Args:
        optimizer: a torch optimizer without state, over parameters of the model. It must be element-wise unless each
            rank updates whole parameters.
        named_params: global name, parameter and spec of every parameter of the model (``params.named_specs``).
            Parameters in no group, and those that need no gradient, are left alone.
        mesh: this rank's mesh; gradients are averaged over ``mesh.dp_cp``, and replicas of an expert are the ranks of
            ``mesh.edp``.
        config: the switches.
        reduce_late: names of parameters whose gradients change between backward and :meth:`finish_grad_sync` (tied over
            pipeline stages): they are sent only then.

    Raises:
        ConfigError: for an optimizer that reads values of other ranks, that has taken steps, or whose groups do not
            match the model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_params: Iterable[tuple[str, nn.Parameter, ParamSpec]],
        mesh: ParallelMesh,
        config: DistributedOptimizerConfig | None = None,
        reduce_late: Collection[str] = (),
    ) -> None:
        config = config or DistributedOptimizerConfig()
        is_elementwise = update_scope(optimizer, config.elementwise) is UpdateScope.ELEMENT
        # An optimizer with train() and eval() looks up its state by the model's parameters.
        super().__init__(optimizer, is_elementwise and not has_train_eval_modes(optimizer))
        self._mesh, self._config = mesh, config
        self._device = mesh.rng.device
        self.grad_factor: Tensor | None = None
        self.compare_values = self.grads_are_unscaled = False
        self._named = list(named_params)
        self._reduce_late = frozenset(reduce_late)
        self._assigned: set[int] = set()
        self._model: nn.Module | None = None
        self.buffers: list[FlatBuffer] = []
        self._slots: list[tuple[Bucket, Slot]] = []
        self._places: dict[int, Callable[[], GradPlace | None]] = {}
        self._reducer = GradReducer(mesh.tp, dtype=config.reduce_dtype, overlap=config.overlap_grad_reduce)
        self._gather = ParamGather(overlap=config.overlap_param_gather)
        self._unused = UnusedParams()
        self._add_params()
        self._groups = MainParamGroups(
            optimizer, self._states, self._mains_by_group, self._before_step, self.start_param_gather, self._has_copies
        )

    def add_new_params(self) -> None:
        """Add parameters that were unfrozen, or belong to a group that was added, since the last call."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and id(param) not in self._assigned:
                    self._add_params()
                    return

    def holds(self, param: Tensor) -> bool:
        """True for a parameter that it updates."""
        return id(param) in self._assigned

    def _add_params(self) -> None:
        """Lay out the parameters that need a gradient and are in no buffer yet."""
        owned = assign(self.optimizer, self._named, self._mesh, self._config, self._reduce_late, self._assigned)
        buffers = []
        for key, params in owned.items():
            axis = self._mesh.edp if key.expert else self._mesh.dp_cp
            buffers.append(FlatBuffer(key, params, axis, self._config, mean_over=self._mesh.dp_cp.size))
        buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
        # Backward completes a bucket when it reaches the earliest parameter in it; forward needs it from there on.
        buckets.sort(key=lambda bucket: -min(slot.owned.order for slot in bucket.slots))
        self.buffers += buffers
        mains = {bucket: MainValues(bucket, self._config.main_dtype, whole=not self.is_flat) for bucket in buckets}
        self._mains |= mains
        self._add_slots([(bucket, slot) for bucket in mains for slot in bucket.slots])
        self._move_state(mains)
        self._reducer.add(buckets)
        self._gather.add(buckets[::-1])
        if self._model is not None:
            self._gather.install(self._model)

    def _add_slots(self, added: list[tuple[Bucket, Slot]]) -> None:
        self._slots += added
        self._places |= {id(slot.owned.param): partial(self._reducer.place, bucket, slot) for bucket, slot in added}
        self._assigned |= {id(slot.owned.param) for _, slot in added}
        self._shows_grads = all(slot.aliased or slot.keeps_param_grad for _, slot in self._slots)
        self._only_copies = not any(main.is_view for main in self._mains.values())

    def _has_copies(self) -> bool:
        """True if all main values have their own dtype; then no plain torch run exists to match bit for bit."""
        return self._only_copies

    def group_names(self) -> list[list[str]]:
        """Global names of the parameters in each of the user's groups, in the user's order; frozen ones too."""
        names = {id(param): name for name, param, _ in self._named}
        return [[names[id(p)] for p in group["params"] if id(p) in names] for group in self.optimizer.param_groups]

    @property
    def trained_names(self) -> set[str]:
        """Global names of the parameters that it updates."""
        return {slot.owned.name for slot in self.slots}

    @property
    def is_in_order(self) -> bool:
        """True if each group lists its parameters in their order of definition."""
        place = {name: number for number, (name, _, _) in enumerate(self._named)}
        return all(group == sorted(group, key=place.__getitem__) for group in self.group_names())

    # Gradients

    def declare_last(self, last: bool = True) -> None:
        """Declare that the coming backward is the last of the step for the parameters that it reaches.

        Args:
            last: False if it is not the last, or is over: then no bucket is sent during a backward.
        """
        self._reducer.is_last_backward = last

    def hook_last(self, has_others: Callable[[Tensor], bool]) -> None:
        """Let other hooks of parameters, where a function finds some, run before the gradients are sent."""
        self._reducer.hook_last(has_others)

    @property
    def grads_are_complete(self) -> bool:
        """True if :meth:`finish_grad_sync` has run since gradients were last cleared or added to."""
        return self._reducer.complete

    def places(self) -> dict[int, Callable[[], GradPlace | None]]:
        """For each parameter, by ``id``, a function that returns the place of its gradient during a backward."""
        return self._places

    def zero_grads(self) -> None:
        """Begin gradient accumulation: all gradients are zero, and ``param.grad`` is ``None``."""
        self._reducer.reset()
        self.grad_factor = None
        for main in self._mains.values():
            for part in main.parts:
                part.param.grad = None
        for _, slot in self._slots:
            slot.clear()

    def continue_accumulation(self) -> None:
        """Allow gradients to be added to those not cleared; call it at most once per batch, before its backward."""
        self._reducer.continue_accumulation()

    @property
    def shows_grads(self) -> bool:
        """True if ``param.grad`` is the accumulated gradient; otherwise it is ``None`` between backwards."""
        return self._shows_grads

    @property
    def is_trained(self) -> bool:
        """True if any of its parameters needs a gradient now."""
        return any(slot.owned.param.requires_grad for _, slot in self._slots)

    @property
    def slots(self) -> list[Slot]:
        """The slots of all parameters."""
        return [slot for _, slot in self._slots]

    def main_grad(self, name: str) -> Tensor:
        """The accumulated gradient of a parameter, in its shape; after the reduction only the own share is valid."""
        slot = next(slot for _, slot in self._slots if slot.owned.name == name)
        slot.attach()
        return slot.grad

    def finish_grad_sync(self) -> None:
        """Complete the reduction; the mean gradient of each main parameter becomes its ``.grad``.

        Raises:
            RuntimeError: for a gradient that was replaced where it has to be averaged first.
        """
        self.add_new_params()
        is_any = is_any_shared = False
        for bucket, slot in self._slots:
            shared = bucket.axis.size > 1
            if shared and slot.is_replaced:
                raise_replaced_grad(slot)
            slot.write_to_buffer(sent=shared and bucket.reduce_started)
            is_any, is_any_shared = is_any or shared or slot.has_grad, is_any_shared or shared
        self._reducer.complete, self.grads_are_unscaled = True, False
        if is_any:
            self._reducer.finish()
        if is_any_shared:
            self._unused.find_remote_grads(self._mains.values())
        for main in self._mains.values():
            main.assign_grads(self.state)
        if self.grad_factor is not None:
            self.scale_grads(self.grad_factor)

    def show_mean_grads(self) -> None:
        """Let every ``param.grad`` be the mean over all data-parallel ranks, as under DDP; all ranks call this.

        After :meth:`finish_grad_sync`. Hooks may then edit or replace it, on all ranks alike, until the step.
        """
        self._copy_edited_grads()
        for bucket in self._mains:
            bucket.show_grads()

    def _copy_edited_grads(self) -> None:
        """Copy gradients that a hook has replaced or set to ``None`` after the reduction."""
        if [slot for _, slot in self._slots if slot.is_edited]:
            for main in self._mains.values():
                copy_edited_grads(main, self.state)

    def gradients_of(self, wanted: Callable[[ParamSpec], bool]) -> list[tuple[str, Tensor]]:
        """Name and mean gradient ``[n]`` of every range that this rank holds; zeros where no backward has run.

        Args:
            wanted: predicate on a parameter's spec that selects it.
        """
        found: list[tuple[str, Tensor]] = []
        for main in self._mains.values():
            grads = {part.start: grad for part, grad in main.grads()}
            for part in main.parts:
                grad = grads.get(part.start)
                shards = shards_of(main, part, {"grad": torch.zeros_like(part.param) if grad is None else grad}, {})
                found += [(shard.name, shard.state["grad"]) for shard in shards if wanted(shard.spec)]
        return found

    def _grads(self) -> list[Tensor]:
        return [grad for main in self._mains.values() for _, grad in main.grads()]

    def on_local_grads(self, inspect: Callable[[Bucket], None]) -> None:
        """Register a function to call with each bucket when its local gradients are complete, before they are reduced.

        It may be called twice for a bucket.
        """
        self._reducer.inspect = inspect

    def inspect_late_grads(self) -> None:
        """Inspect gradients of tied parameters before those of other pipeline stages are added."""
        self._reducer.inspect_late()

    def updated_tensors(self) -> Iterator[tuple[Bucket, nn.Parameter, int]]:
        """The main parameters that the optimizer updates: bucket, tensor, and the index of its first element."""
        for bucket, main in self._mains.items():
            for part in main.parts:
                yield bucket, part.param, bucket.own_start + part.start

    def grad_norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, each element counted once: equal on all ranks, of ``norm_dtype``."""
        self._copy_edited_grads()
        mains = (main for bucket, main in self._mains.items() if counts_here(bucket, self._mesh))
        counted = [grad for main in mains for _, grad in main.grads()]
        return global_norm(counted, self._mesh.world, self._device, self.norm_dtype)

    @property
    def norm_dtype(self) -> torch.dtype:
        """Dtype of norms, the same on all ranks."""
        is_double = any(buffer.grads.dtype == torch.float64 for buffer in self.buffers)
        return torch.float64 if is_double else torch.float32

    def counted_grads(self) -> Iterator[tuple[str, Tensor]]:
        """Name and gradient of every parameter that this rank counts in a sum over all ranks."""
        for bucket, main in self._mains.items():
            if counts_here(bucket, self._mesh):
                yield from main.named_grads()

    def clip_by_norm(self, max_norm: float) -> Tensor:
        """Scale gradients so that their norm is at most ``max_norm``, like ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping.
        """
        norm = self.grad_norm()
        self.scale_grads(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def clip_by_value(self, limit: float) -> None:
        """Clamp every element of the gradient to ``[-limit, limit]``."""
        self._copy_edited_grads()
        for grad in self._grads():
            grad.clamp_(-limit, limit)

    def scale_grads(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor (``1 / loss_scale`` removes a loss scale)."""
        for grad in self._grads():
            grad.mul_(factor)
        for buffer in self.buffers:
            buffer.clear_gaps()

    def found_inf(self) -> bool:
        """True if any rank's gradient has an infinity or a NaN; equal on all ranks."""
        self._copy_edited_grads()
        return any_nonfinite(self._grads(), self._mesh.world, self._device)

    # Parameters

    def install_gather_hooks(self, model: nn.Module) -> None:
        """Make the modules of ``model`` wait for their parameters; without it :meth:`start_param_gather` waits."""
        self._model = model
        self._gather.install(model)

    def _before_step(self) -> None:
        if self.grads_are_complete:
            self._copy_edited_grads()
        else:
            self.finish_grad_sync()
        for main in self._mains.values():
            main.convert_grads()
        self.copy_written_values()

    def recover(self) -> None:
        """Put the user's parameters back into the groups after a step that raised an exception."""
        self._groups.recover()

    def start_param_gather(self) -> None:
        """Copy main values into the parameters and begin to gather the shares of all ranks; after a step."""
        for main in self._mains.values():
            main.drop_converted()
            if not main.is_view:
                main.to_params()
        self._gather.start()

    def finish_param_gather(self) -> None:
        """Wait until all parameters have their new values, before they are saved, compared or otherwise used."""
        self._gather.finish()

    def main_values(self) -> dict[int, Tensor]:
        """Main values of whole parameters by ``id``, on the host; all ranks call this: it gathers bucket by bucket."""
        found = (pair for main in self._mains.values() for pair in main.values())
        return {id(slot.owned.param): value.detach().cpu().clone() for slot, value in found}

    @property
    def rounded(self) -> list[MainValues]:
        """Main values that parameters hold in fewer bits."""
        return [main for main in self._mains.values() if not main.is_view]

    def copy_written_values(self) -> None:
        """Copy values that the user has written into parameters since the last step, before they are used or saved."""
        self._before_write()
        for main in self._mains.values():
            copy_written_values(main, everywhere=self.compare_values)

    def refresh_params(self) -> None:
        """Set parameters from main values, on all ranks; after optimizer state was loaded."""
        for main in self._mains.values():
            main.undo_split_all(self.state)
        self.start_param_gather()
        self.finish_param_gather()

    def refresh_main(self) -> None:
        """Set main values from parameters; after weights were loaded."""
        self._before_write()
        self.finish_param_gather()
        for main in self._mains.values():
            main.from_params()

    def close(self) -> None:
        """Remove hooks and give parameters storage of their own, back in the optimizer's groups.

        The optimizer's state, which belonged to the shards, is dropped.
        """
        self._groups.close()
        self._reducer.close()
        self._gather.close()
        self.copy_written_values()
        for _, slot in self._slots:
            slot.release()
        self.state.clear()
        self._mains.clear()
        self._slots.clear()
        self._places.clear()
        self.buffers.clear()
        self._named.clear()
        self._assigned.clear()
        self._model = None
