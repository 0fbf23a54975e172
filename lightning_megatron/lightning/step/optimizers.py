"""The distributed optimizers of a module, and the window of accumulation that each is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable
from weakref import ref

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.lightning._private import MockOptimizer
from lightning_megatron.lightning.precision import PrecisionMode
from lightning_megatron.lightning.step.per_token_loss import TokenCounter
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffers.buffer import Slot
from lightning_megatron.optim.finite_check import FiniteCheck
from lightning_megatron.optim.norms import norms_by_name
from lightning_megatron.optim.reach import Vouched
from lightning_megatron.optim.replicas import ReplicaCheck
from lightning_megatron.optim.start import start_alike
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import ParamSpec, named_specs
from lightning_megatron.pipeline.tied_embeddings import SharedParameters, held_by_stages, sum_tied_gradients, tied_names
from lightning_megatron.recorder.file_format import Kind


@runtime_checkable
class AfterOptimizerStep(Protocol):
    """A module that does something of its own after every optimizer step (balances of experts)."""

    def after_optimizer_step(self) -> None:
        """A step has been taken."""
        ...


@runtime_checkable
class ForgetStep(Protocol):
    """One of these that must not learn from a step that was not taken."""

    def forget_step(self) -> None:
        """Drop what the forwards of the step have shown."""
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
        check_finite: whether losses, gradients and parameters are looked at before each step.

    Attributes:
        finite_checks: what does, by optimizer.
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
        check_finite: bool = True,
    ) -> None:
        self._mesh = mesh
        specs = list(named_specs(module))
        self._names: list[str] | None = None
        raise_if_any(_shared_problems(optimizers, {id(param): name for name, param, _ in specs}))
        self._tied = tied_names([spec.tied_with for _, _, spec in specs if spec.tied_with], mesh)
        self._shared = self._held_by_several(specs)
        start_alike(specs, mesh)
        self._shared.share_values({name: param for name, param, _ in specs})
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
                leave_grads=not module.automatic_optimization,
            )
            for optimizer in optimizers
            if not isinstance(optimizer, MockOptimizer)
        ]
        for sharded in self.sharded:
            sharded.install_gather_hooks(module)
        self._replica_checks = {sharded: ReplicaCheck(sharded, mesh) for sharded in self.sharded}
        params = {name: param for name, param, _ in specs}
        self.finite_checks = {s: FiniteCheck(s, params, mesh) for s in self.sharded} if check_finite else {}
        self._see_steps = [m for m in module.modules() if isinstance(m, AfterOptimizerStep)]
        self._forget_steps: list[ForgetStep] = [m for m in module.modules() if isinstance(m, ForgetStep)]
        self._tokens = TokenCounter(mesh.dp)
        self._is_automatic = module.automatic_optimization
        self._clears_itself = is_overridden("optimizer_zero_grad", module)
        self._probe: _Probe | None = None

    def _held_by_several(self, specs: Sequence[tuple[str, nn.Parameter, ParamSpec]]) -> SharedParameters:
        """Parameters beside the model, which every stage has built."""
        if self._mesh.pp.size == 1:
            return SharedParameters([], frozenset(), self._mesh.pp)
        trained = {name: tuple(param.shape) for name, param, _ in specs if param.requires_grad}
        return SharedParameters(held_by_stages(trained, self._mesh), self._tied, self._mesh.pp)

    def begin_batch(self, first: bool, backward_is_ours: bool) -> None:
        """Before the ``training_step`` of a batch.

        Lightning clears gradients between ``training_step`` and ``backward``, at the first batch of those that it
        accumulates. Where there is one backward, outside of ``training_step``, it does so itself. Where
        ``training_step`` has run the backwards of all micro-batches by then, we clear before, and what it clears is
        hidden from it.

        Args:
            first: whether Lightning will clear.
            backward_is_ours: whether ``training_step`` runs backwards.
        """
        for sharded in self.sharded:
            sharded.finish_uncalled_gather()
        if not self._is_automatic:
            return
        self._probe = None
        for sharded in self.sharded:
            sharded.take_in_newcomers()
        if not first:
            if backward_is_ours:
                self._reopen()
            return
        self._tokens.restart()
        for sharded in self.sharded:
            sharded.grad_factor = None
            if backward_is_ours or not sharded.shows_grads:
                if self._clears_itself and not all(slot.is_empty for slot in sharded.slots):
                    self._probe = _Probe(sharded.slots[0])
                sharded.zero_grads()

    def end_batch(self, output: Any, batches: int, backward_was_ours: bool) -> Any:
        """After it: what Lightning clears now is gone already, and what has come since is not to be seen.

        Args:
            output: of the step, on this replica's whole batch.
            batches: what Lightning divides the loss of each accumulated batch by.
            backward_was_ours: whether ``training_step`` has run backwards.

        Returns:
            The output; with the mean loss where it said how many tokens its loss is the sum of.
        """
        self._see_loss(output)
        if output is None or not self._is_automatic:
            return output
        if backward_was_ours:
            for slot in (slot for sharded in self.sharded for slot in sharded.slots):
                slot.hide()
        if self._probe is not None:
            self._probe.plant()
        return self.mean_over_tokens(output, batches)

    def _see_loss(self, output: Any) -> None:
        """Before it is averaged with that of other replicas, and where it was computed: on the last stage."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and self._mesh.pp.rank == self._mesh.pp.size - 1:
            for check in self.finite_checks.values():
                check.see_loss(loss)

    def begin_backward(self) -> None:
        """Before Lightning's own backward of a batch: gradients that nobody has cleared are added to."""
        self._check_probe()
        self._reopen()

    def show_grads(self) -> None:
        """End of the backwards, before the hooks of :meth:`Strategy.backward`."""
        self._check_probe()
        for slot in (slot for sharded in self.sharded for slot in sharded.slots):
            slot.unhide()

    def _reopen(self) -> None:
        for sharded in self.sharded:
            sharded.reopen()

    def _check_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None and not probe.was_cleared():
            raise MisconfigurationException(
                "optimizer_zero_grad is overridden and has left the gradients of the batch before, but they are "
                "cleared before the backwards of micro-batches: leave micro_batch_size out, or accumulate with "
                "Trainer(accumulate_grad_batches=...)"
            )

    def mean_over_tokens(self, output: Any, batches: int) -> Any:
        """Count a batch whose ``training_step`` said how many tokens its loss is the sum of; others pass.

        Args:
            output: of the step, on this replica's whole batch.
            batches: what Lightning divides the loss of each accumulated batch by.

        Returns:
            The same with the mean loss, see :meth:`TokenCounter.normalize`.
        """
        output = self._tokens.normalize(output)
        for sharded in self.sharded:
            sharded.grad_factor = self._tokens.gradient_factor(batches)
        return output

    def check_replicas(self, sharded: ShardedOptimizer) -> None:
        """Compare gradients that tensor-parallel ranks should have alike; in the first steps only."""
        self._replica_checks[sharded]()

    def step_is_over(self, optimizer: Optimizer, is_last: bool, is_refused: bool) -> None:
        """A step has been taken, or refused.

        Args:
            optimizer: the user's.
            is_last: whether the epoch is over, whose hooks may look at parameters.
            is_refused: whether it was not taken because of what its forwards have shown.
        """
        if is_last:
            self.finish_param_gather()
        if is_refused:
            for forgetful in self._forget_steps:
                forgetful.forget_step()
            return
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
            sharded.look_at_held()
            own = {name for names in sharded.group_names() for name in names}
            shared = {name: sharded.main_grad(name) for name in own.intersection(self._shared.names)}
            self._shared.sum_gradients(shared, self._mesh.rng.device)
            if self._mesh.embedding.size > 1:
                sum_tied_gradients({name: sharded.main_grad(name) for name in own & self._tied}, self._mesh.embedding)

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

    def check_params(self) -> None:
        """Look at all parameters before the first step; every rank must call this.

        Raises:
            NonFiniteError: on all ranks, naming parameters that are NaN or infinite.
        """
        for check in [*self.finite_checks.values()][:1]:
            check.check_params()

    def settle_finite(self) -> None:
        """Hear whether the last step was made of finite numbers; every rank must call this.

        Raises:
            NonFiniteError: on all ranks, if it was not.
        """
        for check in self.finite_checks.values():
            check.settle()

    def close(self) -> None:
        """Give parameters storage of their own; optimizer state is gone."""
        for sharded in self.sharded:
            sharded.close()


def _names_on_all_stages(own: list[str], mesh: ParallelMesh) -> list[str]:
    """Names of the parameters of all pipeline stages, in one order on all ranks."""
    if mesh.pp.size == 1:
        return own
    told: list[list[str]] = [[] for _ in range(mesh.world.size)]
    mesh.host.call(Kind.ALL_GATHER_OBJECT).run(dist.all_gather_object, told, own, group=mesh.host_group)
    return list(dict.fromkeys(name for names in told for name in names))


class _Probe:
    """A gradient of zeros in the place of one that is gone, to see whether an ``optimizer_zero_grad`` clears it."""

    def __init__(self, slot: Slot) -> None:
        self._param, self._like = slot.owned.param, slot.grad if slot.aliased else slot.data
        self._planted: Tensor | None = None

    def plant(self) -> None:
        self._param.grad = self._planted = torch.zeros_like(self._like)

    def was_cleared(self) -> bool:
        left, self._param.grad = self._param.grad, None
        return left is None or left is not self._planted or left._version > 0


def _shared_problems(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> list[Problem]:
    """Parameters that two optimizers hold: each lies in one buffer."""
    found, holder = [], dict[int, int]()
    for index, optimizer in enumerate(optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if holder.setdefault(id(param), index) != index:
                reason = f"optimizer {index} holds a parameter that optimizer {holder[id(param)]} holds too"
                advice = "; give each parameter one optimizer, whose settings you change from step to step"
                found.append(Problem("configure_optimizers", names.get(id(param), "a parameter"), reason + advice))
    return found
