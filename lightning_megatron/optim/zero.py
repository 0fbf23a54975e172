"""The distributed optimizer: a user's torch optimizer, working on this rank's share of the parameters.

ZeRO stage 1 (https://arxiv.org/abs/1910.02054) in the shape of Megatron-LM's distributed optimizer: gradients are
reduce-scattered over data-parallel ranks, each rank updates fp32 main copies of its share, and the new values are
gathered. The optimizer object, its hyper-parameters and whatever schedules them stay the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffer import FlatBuffer, Slot
from lightning_megatron.optim.clip import any_nonfinite, counts_here, global_norm
from lightning_megatron.optim.gather import ParamGather
from lightning_megatron.optim.groups import assign
from lightning_megatron.optim.main import MainParam, main_params_of
from lightning_megatron.optim.plan import default_bucket_size
from lightning_megatron.optim.reach import Reach, Vouched, reach_of
from lightning_megatron.optim.reduce import GradReducer
from lightning_megatron.optim.state import STEP, PieceState, allocate_state, load_piece, pieces_of, state_like
from lightning_megatron.params import FlatPiece, ParamSpec

_KERNELS = frozenset({"foreach", "fused", "capturable"})
"""Settings of torch's optimizers that say how, and not what, is computed."""


class ShardedOptimizer:
    """Puts flat main parameters into a torch optimizer's groups and keeps them and the model's parameters together.

    A training step, by whoever owns the loop::

        zero.zero_grads()                     # the window of accumulation begins
        ...backward of all micro-batches but the last...
        with zero.last_backward():            # buckets are sent while this one runs
            loss.backward()
        zero.finish_grad_sync()               # mean gradients are now `.grad` of the main parameters
        zero.clip_by_norm(1.0)
        optimizer.step()
        zero.start_param_gather()             # waited for by the modules of the next forward

    A parameter that no backward of the step reached has a zero gradient, not ``None``: it is decayed and its moments
    fade, where plain torch would leave it alone. It must be so: another rank may have reached it. Only where there is
    no other rank and no backward has run at all (a user skipped the batch), gradients stay ``None``.

    Attributes:
        optimizer: the user's. ``param_groups[i]["params"]`` are main parameters; all else in the groups is untouched.
        buffers: flat parameters and gradients by kind.
        is_flat: whether main parameters are flat shares of buckets; else each has the shape of its parameter.
        grads_are_complete: whether :meth:`finish_grad_sync` has run in this window of accumulation.
        grad_factor: what :meth:`finish_grad_sync` multiplies gradients with, for a loss whose denominator is known only
            after the last forward (a number of tokens); ``None`` for nothing. Forgotten where a window begins.

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
        elementwise: Sequence[Vouched] = (),
    ) -> None:
        self.optimizer = optimizer
        self._mesh = mesh
        self._device = mesh.rng.device
        self.grads_are_complete = False
        self.grad_factor: Tensor | None = None
        self._user_params: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        owned = assign(optimizer, named_params, mesh, hold, shard=shard, main_dtype=main_dtype, elementwise=elementwise)
        self.is_flat = reach_of(optimizer, elementwise) is Reach.ELEMENT
        self.buffers = [
            FlatBuffer(
                key,
                params,
                mesh.edp if key.expert else mesh.dp_cp,
                grad_dtype=grad_dtype,
                bucket_size=bucket_size or default_bucket_size((mesh.edp if key.expert else mesh.dp_cp).size),
                shard=shard,
                mean_over=mesh.dp_cp.size,
                alias_grads=alias_grads,
            )
            for key, params in owned.items()
        ]
        buckets = [bucket for buffer in self.buffers for bucket in buffer.buckets]
        # Backward completes a bucket when it reaches the earliest parameter in it; forward needs it from there on.
        buckets.sort(key=lambda bucket: -min(slot.owned.order for slot in bucket.slots))
        self._buckets = buckets
        self._mains = [main for bucket in buckets for main in main_params_of(bucket, main_dtype, flat=self.is_flat)]
        self._swap_groups()
        self._reducer = GradReducer(buckets, mesh.tp, dtype=reduce_dtype, overlap=overlap_grad_reduce)
        self._gather = ParamGather(buckets[::-1], overlap=overlap_param_gather)

    def _swap_groups(self) -> None:
        state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for group, mains, params in zip(
            self.optimizer.param_groups, self._mains_by_group(), self._user_params, strict=True
        ):
            group["params"] = [main.param for main in mains]
            # Some optimizers allocate when they are made (Adagrad): the same start, in the new shape.
            begun = next((p for p in params if state.get(p)), None)
            for main in mains:
                if main.owned is not None and state.get(main.owned.param):
                    self.optimizer.state[main.param] = state[main.owned.param]
                elif main.owned is None and begun is not None:
                    self.optimizer.state[main.param] = state_like(main.param, state[begun], begun)

    def _mains_by_group(self) -> list[list[MainParam]]:
        """The main parameters of each group; those of whole parameters in the user's order."""
        groups: list[list[MainParam]] = [[] for _ in self._user_params]
        for main in self._mains:
            groups[main.bucket.key.group].append(main)
        for mains, params in zip(groups, self._user_params, strict=True):
            place = {id(param): number for number, param in enumerate(params)}
            mains.sort(key=lambda main: 0 if main.owned is None else place[id(main.owned.param)])
        return groups

    @property
    def _slots(self) -> Iterator[Slot]:
        """All parameters, in the order in which backward completes them."""
        return (slot for bucket in self._buckets for slot in bucket.slots)

    # Gradients

    @property
    def sync(self) -> bool:
        """Whether the backward that runs now is the last of the step for the parameters that it reaches."""
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

    def zero_grads(self) -> None:
        """Begin a window of accumulation: all gradients are zero, which ``param.grad`` says as ``None``."""
        self._reducer.reset()
        self.grads_are_complete = False
        self.grad_factor = None
        for main in self._mains:
            main.param.grad = None
        for slot in self._slots:
            slot.begin()

    def main_grad(self, name: str) -> Tensor:
        """The accumulated gradient of a parameter, in its shape: complete before, own share only after the sync."""
        slot = next(slot for slot in self._slots if slot.owned.name == name)
        slot.attach()
        return slot.grad

    def finish_grad_sync(self) -> None:
        """Complete the reduction; the mean gradient of each main parameter becomes its ``.grad``."""
        self.grads_are_complete = True
        if not self._reducer.reached and all(bucket.axis.size == 1 for bucket in self._buckets):
            return
        self._reducer.finish()
        for main in self._mains:
            main.take_grad()
        if self.grad_factor is not None:
            self.scale_grads(self.grad_factor)

    @property
    def main_params(self) -> list[nn.Parameter]:
        """This rank's main parameters: one ``[n]`` for each bucket, or one for each parameter in its shape."""
        return [main.param for main in self._mains]

    def gradients_of(self, wanted: Callable[[ParamSpec], bool]) -> list[tuple[str, Tensor]]:
        """Mean gradients ``[n]`` of ranges that this rank holds, with names; zeros where no backward has run.

        Args:
            wanted: whether a parameter of a spec is.
        """
        found: list[tuple[str, Tensor]] = []
        for main in self._mains:
            grad = torch.zeros_like(main.param) if main.param.grad is None else main.param.grad
            pieces = pieces_of(main, {"grad": grad}, {})
            found += [(piece.piece.name, piece.state["grad"]) for piece in pieces if wanted(piece.piece.spec)]
        return found

    def _grads(self) -> list[Tensor]:
        return [main.grad for main in self.main_params if main.grad is not None]

    def grad_norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, each element counted once: fp32 scalar, equal on all ranks."""
        counted = [main.param.grad for main in self._mains if counts_here(main.bucket, self._mesh)]
        return global_norm(
            [grad for grad in counted if grad is not None], self._mesh.world, self._device, self.norm_dtype
        )

    @property
    def norm_dtype(self) -> torch.dtype:
        """Dtype of norms, the same on all ranks."""
        is_double = any(buffer.grads.dtype == torch.float64 for buffer in self.buffers)
        return torch.float64 if is_double else torch.float32

    def counted_grads(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank counts of gradients in a sum over all ranks, parameter by parameter with their names."""
        for main in self._mains:
            if counts_here(main.bucket, self._mesh):
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
        for grad in self._grads():
            grad.clamp_(-limit, limit)

    def scale_grads(self, factor: float | Tensor) -> None:
        """Multiply all gradients (``1 / loss_scale`` undoes a loss scale)."""
        for grad in self._grads():
            grad.mul_(factor)

    def found_inf(self) -> bool:
        """Whether any rank's gradient has an infinity or a NaN; agreed by all ranks."""
        return any_nonfinite(self._grads(), self._mesh.world, self._device)

    # Parameters

    def install_gather_hooks(self, model: nn.Module) -> None:
        """Let the modules of ``model`` wait for their parameters; without it :meth:`start_param_gather` waits."""
        self._gather.install(model)

    def start_param_gather(self) -> None:
        """After a step: main values into the parameters, and everybody's shares to everybody."""
        for main in self._mains:
            main.to_params()
        self._gather.start()

    def finish_uncalled_gather(self) -> None:
        """Wait for what no hook waits for: parameters that are read without a call of the module that owns them."""
        self._gather.finish_uncalled()

    def finish_param_gather(self) -> None:
        """Wait until all parameters have their new values (before they are saved, compared or used otherwise)."""
        self._gather.finish()

    def refresh_params(self) -> None:
        """Parameters from main values, on all ranks: after optimizer state was loaded."""
        self.start_param_gather()
        self.finish_param_gather()

    def refresh_main(self) -> None:
        """Main values from parameters: after weights were loaded."""
        self.finish_param_gather()
        for main in self._mains:
            main.from_params()

    # State

    def init_state(self) -> None:
        """Allocate an element-wise optimizer's state where it has none, so that a checkpoint can be loaded into it."""
        if self.is_flat:
            allocate_state(self.optimizer, [[main.param for main in group] for group in self._mains_by_group()])

    def pieces(self) -> list[PieceState]:
        """What this rank holds, parameter by parameter; views, so that copying into them loads a checkpoint.

        A parameter that is not sharded, or that is replicated over tp, appears on every rank that holds it.
        """
        return [piece for main in self._mains for piece in self._pieces_of(main)]

    def _pieces_of(self, main: MainParam) -> Iterator[PieceState]:
        state = self.optimizer.state.get(main.param, {}) if self.is_flat else {}
        return pieces_of(main, state, self.optimizer.param_groups[main.bucket.key.group])

    def load_piece_state(
        self,
        piece: FlatPiece,
        main: Tensor | None = None,
        state: Mapping[str, Tensor] | None = None,
        scalars: Mapping[str, Any] | None = None,
    ) -> None:
        """Fill one of :meth:`pieces` in place; call :meth:`init_state` before the first, :meth:`refresh_params` after.

        Raises:
            KeyError: if this rank does not hold the piece, or its optimizer does not keep a state of that name.
        """
        holding = (m for m in self._mains if any(slot.owned.name == piece.name for slot in m.bucket.slots))
        for owner in holding:
            for target in self._pieces_of(owner):
                if (target.piece.name, target.piece.start, target.piece.end) == (piece.name, piece.start, piece.end):
                    group = self.optimizer.param_groups[owner.bucket.key.group]
                    load_piece(target, self.optimizer.state[owner.param], group, main, state or {}, scalars or {})
                    return
        raise KeyError(f"no piece {piece.name}[{piece.start}:{piece.end}] on this rank")

    def whole_state(self) -> dict[str, dict[str, Any]]:
        """What an optimizer that is not element-wise keeps, by name of the parameter; it may have any form."""
        if self.is_flat:
            return {}
        state = self.optimizer.state_dict()["state"]
        return {name: dict(state.get(index, {})) for index, name in enumerate(self._names_in_groups())}

    def load_whole_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with what :meth:`whole_state` gave; call :meth:`load_group_settings` before."""
        if self.is_flat:
            return
        saved = self.optimizer.state_dict()
        saved["state"] = {i: state[name] for i, name in enumerate(self._names_in_groups()) if state.get(name)}
        self.optimizer.load_state_dict(saved)

    def _names_in_groups(self) -> list[str]:
        return [main.owned.name for group in self._mains_by_group() for main in group if main.owned is not None]

    def group_names(self) -> list[list[str]]:
        """Global names of the parameters in each of the user's groups, in order of definition."""
        names: list[list[tuple[int, str]]] = [[] for _ in self._user_params]
        for bucket in self._buckets:
            names[bucket.key.group] += [(slot.owned.order, slot.owned.name) for slot in bucket.slots]
        return [[name for _, name in sorted(group)] for group in names]

    def group_settings(self) -> list[dict[str, Any]]:
        """What each of the user's groups says besides its parameters: the learning rate and so on.

        Element-wise state has the step of a group with each parameter.
        """
        return [
            {name: value for name, value in group.items() if name != "params" and not (name == STEP and self.is_flat)}
            for group in self.optimizer.param_groups
        ]

    def load_group_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Set what :meth:`group_settings` gave, but for the choice of a kernel, which is today's."""
        for group, saved in zip(self.optimizer.param_groups, settings, strict=True):
            group.update({name: value for name, value in saved.items() if name not in _KERNELS})

    @property
    def state_bytes(self) -> int:
        """Bytes on this rank of optimizer state and of main values that are not the parameters themselves."""
        total = 0
        for main in self._mains:
            if not main.is_view:
                total += main.param.nbytes
            total += sum(v.nbytes for v in self.optimizer.state.get(main.param, {}).values() if isinstance(v, Tensor))
        return total

    def close(self) -> None:
        """Take everything apart: hooks removed, parameters in storage of their own and back in the groups.

        The optimizer's state, which belonged to the shards, is gone.
        """
        self._reducer.close()
        self._gather.close()
        for slot in self._slots:
            slot.release()
        self.optimizer.state.clear()
        for group, params in zip(self.optimizer.param_groups, self._user_params, strict=True):
            group["params"] = params
        self._mains.clear()
        self._buckets.clear()
        self.buffers.clear()
