"""One parameter in a flat buffer: its key, its place, and the meaning of its ``.grad``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.device.execution import is_lazy
from lightning_megatron.params import ParamSpec
from lightning_megatron.weight_grad_store import GradPlace


class BufferKey(NamedTuple):
    """Properties that all parameters of one buffer share, so that one operation on the buffer suits all of them.

    Attributes:
        dtype: dtype of the parameters.
        group: index of the user's ``param_groups`` entry.
        replicated_over_tp: True if every tp rank holds the same elements; they count once in a norm.
        grad_sum_over_tp: True if gradients are summed over tp before they are reduced over data-parallel ranks.
        tied_copy: True if the elements repeat a parameter of another pipeline stage; they do not count in a norm.
        expert: True for experts if their replicas (the expert-data axis) are not the replicas of dense layers.
        reduce_late: True if gradients still change after backward (tied embeddings); they are reduced at the end of
            the step.
    """

    dtype: torch.dtype
    group: int
    replicated_over_tp: bool = False
    grad_sum_over_tp: bool = False
    tied_copy: bool = False
    expert: bool = False
    reduce_late: bool = False


@dataclass(frozen=True)
class OwnedParam:
    """A parameter with its global name, its spec and its place in the order of definition."""

    name: str
    param: nn.Parameter
    spec: ParamSpec
    order: int


class Slot:
    """The place of one parameter in its buffer, with plain torch's meaning of its ``.grad``.

    For the user, ``param.grad`` is ``None`` until a backward reaches the parameter; each backward adds to it; the user
    may set it to ``None`` or replace it.

    Attributes:
        owned: the parameter.
        start: first element in the buffer.
        data: the parameter's elements in the flat parameter tensor, in its shape.
        grad: its accumulated gradient in the flat gradient tensor, in its shape.
        aliased: True if ``param.grad`` *is* ``grad``, so that autograd accumulates into the buffer. Otherwise a hook
            adds each gradient to ``grad`` and frees it, so that ``param.grad`` is ``None`` between backwards.
        keeps_param_grad: True if gradients stay in ``param.grad`` until the step (never if ``aliased``). They add up in
            the parameter's dtype, and the user can clear and replace them (manual optimization).
        has_grad: True if the parameter has a gradient in this step.
        grad_is_remote: True if only other data-parallel ranks have computed that gradient.
        arrived: True if a backward has reached the parameter since its gradient was last sent or cleared.
        version: version counter of the parameter when its values last agreed with the optimizer's main values.
    """

    def __init__(
        self, owned: OwnedParam, start: int, data: Tensor, grad: Tensor, aliased: bool, keeps_param_grad: bool
    ) -> None:
        self.owned = owned
        self.start = start
        self.data = data
        self.grad = grad
        self.aliased = aliased
        self.keeps_param_grad = keeps_param_grad and not aliased
        self.has_grad = self.grad_is_remote = self.arrived = False
        self._is_hidden = False
        self._address = data.data_ptr()
        self.version = owned.param._version
        self._seen: Tensor | None = grad if aliased else None

    @property
    def end(self) -> int:
        """One past the last element in the buffer."""
        return self.start + self.grad.numel()

    # Gradients

    def clear(self) -> None:
        """Drop the accumulated gradient.

        The first gradient of a window is then copied into the buffer instead of added to zeros, which saves a pass
        over all gradients; one that never comes is zeroed when the buffer is needed (:meth:`write_to_buffer`).
        """
        self.owned.param.grad = None
        self.has_grad = self.grad_is_remote = self.arrived = self._is_hidden = False
        if not self.aliased:
            self._seen = None
            if not self.keeps_param_grad:
                self.grad.zero_()

    def collect(self) -> None:
        """Move the gradient that autograd left in ``param.grad`` into the buffer, unless it is there already.

        As in plain torch, setting ``param.grad`` to ``None`` or replacing it before this backward has discarded the
        gradient accumulated until then.
        """
        param = self.owned.param
        grad = param.grad
        self.arrived = True
        if self.keeps_param_grad:
            self._seen = grad
        elif grad is not self.grad and grad is not None:
            values = grad.detach()  # a backward with create_graph=True leaves a graph
            if self.aliased:
                self.grad.copy_(values.to_dense())
                if self.grad.dtype == param.dtype:
                    param.grad = self.grad
                else:
                    set_grad(param, self.grad)
            else:
                self.grad.add_(values)
                param.grad = None

    def place(self) -> GradPlace | None:
        """Buffer to which a layer's backward adds itself; ``None`` where ``param.grad`` is or may be another tensor.

        Like :meth:`collect`, it leaves the buffer in ``param.grad``.
        """
        grad = self.owned.param.grad
        if not self.aliased or (grad is not None and grad is not self.grad):
            return None
        self.arrived = True
        set_grad(self.owned.param, self.grad)
        return GradPlace(self.grad, is_new=grad is None)

    @property
    def is_replaced(self) -> bool:
        """True if the user has assigned another tensor to ``param.grad`` since the last backward."""
        grad = self.owned.param.grad
        return grad is not None and grad is not self._seen

    @property
    def is_edited(self) -> bool:
        """True if the user has replaced a gradient, or set it to ``None``."""
        grad = self.owned.param.grad
        if grad is not None:
            return grad is not self._seen
        return self.has_grad and not self.grad_is_remote and (self.aliased or self.keeps_param_grad)

    @property
    def is_empty(self) -> bool:
        """True if the buffer holds no gradient of earlier backwards."""
        return self.owned.param.grad is None and (
            self.aliased or self.keeps_param_grad or not (self.arrived or self.has_grad)
        )

    def write_to_buffer(self, sent: bool = False) -> None:
        """Make the buffer agree with ``param.grad`` before it is sent or used by a step; ``None`` becomes zero.

        Args:
            sent: True if the buffer is being sent already.
        """
        grad = self.owned.param.grad
        self.grad_is_remote = False
        if grad is None:
            self.has_grad = not self.is_empty
            if not (self.has_grad or sent):
                self.grad.zero_()
            return
        self.has_grad = True
        if grad is not self.grad:
            self.assign(grad)

    def assign(self, grad: Tensor) -> None:
        """Replace the accumulated gradient by one that the user has assigned."""
        with torch.no_grad():
            self.grad.copy_(grad.to_dense())  # dense tensors as they are; embeddings may have sparse gradients
        self.has_grad = True
        if self.aliased:
            set_grad(self.owned.param, self.grad)
        elif self.keeps_param_grad:
            self._seen = grad
        else:
            self.owned.param.grad = None

    def adopt(self, grad: Tensor) -> None:
        """Start from the gradient that autograd had accumulated before the parameter was in a buffer."""
        if self.keeps_param_grad:
            self.owned.param.grad = grad
        self.assign(grad)
        self.arrived = True

    def attach(self) -> None:
        """Ensure that there is a gradient (zero if there was none), for a caller that accesses it in the buffer."""
        self.write_to_buffer()
        self.has_grad = True
        if self.aliased:
            set_grad(self.owned.param, self.grad)
        else:
            self.arrived = True

    def show(self) -> None:
        """Show in ``param.grad`` a mean gradient to which only other data-parallel ranks have contributed."""
        self.has_grad, self.grad_is_remote = True, False
        set_grad(self.owned.param, self.grad)

    def hide(self) -> None:
        """Show ``param.grad`` as ``None`` while Lightning clears the gradients of the step before."""
        if self.aliased and self.owned.param.grad is self.grad:
            self._is_hidden, self.owned.param.grad = True, None

    def unhide(self) -> None:
        """Undo :meth:`hide`."""
        if self._is_hidden:
            self._is_hidden = False
            set_grad(self.owned.param, self.grad)

    # Values

    @property
    def has_new_storage(self) -> bool:
        """True if the user has assigned new storage to the parameter (``param.data = x``)."""
        return self.owned.param.data_ptr() != self._address

    @property
    def is_written(self) -> bool:
        """True if the user has written to the parameter, or assigned new storage to it."""
        param = self.owned.param
        return param._version != self.version or param.data_ptr() != self._address

    def release(self) -> None:
        """Detach the parameter from the buffers: copy its values into its own storage, and clear its gradient."""
        param = self.owned.param
        param.grad = None
        if self.aliased and self.grad.dtype != param.dtype:
            set_grad_dtype(param, param.dtype)
        param.data = self.data.detach().clone()


def set_grad_dtype(param: Any, dtype: torch.dtype) -> None:
    """Let autograd accumulate the gradient of ``param`` in ``dtype``; needs :func:`supports_grad_dtype`.

    Before torch 2.10 there is nothing to set: autograd adds to the gradient that it finds, whatever its dtype is.
    """
    if hasattr(param, "grad_dtype"):
        param.grad_dtype = dtype  # typed Any: torch's stubs know the attribute only in the versions that have it


def set_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Assign ``param.grad``, also in another dtype than the parameter's.

    Before torch 2.10 an assigned gradient must have the dtype of its parameter's values, so the parameter borrows the
    gradient's storage while it is assigned.
    """
    if grad.dtype == param.dtype or hasattr(param, "grad_dtype"):
        param.grad = grad
    else:
        values, param.data = param.data, grad
        param.grad, param.data = grad, values


def supports_grad_dtype(param_dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> bool:
    """True if autograd accumulates into a gradient of another dtype than its parameter's.

    A backward on that device tests it, because builds of torch for accelerators differ in what they back-port.
    """
    probe = nn.Parameter(torch.ones(1, dtype=param_dtype, device=device))
    if is_lazy(device) and not hasattr(probe, "grad_dtype"):
        return False  # the next forward may not read values that were written through an alias of `param.data`
    total = torch.ones(1, dtype=grad_dtype, device=device)
    try:
        set_grad_dtype(probe, grad_dtype)
        set_grad(probe, total)
        with torch.enable_grad():
            (probe * 2).sum().backward()
    except (RuntimeError, TypeError):
        return False
    return probe.grad is total and bool(total.item() == 3) and bool(probe.item() == 1)


class _WithoutGradient(torch.autograd.Function):
    """A function whose backward returns no gradient, as that of a layer that has added it to the buffer itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def hooks_run_without_gradient() -> bool:
    """True if the hook of a parameter runs at the end of its backward although autograd got no gradient for it.

    A backward tests it, because older versions of torch end before the hook.
    """
    param, calls = nn.Parameter(torch.zeros(())), list[Tensor]()
    param.register_post_accumulate_grad_hook(calls.append)
    with torch.enable_grad():
        _WithoutGradient.apply(param).backward()
    return bool(calls)
