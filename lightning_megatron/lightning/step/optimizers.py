"""The distributed optimizers of a module, and their gradients during the batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable
from weakref import ref

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_megatron import device as devices
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.lightning.compat._private import MockOptimizer, has_hooks
from lightning_megatron.lightning.step.per_token_loss import TokenCounter
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.broadcast import broadcast_params
from lightning_megatron.optim.buffers.kept_values import KeptModel
from lightning_megatron.optim.buffers.slot import Slot
from lightning_megatron.optim.clip import norms_by_name
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.finite_check import FiniteCheck
from lightning_megatron.optim.other_gradients import OtherGradients
from lightning_megatron.optim.replicas import ReplicaCheck
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs
from lightning_megatron.pipeline.tied_embeddings import SharedParameters, StageParameters, sum_tied_gradients
from lightning_megatron.weight_grad_store import GradPlace


@runtime_checkable
class LearnsFromSteps(Protocol):
    """A module that learns from what it recorded in the forwards of an optimizer step (such as expert biases)."""

    def after_optimizer_step(self) -> None:
        """Called after a step of the optimizer that trains the module; of the first one if it has no parameters."""
        ...

    def forget_step(self) -> None:
        """Discard what was recorded: the step was skipped, or no optimizer trains the module."""
        ...


@runtime_checkable
class KeepsWithinStep(Protocol):
    """A module that caches values computed from parameters for all forwards of a step."""

    def begin_batch(self, first: bool) -> None:
        """Prepare for the forwards of a batch; ``first`` if parameters may have changed since the one before."""
        ...

    def release(self) -> None:
        """Drop the cached values."""
        ...


class Holder:
    """A module's weak reference to the owner of its optimizers; a copy refers to no owner.

    Attributes:
        kept: main values of the last fit, which outlive its Trainer; ``None`` where parameters hold them.
    """

    def __init__(self, owner: object = None, kept: KeptModel | None = None) -> None:
        self._owner = None if owner is None else ref(owner)
        self.kept = kept

    @property
    def owner(self) -> object:
        """The owner, if it still exists."""
        return None if self._owner is None else self._owner()

    def __reduce__(self) -> tuple[object, ...]:
        return Holder, ()


class OptimizerSet:
    """One :class:`ShardedOptimizer` for each of the user's optimizers; none if ``configure_optimizers`` returned none.

    Args:
        module: the user's module.
        optimizers: the user's optimizers.
        mesh: mesh of the ranks.
        config: settings of the distributed optimizers.
        stages: parameters of every pipeline rank.
        check_finite: True to check for NaN and infinity.

    Attributes:
        given: the user's optimizers.
        sharded: the distributed optimizers.
        finite_checks: checks of losses, gradients and parameters for NaN and infinity before each step, by optimizer;
            none without ``check_finite``.
        backward_is_done: True after a ``training_step`` that has run the backwards, until :meth:`show_grads`.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        mesh: ParallelMesh,
        config: DistributedOptimizerConfig,
        stages: Sequence[StageParameters],
        check_finite: bool = True,
    ) -> None:
        self._mesh, self.given = mesh, tuple(optimizers)
        specs = list(named_specs(module))
        self._names: list[str] | None = None
        params = {name: param for name, param, _ in specs}
        raise_if_any(_shared_problems(optimizers, params))
        self._shared = SharedParameters(stages, mesh.pp)
        broadcast_params(specs, mesh)
        self._shared.share_values(params)
        specs = [
            (name, param, replace(spec, tied_with=name) if name in self._shared.repeated else spec)
            for name, param, spec in specs
        ]
        self._others = OtherGradients(specs, mesh)
        self._own_names = [name for name, _, spec in specs if spec.tied_with is None]
        reduce_late = params.keys() & (self._shared.tied | set(self._shared.names))
        config = replace(config, keep_param_grads=not module.automatic_optimization)
        self.sharded = [
            ShardedOptimizer(optimizer, specs, mesh, config, reduce_late)
            for optimizer in optimizers
            if not isinstance(optimizer, MockOptimizer)
        ]
        for sharded in self.sharded:
            sharded.install_gather_hooks(module)
        self._replica_checks = {sharded: ReplicaCheck(sharded, mesh) for sharded in self.sharded}
        self.finite_checks = {s: FiniteCheck(s, params, mesh) for s in self.sharded} if check_finite else {}
        self._learning = _parts_of(module, LearnsFromSteps)
        self._keepers: list[KeepsWithinStep] = _parts_of(module, KeepsWithinStep)
        self._tokens = TokenCounter(mesh.dp, module)
        self._is_automatic = module.automatic_optimization
        self._clears_itself = is_overridden("optimizer_zero_grad", module)
        self._differentiates_itself = is_overridden("backward", module)
        self._probe: _Probe | None = None
        self.backward_is_done = False
        if self._is_automatic:
            self._open_places()

    def begin_batch(self, first: bool, backward_is_ours: bool) -> None:
        """Prepare gradients for the ``training_step`` of a batch.

        Lightning calls ``zero_grad`` between ``training_step`` and ``backward``, at the first batch of an accumulation.
        If the backward comes after ``training_step``, that call clears the gradients. If ``training_step`` runs the
        backwards of all micro-batches, they are cleared here, and the new ones are hidden during Lightning's call.

        Args:
            first: True if Lightning will clear gradients.
            backward_is_ours: True if ``training_step`` runs backwards.
        """
        self.backward_is_done = backward_is_ours
        if not self._is_automatic:
            return
        self._probe = None
        # Writes through `param.data` cannot be detected: if callbacks may have made some, cached values are dropped.
        may_differ = first or any(sharded.compare_values for sharded in self.sharded)
        for keeper in self._keepers:
            keeper.begin_batch(may_differ)
        for sharded in self.sharded:
            sharded.add_new_params()
            sharded.hook_last(has_hooks)
        if not first:
            if backward_is_ours:
                self._continue_accumulation()
            return
        self._tokens.restart()
        for sharded in self.sharded:
            sharded.grad_factor = None
            if backward_is_ours or not sharded.shows_grads:
                if self._clears_itself and not all(slot.is_empty for slot in sharded.slots):
                    self._probe = _Probe(sharded.slots[0])
                sharded.zero_grads()

    def _open_places(self) -> None:
        """Let layers add gradients directly to the buffers; on Gaudi no kernel adds a bf16 product to an fp32 sum."""
        if self._mesh.rng.device.type == devices.HPU.type:
            return
        held = [sharded.places() for sharded in self.sharded]

        def find(param: Tensor) -> GradPlace | None:
            place = next((places[id(param)] for places in held if id(param) in places), None)
            return None if place is None or has_hooks(param) else place()

        self._mesh.weight_grads.set_places(find)

    def end_batch(self, output: Any, batches: int) -> Any:
        """After ``training_step``: hide the new gradients while Lightning calls ``zero_grad``.

        Args:
            output: output of the step, on this replica's whole batch.
            batches: number of accumulated batches, by which Lightning divides each loss.

        Returns:
            The output, with the mean loss if it has a number of tokens; see :meth:`TokenCounter.normalize`.
        """
        self._check_loss(output)
        if not self._is_automatic:
            return output
        if output is None:  # nothing is learnt from a batch without a loss
            for module in self._learning:
                module.forget_step()
            return None
        if self.backward_is_done:
            for slot in (slot for sharded in self.sharded for slot in sharded.slots):
                slot.hide()
        if self._probe is not None:
            self._probe.plant()
        output = self._tokens.normalize(output)
        for sharded in self.sharded:
            sharded.grad_factor = self._tokens.gradient_factor(batches)
        return output

    def _check_loss(self, output: Any) -> None:
        """Check the loss on the last stage, where it is computed, before it is averaged over replicas."""
        loss = output.get("loss") if not isinstance(output, Tensor) and isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and self._mesh.pp.rank == self._mesh.pp.size - 1:
            for check in self.finite_checks.values():
                check.add_loss(loss)

    def begin_backward(self) -> None:
        """Prepare for the backward that Lightning runs, which adds to the gradients of earlier batches."""
        self._check_probe()
        self._continue_accumulation()

    def show_grads(self) -> None:
        """Show the gradients again after the backwards, before the hooks of :meth:`Strategy.backward`."""
        self.backward_is_done = False
        self._check_probe()
        for slot in (slot for sharded in self.sharded for slot in sharded.slots):
            slot.unhide()

    def _continue_accumulation(self) -> None:
        """Prepare the optimizers that the coming backward may reach; others keep their mean gradients for hooks."""
        for sharded in self.sharded:
            if sharded.is_trained:
                sharded.continue_accumulation()

    def _check_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None and not probe.was_cleared():
            raise MisconfigurationException(
                "optimizer_zero_grad is overridden and keeps the gradients of the batch before, but with micro-batches "
                "they are cleared before the backwards: leave micro_batch_size out, or accumulate with "
                "Trainer(accumulate_grad_batches=...)"
            )

    def check_replicas(self, sharded: ShardedOptimizer) -> None:
        """Compare gradients that must be equal on tensor-parallel ranks; in the first steps only."""
        self._replica_checks[sharded]()

    def step_is_over(self, optimizer: Optimizer, is_last: bool, is_skipped: bool) -> None:
        """Finish a step that was taken or skipped.

        Args:
            is_last: True for the last step of an epoch, whose end hooks may read parameters.
            is_skipped: True if gradients have overflowed, or the step gate has refused the step.
        """
        if is_last:
            self.finish_param_gather()
        for module in self._learning if self.sharded else ():
            params = [*module.parameters()]
            trained_by = [sharded for sharded in self.sharded if any(map(sharded.holds, params))]
            if optimizer is not (trained_by or self.sharded)[0].optimizer:
                continue
            if is_skipped or (params and not trained_by):
                module.forget_step()
            else:
                module.after_optimizer_step()

    @contextmanager
    def last_backward(self, last: bool = True) -> Iterator[None]:
        """Context of the last backward of a step, which sends complete gradients; of another one if not ``last``."""
        for sharded in self.sharded:
            sharded.declare_last(last)
        try:
            with self._mesh.weight_grads.accumulating():
                yield
        finally:
            for sharded in self.sharded:
                sharded.declare_last(False)

    def lightnings_backward(self, last: bool) -> AbstractContextManager[None]:
        """Context of the backward that Lightning runs; the last of the step, or another one if not ``last``.

        An overridden one may call ``torch.autograd.grad``, or change gradients before it returns. Under manual
        optimization the last one of a step is not known. So both send gradients only afterwards.
        """
        is_plain = self._is_automatic and not self._differentiates_itself
        return self.last_backward(last) if is_plain else nullcontext()

    def sum_tied(self) -> None:
        """Sum the gradients of parameters that several pipeline stages hold; after the last backward of a step."""
        if self._mesh.pp.size == 1:
            return
        for sharded in self.sharded:
            sharded.inspect_late_grads()
            own = sharded.trained_names
            shared = {name: sharded.main_grad(name) for name in own.intersection(self._shared.names)}
            self._shared.sum_gradients(shared, self._mesh.rng.device)
            if self._mesh.embedding.size > 1:
                sum_tied_gradients(
                    {name: sharded.main_grad(name) for name in own & self._shared.tied}, self._mesh.embedding
                )

    def average_others(self) -> None:
        """Average gradients of parameters that no optimizer here holds, as DDP does; every replica calls this."""
        self._others.average(lambda param: any(sharded.holds(param) for sharded in self.sharded))

    def grad_norms(self) -> dict[str, Tensor]:
        """L2 norms of the gradients of all parameters of the model, by global name; all ranks call this."""
        if self._names is None:
            self._names = _names_on_all_stages(self._own_names, self._mesh)
        grads = (grad for sharded in self.sharded for grad in sharded.counted_grads())
        dtypes = {sharded.norm_dtype for sharded in self.sharded}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        return norms_by_name(grads, self._names, self._mesh.world, self._mesh.rng.device, dtype)

    def finish_param_gather(self) -> None:
        """Wait until all parameters have the values of the last step."""
        for sharded in self.sharded:
            sharded.finish_param_gather()

    def check_params(self) -> None:
        """Check all parameters before the first step; every rank must call this.

        Raises:
            NonFiniteError: on all ranks, naming parameters that are NaN or infinite.
        """
        for check in [*self.finite_checks.values()][:1]:
            check.check_params()

    def finish_finite_checks(self) -> None:
        """Wait for the checks of the last step; every rank must call this.

        Raises:
            NonFiniteError: on all ranks, if the step had a NaN or an infinity.
        """
        for check in self.finite_checks.values():
            check.finish()

    def close(self) -> None:
        """Move parameters back to storage of their own, and drop optimizer state."""
        self._mesh.weight_grads.set_places(None)
        for keeper in self._keepers:
            keeper.release()
        for sharded in self.sharded:
            sharded.close()


def decide_on_rank_0(configs: Iterable[LRSchedulerConfig], broadcast: Callable[[float], float]) -> None:
    """Step plateau schedulers by rank 0's metric: without ``sync_dist=True`` each rank may have its own.

    Args:
        configs: Lightning's configurations; replacements that share the user's schedulers' state are put into them.
        broadcast: function that gives all ranks the value of rank 0.
    """

    def step(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        super(type(self), self).step(broadcast(float(metrics)), *args, **kwargs)  # type: ignore[arg-type]

    for config in configs:
        if isinstance(config.scheduler, ReduceLROnPlateau):
            kind = type(config.scheduler)
            agreed: Any = object.__new__(type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__}))
            agreed.__dict__ = config.scheduler.__dict__
            config.scheduler = agreed


def _names_on_all_stages(own: list[str], mesh: ParallelMesh) -> list[str]:
    """Names of the parameters of all pipeline stages, in the same order on all ranks."""
    if mesh.pp.size == 1:
        return own
    return list(dict.fromkeys(name for names in all_gather_object(mesh, own) for name in names))


class _Probe:
    """A zero gradient that shows if the user's ``optimizer_zero_grad`` clears gradients.

    Lightning calls that hook after ``training_step``, when our backwards have already overwritten the old gradients. A
    zero gradient stands in for them. The hook may clear gradients in any way, so no call can be watched instead.
    """

    def __init__(self, slot: Slot) -> None:
        self._param, self._like = slot.owned.param, slot.grad if slot.aliased else slot.data
        self._planted: Tensor | None = None

    def plant(self) -> None:
        self._param.grad = self._planted = torch.zeros_like(self._like)

    def was_cleared(self) -> bool:
        left, self._param.grad = self._param.grad, None
        return left is None or left is not self._planted or left._version > 0


def _parts_of(module: nn.Module, kind: type) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, kind)]


def _shared_problems(optimizers: Sequence[Optimizer], params: Mapping[str, Tensor]) -> list[Problem]:
    """Parameters that two optimizers hold; a parameter can be in one buffer only."""
    names = {id(param): name for name, param in params.items()}
    found, holder = [], dict[int, int]()
    for index, optimizer in enumerate(optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if holder.setdefault(id(param), index) != index:
                reason = f"optimizer {index} holds a parameter that optimizer {holder[id(param)]} holds too"
                advice = "; give each parameter one optimizer, whose settings you change from step to step"
                found.append(Problem("configure_optimizers", names.get(id(param), "a parameter"), reason + advice))
    return found
