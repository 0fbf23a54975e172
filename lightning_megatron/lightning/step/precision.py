"""The precision plugin: dtypes of parameters, gradients and main parameters, and steps that are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_megatron.arguments import checked
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.device import CPU, DeviceKind
from lightning_megatron.errors import ConfigError, Problem, nearest_names
from lightning_megatron.lightning.step.step_gate import StepGate
from lightning_megatron.models.stages import StagedModel
from lightning_megatron.optim.finite_check import FiniteCheck
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import declared_buffers

_OURS = __name__.partition(".")[0]


@dataclass(frozen=True)
class PrecisionMode:
    """Dtypes of one precision.

    Attributes:
        params: dtype of parameters and activations; with ``main``, of this package's layers alone, and of autocast.
        main: dtype of the values that the optimizer updates; ``None`` means the parameters themselves.
        grads: dtype in which gradients are accumulated.
        loss_scaled: True if losses are scaled against underflow.
    """

    params: torch.dtype
    main: torch.dtype | None
    grads: torch.dtype
    loss_scaled: bool = False


MODES: Mapping[str, PrecisionMode] = {
    "32-true": PrecisionMode(torch.float32, None, torch.float32),
    "bf16-mixed": PrecisionMode(torch.bfloat16, torch.float32, torch.float32),
    "bf16-true": PrecisionMode(torch.bfloat16, None, torch.bfloat16),
    "16-mixed": PrecisionMode(torch.float16, torch.float32, torch.float32, loss_scaled=True),
    "64-true": PrecisionMode(torch.float64, None, torch.float64),
}


class MegatronPrecision(Precision):
    """Megatron's meaning of Lightning's precision names.

    ``bf16-mixed`` holds the parameters of this package's layers in bf16 and fp32 main copies of them in the (sharded)
    optimizer, and accumulates gradients in fp32. Everything else keeps its dtype and runs under autocast, as in
    Lightning's own ``bf16-mixed``. ``16-mixed`` is the same with fp16 and a dynamic loss scale. ``bf16-true`` has no
    fp32 copy: small updates are lost. ``64-true`` is Lightning's, for modules of your own under data parallelism alone.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``, ``"16-mixed"`` or ``"64-true"``.
        loss_scale: loss scale of ``"16-mixed"``; ``None`` for Megatron's dynamic one (2^32, hysteresis 2).

    Attributes:
        device: device of the model. Autocast casts the operations there.
        last_grad_norm: norm before clipping, once it is known in a step.
        step_gate: gate asked before every step of an optimizer; ``None`` for no gate.
        step_is_refused: True if the gate has refused the last step.
        step_has_overflowed: True if the last step was skipped, because its gradients overflowed in half precision.

    Raises:
        ConfigError: for another precision.
    """

    @checked()
    def __init__(self, precision: str = "32-true", loss_scale: DynamicLossScale | None = None) -> None:
        super().__init__()
        self._set_precision(precision, loss_scale)
        self._managed: dict[int, ShardedOptimizer] = {}  # by id of the user's optimizer
        self._check: Callable[[ShardedOptimizer], None] | None = None
        self._finite_checks: Mapping[ShardedOptimizer, FiniteCheck] = {}
        self._overflow: dict[ShardedOptimizer, bool] = {}
        self._compares = False
        self._compared_in: dict[ShardedOptimizer, int] = {}
        self.device = torch.device(CPU.type)
        self.last_grad_norm: Tensor | None = None
        self.step_gate: StepGate | None = None
        self.step_is_refused = self.step_has_overflowed = False
        self._hooks: list[RemovableHandle] = []

    @classmethod
    def of(cls, plugin: Precision | None) -> MegatronPrecision:
        """Convert a precision plugin of Lightning; :meth:`adopt` defines which are supported."""
        return cls() if plugin is None else cls().adopt(plugin)

    def _set_precision(self, precision: str, loss_scale: DynamicLossScale | None) -> None:
        if precision not in MODES:
            advice = {
                "16-true": "fp16 without fp32 main parameters does not train: use '16-mixed'",
                "bf16": "lightning-habana's name for 'bf16-mixed'",
                "fp8": "operations choose it: MegatronStrategy(ops={'linear_fp8': 'auto'}), with 'bf16-mixed'",
            }.get(precision, "not a precision of this strategy")
            raise ConfigError([Problem("precision", precision, advice, nearest_names(precision, list(MODES)))])
        self.precision = precision  # type: ignore[assignment]  # Lightning's Literal has more names
        self.mode = MODES[precision]
        self.loss_scale = (loss_scale or DynamicLossScale()) if self.mode.loss_scaled else None

    def adopt(self, plugin: Precision) -> MegatronPrecision:
        """This plugin with the precision of Lightning's own ``plugin``, or ``plugin`` itself if it is of this class.

        Raises:
            ConfigError: for a plugin that this strategy does not support.
        """
        if isinstance(plugin, MegatronPrecision):
            return plugin
        of_lightning = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
        # HPUPrecisionPlugin: Lightning <= 2.5.5 creates lightning-habana's plugin on HPU.
        if type(plugin) in of_lightning or type(plugin).__name__ == "HPUPrecisionPlugin":
            self._set_precision(str(plugin.precision), self.loss_scale)
            return self
        reason = "the strategy decides dtypes itself: pass Trainer(precision=...) or MegatronPrecision(...)"
        raise ConfigError([Problem("plugins", type(plugin).__name__, reason, tuple(MODES))])

    def problems(self, kind: DeviceKind, layout: ParallelLayout) -> list[Problem]:
        """Reasons why this precision cannot be used on a kind of device, or under a layout."""
        if self.mode.params == torch.float64:
            reasons = {
                f"{kind.type} has no double precision": not kind.supports_double,
                "parallel layers compute in fp32: use data parallelism alone (tp=pp=cp=ep=1)": not layout.is_whole,
            }
            return [Problem("precision", self.precision, why, ("32-true",)) for why, holds in reasons.items() if holds]
        if self.mode.loss_scaled and not kind.supports_fp16_training:
            reason = f"half precision with a loss scale is not for {kind.type}"
            return [Problem("precision", self.precision, reason, ("bf16-mixed", "32-true"))]
        return []

    def manage(
        self,
        optimizers: Sequence[ShardedOptimizer],
        check: Callable[[ShardedOptimizer], None] | None = None,
        compare_values: bool = False,
        finite_checks: Mapping[ShardedOptimizer, FiniteCheck] | None = None,
    ) -> None:
        """Take charge of the steps of these optimizers.

        Args:
            optimizers: optimizers of the module that is fitted.
            check: function called with an optimizer once its gradients are complete, before anything uses them.
            compare_values: True to compare parameters with their main values at every step, as callbacks may write to
                them unnoticed between steps. The first step of an epoch compares anyway.
            finite_checks: checks before a step, by optimizer, where :attr:`step_gate` does not decide.
        """
        self._finite_checks = finite_checks or {}
        self._check = check
        self._managed = {id(sharded.optimizer): sharded for sharded in optimizers}
        self._compares, self._compared_in = compare_values, {}

    # Building and feeding the model

    @contextmanager
    def params_dtype(self) -> Iterator[None]:
        """Make the parameters' dtype the default of new tensors; fp32 keeps the present default."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(before if self.mode.params == torch.float32 else self.mode.params)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Context of :meth:`params_dtype`; in mixed precision the default dtype stays, as in Lightning."""
        return self.params_dtype() if self.mode.main is None else nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast parameters, and let layers accept inputs of any dtype; no effect in fp32.

        In mixed precision this concerns the layers of this package alone, with all that they contain. They compute in
        the parameters' dtype, without autocast. Else all layers of torch and of this package cast their inputs, and the
        user's own, whose inputs may be targets, run under autocast. Metrics keep their dtype, since they count or sum.
        So do buffers that are weights: 16 bits would round away the small updates of an expert's bias.
        """
        if self.mode.params != torch.float32:
            self.teardown()
            (self._convert_all if self.mode.main is None else self._convert_ours)(module)
        return module

    def _convert_ours(self, module: nn.Module) -> None:
        for layer in _layers_of_ours(module):
            of_user = _reached(layer, StagedModel, Metric)  # a whole model takes tokens and masks
            for part in _reached(layer, Metric).values():
                _cast_own(part, self.mode.params)
                if id(part) in of_user and _computes(part):
                    self._hooks.append(part.register_forward_pre_hook(_cast_inputs, with_kwargs=True))
            if id(layer) in of_user:
                self._autocast_in(layer, enabled=False)

    def _convert_all(self, module: nn.Module) -> None:
        dtype, of_user = self.mode.params, _reached(module, StagedModel, Metric)
        for part in _reached(module, Metric).values():
            _cast_own(part, dtype)
            if part is module or id(part) not in of_user or not _computes(part):
                continue
            if _home(part) in ("torch", _OURS) or dtype == torch.float64:
                self._hooks.append(part.register_forward_pre_hook(_cast_inputs, with_kwargs=True))
            elif _OURS not in map(_home, part.modules()):  # ours compute in fp32 where they must
                self._autocast_in(part, enabled=True)

    def _autocast_in(self, layer: nn.Module, enabled: bool) -> None:
        autocast = _Autocast(self.device.type, self.mode.params, enabled)
        self._hooks.append(layer.register_forward_pre_hook(autocast.enter))
        self._hooks.append(layer.register_forward_hook(autocast.leave, always_call=True))

    def teardown(self) -> None:
        """Remove the hooks that :meth:`convert_module` has registered on layers."""
        while self._hooks:
            self._hooks.pop().remove()

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs to fp64 under ``64-true``; otherwise keep their dtype.

        16 bits would round masks, counts and targets: autocast, or layers (:meth:`convert_module`), cast inputs.
        """
        return _cast(data, torch.float64) if self.mode.params == torch.float64 else data

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast in mixed precision, as in Lightning; in fp64 new tensors get the dtype, as in Lightning."""
        if self.mode.main is not None:
            return torch.autocast(self.device.type, self.mode.params, cache_enabled=False)
        return self.tensor_init_context() if self.mode.params == torch.float64 else nullcontext()

    # A step

    @property
    def step_is_skipped(self) -> bool:
        """True if the last step has changed nothing: its gradients have overflowed, or the gate has refused it."""
        return self.step_is_refused or self.step_has_overflowed

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate without autocast, also where a step calls ``manual_backward``."""
        is_cast = self.mode.main is not None and torch.is_autocast_enabled(self.device.type)
        with torch.autocast(self.device.type, enabled=False) if is_cast else nullcontext():
            super().backward(tensor, *args, **kwargs)

    def scale_of_loss(self) -> float:
        """Factor of a loss in the backward."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Call the hooks, then scale the loss."""
        tensor = super().pre_backward(tensor, module)
        return tensor if self.loss_scale is None else tensor * self.scale_of_loss()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, complete the gradients, run hooks and clipping, update and gather the parameters.

        A step whose gradients overflow (``16-mixed``), or that :attr:`step_gate` refuses, is skipped on all ranks; as
        in Lightning, learning-rate schedulers advance nevertheless.
        """
        sharded = self._sharded(optimizer)
        if sharded is None:  # Lightning's stand-in where configure_optimizers returned None
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self._complete(sharded)
        epoch = (trainer := model.trainer).current_epoch
        sharded.compare_values = self._compares or self._compared_in.get(sharded) != epoch
        self._compared_in[sharded] = epoch
        overflow = self.step_has_overflowed = self._overflow.pop(sharded, False)
        self._after_closure(model, optimizer)
        self.step_is_refused = self.step_gate is not None and not self.step_gate.admits(overflow)
        self._check_finite(sharded, trainer, overflow)
        if self.step_is_refused:
            return result
        if self.loss_scale is not None:
            self.loss_scale.update(overflow)
            if overflow:
                rank_zero_warn(f"gradient overflow: step skipped, loss scale now {self.loss_scale.scale:g}")
        return result if overflow else self._step(sharded, model, result, kwargs)

    def _check_finite(self, sharded: ShardedOptimizer, trainer: Trainer, overflow: bool) -> None:
        """Raise at NaN or infinity, unless a step gate decides, or a loss scale above its minimum handles an overflow.

        Raises:
            NonFiniteError: on all ranks.
        """
        if (check := self._finite_checks.get(sharded)) is None:
            return
        can_shrink = self.loss_scale is not None and self.loss_scale.scale > self.loss_scale.minimum
        if self.step_gate is not None or (overflow and can_shrink):
            check.forget()
        else:
            check(lambda: trainer.global_step, self.last_grad_norm)

    def _step(self, sharded: ShardedOptimizer, model: LightningModule, result: Any, kwargs: dict[str, Any]) -> Any:
        """Step with a closure that returns the computed result. The optimizer calls it, as in Lightning."""
        asked = []

        def closure() -> Any:
            asked.append(True)
            return result

        try:
            output = sharded.optimizer.step(closure=closure, **kwargs)
        finally:
            sharded.recover()
        if model.automatic_optimization and not asked:
            raise MisconfigurationException(
                f"{type(sharded.optimizer).__name__}.step did not call the closure that it was given, which runs "
                "training_step and backward under Lightning's other strategies: let it call closure() once"
            )
        return output

    def _complete(self, sharded: ShardedOptimizer) -> None:
        """Reduce and unscale the gradients of a step, only once: manual optimization may clip before the step."""
        if (are_complete := sharded.grads_are_complete) and sharded.grads_are_unscaled:
            return
        self.last_grad_norm = None
        if not are_complete:
            sharded.finish_grad_sync()
        sharded.grads_are_unscaled = True
        if self._check is not None:
            self._check(sharded)
        if self.loss_scale is not None:
            self._overflow[sharded] = sharded.found_inf()
            sharded.scale_grads(self.loss_scale.inverse)

    def _sharded(self, optimizer: Optimizer | LightningOptimizer) -> ShardedOptimizer | None:
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._managed.get(id(own))

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over the whole model, including the parts that other ranks hold."""
        if (sharded := self._sharded(optimizer)) is not None:
            self._complete(sharded)
            self.last_grad_norm = sharded.clip_by_norm(float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp every element of the gradients."""
        if (sharded := self._sharded(optimizer)) is None:
            return
        self._complete(sharded)
        if self.step_gate is not None:
            self.grad_norm()  # the gate needs the norm before clipping
        sharded.clip_by_value(float(clip_val))

    def grad_norm(self) -> Tensor:
        """L2 norm of the last step's gradient before clipping, a scalar equal on all ranks."""
        if self.last_grad_norm is None:
            norms = [sharded.grad_norm() for sharded in self._managed.values()]
            self.last_grad_norm = torch.stack(norms).norm() if norms else torch.zeros(())
        return self.last_grad_norm

    def state_dict(self) -> dict[str, Any]:
        """State of the loss scale; empty without one."""
        return {} if self.loss_scale is None else self.loss_scale.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a saved loss scale."""
        if self.loss_scale is not None and state_dict:
            self.loss_scale.load_state_dict(state_dict)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the loss scale for a Trainer with a strategy of Lightning's, too."""
        if self.loss_scale is not None:
            checkpoint[MixedPrecision.__qualname__] = self.loss_scale.grad_scaler_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the loss scale of a checkpoint of one of Lightning's strategies."""
        state = checkpoint.get(MixedPrecision.__qualname__)
        if self.loss_scale is not None and state and type(self).__qualname__ not in checkpoint:
            self.loss_scale.load_grad_scaler_state(state)


def _reached(module: nn.Module, *without: type[nn.Module]) -> dict[int, nn.Module]:
    """A module and its submodules by ``id``, without those of some classes and all that only these contain."""
    left_out = {part for part in module.modules() if isinstance(part, without)}
    return {id(part): part for _, part in module.named_modules(left_out)}


def _home(layer: nn.Module) -> str:
    """Package that defines a layer's ``forward``; this package for subclasses of its classes."""
    classes = [kind.__module__.partition(".")[0] for kind in type(layer).__mro__]
    return _OURS if _OURS in classes else str(getattr(layer.forward, "__module__", "")).partition(".")[0]


def _layers_of_ours(module: nn.Module) -> list[nn.Module]:
    """The outermost layers of this package in a module."""
    if isinstance(module, Metric):
        return []
    if _home(module) == _OURS and not isinstance(module, LightningModule):
        return [module]
    return list({id(layer): layer for child in module.children() for layer in _layers_of_ours(child)}.values())


class _Autocast:
    """Hooks that run layers, nested ones too, under autocast, or without it; dynamo can trace them."""

    def __init__(self, device: str, dtype: torch.dtype, enabled: bool) -> None:
        self._device, self._inside, self._before = device, (dtype, enabled), list[tuple[torch.dtype, bool]]()

    def enter(self, layer: nn.Module, args: Any) -> None:
        self._before.append((torch.get_autocast_dtype(self._device), torch.is_autocast_enabled(self._device)))
        self._set(*self._inside)

    def leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._set(*self._before.pop())

    def _set(self, dtype: torch.dtype, enabled: bool) -> None:
        torch.set_autocast_dtype(self._device, dtype)
        torch.set_autocast_enabled(self._device, enabled)
        torch.clear_autocast_cache()


def _computes(part: nn.Module) -> bool:
    return any(map(torch.is_floating_point, _own_tensors(part)))


def _own_tensors(part: nn.Module) -> Iterator[Tensor]:
    yield from part.parameters(recurse=False)
    yield from part.buffers(recurse=False)


def _cast_own(part: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own parameters, and its buffers unless they are weights."""
    for parameter in filter(torch.is_floating_point, part.parameters(recurse=False)):
        parameter.data = parameter.data.to(dtype)
    kept = {name for name, _, _ in declared_buffers(part)}
    for name, buffer in part.named_buffers(recurse=False):
        if buffer.is_floating_point() and name not in kept:
            setattr(part, name, buffer.to(dtype))


def _cast_inputs(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = next(tensor.dtype for tensor in _own_tensors(part) if tensor.is_floating_point())
    return _cast((args, kwargs), dtype)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if torch.is_floating_point(t) else t)
