"""The distributed optimizers of a module, and the window of accumulation that each is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable
from weakref import ref

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.lightning._private import MockOptimizer
from lightning_megatron.lightning.precision import PrecisionMode
from lightning_megatron.lightning.token_mean import TokenWindow
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.norms import norms_by_name
from lightning_megatron.optim.reach import Vouched
from lightning_megatron.optim.replicas import ReplicaCheck
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import ParamSpec, named_specs
from lightning_megatron.pipeline.tied import SharedParameters, held_by_stages, sum_tied_gradients


@runtime_checkable
class SeesSteps(Protocol):
    """A module that does something of its own after every optimizer step (balances of experts)."""

    def after_optimizer_step(self) -> None:
        """A step has been taken."""
        ...


class Holder:
    """A module's note of the strategy whose optimizers have its parameters on their buffers; copies have none.

    Args:
        strategy: not kept alive.
    """

    def __init__(self, strategy: object = None) -> None:
        self._strategy = None if strategy is None else ref(strategy)

    @property
    def strategy(self) -> object:
        """The strategy, if it is still there."""
        return None if self._strategy is None else self._strategy()

    def __reduce__(self) -> tuple[object, ...]:
        return Holder, ()


class OptimizerSet:
    """One :class:`ShardedOptimizer` for each optimizer of the user's; none where ``configure_optimizers`` gave none.

    Args:
        module: whose parameters they hold.
        optimizers: the user's.
        mesh: this rank's.
        mode: dtypes.
        shard: whether data-parallel ranks share main parameters and state out.
        reduce_dtype: of gradients on the wire; ``None`` for that of accumulation.
        overlap_grad_reduce: see ``MegatronStrategy``.
        overlap_param_gather: see ``MegatronStrategy``.
        bucket_size: see ``MegatronStrategy``.
        elementwise: see ``MegatronStrategy``.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        mesh: ParallelMesh,
        mode: PrecisionMode,
        *,
        shard: bool,
        reduce_dtype: torch.dtype | None,
        overlap_grad_reduce: bool,
        overlap_param_gather: bool,
        bucket_size: int | None,
        elementwise: Sequence[Vouched] = (),
    ) -> None:
        self._mesh = mesh
        specs = list(named_specs(module))
        self._names: list[str] | None = None
        self._tied = _tied_names([spec.tied_with for _, _, spec in specs if spec.tied_with], mesh)
        self._shared = self._held_by_several(specs)
        specs = [
            (name, param, replace(spec, tied_with=name) if name in self._shared.repeated else spec)
            for name, param, spec in specs
        ]
        self._own_names = [name for name, _, spec in specs if spec.tied_with is None]
        own = {name for name, _, _ in specs}
        self.sharded = [
            ShardedOptimizer(
                optimizer,
                specs,
                mesh,
                shard=shard,
                main_dtype=mode.main,
                grad_dtype=mode.grads,
                reduce_dtype=reduce_dtype,
                overlap_grad_reduce=overlap_grad_reduce,
                overlap_param_gather=overlap_param_gather,
                bucket_size=bucket_size,
                elementwise=elementwise,
                hold=own.intersection(self._tied | set(self._shared.names)),
            )
            for optimizer in optimizers
            if not isinstance(optimizer, MockOptimizer)
        ]
        for sharded in self.sharded:
            sharded.install_gather_hooks(module)
        self._replica_checks = {sharded: ReplicaCheck(sharded, mesh) for sharded in self.sharded}
        self._open: set[ShardedOptimizer] = set()
        self._see_steps = [m for m in module.modules() if isinstance(m, SeesSteps)]
        self._tokens = TokenWindow(mesh.dp)

    def _held_by_several(self, specs: Sequence[tuple[str, nn.Parameter, ParamSpec]]) -> SharedParameters:
        """Parameters beside the model, which every stage has built."""
        if self._mesh.pp.size == 1:
            return SharedParameters([], frozenset(), self._mesh.pp)
        trained = {name: tuple(param.shape) for name, param, _ in specs if param.requires_grad}
        return SharedParameters(held_by_stages(trained, self._mesh), self._tied, self._mesh.pp)

    def open_windows(self) -> None:
        """Zero gradients where a window of accumulation begins.

        Lightning's own ``zero_grad``, which comes between ``training_step`` and ``backward``, reaches only the main
        parameters, whose gradients are not there yet.
        """
        if not self._open:
            self._tokens.restart()
        for sharded in self.sharded:
            sharded.finish_uncalled_gather()
            if sharded not in self._open:
                sharded.zero_grads()
                self._open.add(sharded)

    def mean_over_tokens(self, output: Any, batches: int) -> Any:
        """Count a batch whose ``training_step`` said how many tokens its loss is the sum of; others pass.

        Args:
            output: of the step, on this replica's whole batch.
            batches: what Lightning divides the loss of each accumulated batch by.

        Returns:
            The same with the mean loss, see :meth:`TokenWindow.mean_of`.
        """
        output = self._tokens.mean_of(output)
        for sharded in self.sharded:
            sharded.grad_factor = self._tokens.gradient_factor(batches)
        return output

    def check_replicas(self, sharded: ShardedOptimizer) -> None:
        """Compare gradients that tensor-parallel ranks should have alike; in the first steps only."""
        self._replica_checks[sharded]()

    def close_window(self, optimizer: Optimizer) -> None:
        """A step has been taken: the next gradient begins a new window."""
        self._open -= {sharded for sharded in self.sharded if sharded.optimizer is optimizer}
        if self.sharded and optimizer is self.sharded[0].optimizer:
            for module in self._see_steps:
                module.after_optimizer_step()

    @contextmanager
    def last_backward(self, last: bool = True) -> Iterator[None]:
        """The backward inside is the last of the step for the parameters it reaches (or it is not)."""
        for sharded in self.sharded:
            sharded.sync = last
        try:
            yield
        finally:
            for sharded in self.sharded:
                sharded.sync = False

    def sum_tied(self) -> None:
        """Sum the gradients of what several pipeline stages hold; after the last backward of a step."""
        if self._mesh.pp.size == 1:
            return
        for sharded in self.sharded:
            own = {name for names in sharded.group_names() for name in names}
            shared = {name: sharded.main_grad(name) for name in own.intersection(self._shared.names)}
            self._shared.sum_gradients(shared, self._mesh.rng.device)
            if self._mesh.ends.size > 1:
                sum_tied_gradients({name: sharded.main_grad(name) for name in own & self._tied}, self._mesh.ends)

    def grad_norms(self) -> dict[str, Tensor]:
        """L2 norms of the gradients of all parameters of the model, by global name; all ranks call this."""
        if self._names is None:
            self._names = _names_on_all_stages(self._own_names, self._mesh)
        pieces = (piece for sharded in self.sharded for piece in sharded.counted_grads())
        dtypes = {sharded.norm_dtype for sharded in self.sharded}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        return norms_by_name(pieces, self._names, self._mesh.world, self._mesh.rng.device, dtype)

    def finish_param_gather(self) -> None:
        """Wait until all parameters have the values of the last step."""
        for sharded in self.sharded:
            sharded.finish_param_gather()

    def close(self) -> None:
        """Give parameters storage of their own; optimizer state is gone."""
        for sharded in self.sharded:
            sharded.close()


def _names_on_all_stages(own: list[str], mesh: ParallelMesh) -> list[str]:
    """Names of the parameters of all pipeline stages, in one order on all ranks."""
    if mesh.pp.size == 1:
        return own
    told: list[list[str]] = [[] for _ in range(mesh.world.size)]
    dist.all_gather_object(told, own, group=mesh.host_group)
    return list(dict.fromkeys(name for names in told for name in names))


def _tied_names(own: Sequence[str], mesh: ParallelMesh) -> frozenset[str]:
    """Parameters that first and last stage both hold: the last stage knows, every rank hears of them."""
    if mesh.pp.size == 1:
        return frozenset(own)
    told: list[list[str]] = [[] for _ in range(mesh.world.size)]
    dist.all_gather_object(told, list(own), group=mesh.host_group)
    return frozenset(name for names in told for name in names)
