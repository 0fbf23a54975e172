"""The distributed optimizer: a user's torch optimizer, working on this rank's share of the parameters.

ZeRO stage 1 (https://arxiv.org/abs/1910.02054) in the shape of Megatron-LM's distributed optimizer: gradients are
reduce-scattered over data-parallel ranks, each rank updates fp32 main copies of its share, and the new values are
gathered. The optimizer object, its hyper-parameters and whatever schedules them stay the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.bucket import Bucket
from lightning_megatron.optim.buffer import FlatBuffer
from lightning_megatron.optim.clip import any_nonfinite, counts_here, global_norm
from lightning_megatron.optim.gather import ParamGather
from lightning_megatron.optim.groups import assign
from lightning_megatron.optim.plan import default_bucket_size
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
        grads_are_complete: whether :meth:`finish_grad_sync` has run in this window of accumulation.
        grad_factor: what :meth:`finish_grad_sync` multiplies gradients with, for a loss whose denominator is known only
            after the last forward (a number of tokens); ``None`` for nothing. Forgotten where a window begins.

    Args:
        optimizer: an element-wise torch optimizer without state, over parameters of the model.
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

    Raises:
        ConfigError: for an optimizer that cannot work on flat shards, that has taken steps, or whose groups do not
            match the model.
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
    ) -> None:
        self.optimizer = optimizer
        self._mesh = mesh
        self._device = mesh.rng.device
        self.grads_are_complete = False
        self.grad_factor: Tensor | None = None
        self._user_params: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        owned = assign(optimizer, named_params, mesh, hold)
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
        self._mains = {bucket: self._main_of(bucket, main_dtype) for bucket in buckets}
        self._swap_groups()
        self._reducer = GradReducer(buckets, mesh.tp, dtype=reduce_dtype, overlap=overlap_grad_reduce)
        self._gather = ParamGather(buckets[::-1], overlap=overlap_param_gather)

    @staticmethod
    def _main_of(bucket: Bucket, dtype: torch.dtype | None) -> nn.Parameter:
        return nn.Parameter(bucket.own_params.to(dtype or bucket.own_params.dtype))  # a view where dtypes agree

    def _swap_groups(self) -> None:
        state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for group, mains, params in zip(
            self.optimizer.param_groups, self._mains_by_group(), self._user_params, strict=True
        ):
            group["params"] = mains
            # Some optimizers allocate when they are made (Adagrad): the same start, in the new shape.
            begun = next((p for p in params if state.get(p)), None)
            for main in mains:
                if begun is not None:
                    self.optimizer.state[main] = state_like(main, state[begun], begun)

    def _mains_by_group(self) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = [[] for _ in self._user_params]
        for bucket, main in self._mains.items():
            groups[bucket.key.group].append(main)
        return groups

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
        for bucket, main in self._mains.items():
            main.grad = None
            for slot in bucket.slots:
                slot.begin()

    def main_grad(self, name: str) -> Tensor:
        """The accumulated gradient of a parameter, in its shape: complete before, own share only after the sync."""
        slot = next(slot for bucket in self._mains for slot in bucket.slots if slot.owned.name == name)
        slot.attach()
        return slot.grad

    def finish_grad_sync(self) -> None:
        """Complete the reduction; the mean gradient of each main parameter becomes its ``.grad``."""
        self.grads_are_complete = True
        if not self._reducer.reached and all(bucket.axis.size == 1 for bucket in self._mains):
            return
        self._reducer.finish()
        for bucket, main in self._mains.items():
            main.grad = bucket.own_grads.to(main.dtype)  # the buffer itself where dtypes agree
        if self.grad_factor is not None:
            self.scale_grads(self.grad_factor)

    @property
    def main_params(self) -> list[nn.Parameter]:
        """This rank's main parameters, one ``[n]`` for each bucket."""
        return list(self._mains.values())

    def _grads(self) -> list[Tensor]:
        return [main.grad for main in self._mains.values() if main.grad is not None]

    def grad_norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, each element counted once: fp32 scalar, equal on all ranks."""
        counted = [m.grad for b, m in self._mains.items() if m.grad is not None and counts_here(b, self._mesh)]
        return global_norm(counted, self._mesh.world, self._device)

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

    @torch.no_grad()
    def start_param_gather(self) -> None:
        """After a step: main values into the parameters, and everybody's shares to everybody."""
        for bucket, main in self._mains.items():
            if main.dtype != bucket.own_params.dtype:
                bucket.own_params.copy_(main)
        self._gather.start()

    def finish_param_gather(self) -> None:
        """Wait until all parameters have their new values (before they are saved, compared or used otherwise)."""
        self._gather.finish()

    def refresh_params(self) -> None:
        """Parameters from main values, on all ranks: after optimizer state was loaded."""
        self.start_param_gather()
        self.finish_param_gather()

    @torch.no_grad()
    def refresh_main(self) -> None:
        """Main values from parameters: after weights were loaded."""
        self.finish_param_gather()
        for bucket, main in self._mains.items():
            if main.dtype != bucket.own_params.dtype:
                main.copy_(bucket.own_params)

    # State

    def init_state(self) -> None:
        """Allocate the optimizer's state where it has none, so that a checkpoint can be loaded into it."""
        allocate_state(self.optimizer, self._mains_by_group())

    def pieces(self) -> list[PieceState]:
        """What this rank holds, parameter by parameter; views, so that copying into them loads a checkpoint.

        A parameter that is not sharded, or that is replicated over tp, appears on every rank that holds it.
        """
        return [piece for bucket in self._mains for piece in self._pieces_of(bucket)]

    def _pieces_of(self, bucket: Bucket) -> Iterator[PieceState]:
        main = self._mains[bucket]
        group = self.optimizer.param_groups[bucket.key.group]
        return pieces_of(bucket, main, self.optimizer.state.get(main, {}), group)

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
        holding = (b for b in self._mains if any(slot.owned.name == piece.name for slot in b.slots))
        for bucket in holding:
            owner, group = self._mains[bucket], self.optimizer.param_groups[bucket.key.group]
            for target in self._pieces_of(bucket):
                if (target.piece.name, target.piece.start, target.piece.end) == (piece.name, piece.start, piece.end):
                    load_piece(target, self.optimizer.state[owner], group, main, state or {}, scalars or {})
                    return
        raise KeyError(f"no piece {piece.name}[{piece.start}:{piece.end}] on this rank")

    def group_names(self) -> list[list[str]]:
        """Global names of the parameters in each of the user's groups, in order of definition."""
        names: list[list[tuple[int, str]]] = [[] for _ in self._user_params]
        for bucket in self._mains:
            names[bucket.key.group] += [(slot.owned.order, slot.owned.name) for slot in bucket.slots]
        return [[name for _, name in sorted(group)] for group in names]

    def group_settings(self) -> list[dict[str, Any]]:
        """What each of the user's groups says besides its parameters: the learning rate and so on."""
        return [
            {name: value for name, value in group.items() if name not in ("params", STEP)}
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
        for bucket, main in self._mains.items():
            if main.dtype != bucket.own_params.dtype:
                total += main.nbytes
            total += sum(v.nbytes for v in self.optimizer.state.get(main, {}).values() if isinstance(v, Tensor))
        return total

    def close(self) -> None:
        """Take everything apart: hooks removed, parameters in storage of their own and back in the groups.

        The optimizer's state, which belonged to the shards, is gone.
        """
        self._reducer.close()
        self._gather.close()
        for bucket in self._mains:
            for slot in bucket.slots:
                slot.release()
        self.optimizer.state.clear()
        for group, params in zip(self.optimizer.param_groups, self._user_params, strict=True):
            group["params"] = params
        self._mains.clear()
        self.buffers.clear()
