"""User edits of parameters and gradients between steps, copied to main values and flat buffers.

In plain torch the parameter is the value and ``param.grad`` is the gradient. Here both are views of flat tensors, and
values may have a copy of higher precision. So edits are detected and copied before a step would overwrite them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.optim.buffers.main_values import MainValues, States
from lightning_megatron.optim.buffers.slot import Slot

_BLOCK = 1 << 18
"""Elements; 65,536 to 262,144 took equal times, 16,384 a third more (``benchmarks/profile_step_cpu_202611.md``)."""
_DEVICE_BLOCK = 1 << 24
"""Elements on an accelerator: few kernels, whose results, up to 9 bytes an element, are small beside the model."""


def copy_edited_grads(main: MainValues, states: States) -> None:
    """Copy gradients that were assigned or set to ``None`` after the reduction to the main parameters.

    Raises:
        RuntimeError: for an assigned gradient where ``param.grad`` has not shown the whole mean.
    """
    edited = [slot for slot in main.bucket.slots if slot.is_edited]
    if not edited:
        return
    for slot in edited:
        grad = slot.owned.param.grad
        if grad is None:
            slot.has_grad = False
            continue
        if not main.bucket.is_whole:
            raise_replaced_grad(slot)
        slot.assign(grad)
    main.assign_grads(states)


def raise_replaced_grad(slot: Slot) -> None:
    """Raise an error for a gradient that was replaced where it is not the mean of all data-parallel ranks."""
    raise RuntimeError(
        f"the gradient of {slot.owned.name!r} was replaced (param.grad = ...) where it is not the mean over all "
        "data-parallel ranks: replace it in on_after_backward or on_before_optimizer_step, where it is, or edit the "
        "gradient of this rank in a hook on the parameter (param.register_hook)"
    )


def copy_written_values(main: MainValues, everywhere: bool) -> None:
    """Copy values that the user has written into parameters to their main values.

    An in-place write changes the parameter's version counter, new storage (``param.data = x``) its address. An in-place
    write through ``param.data`` changes neither: only a comparison of values finds it. Unchanged elements keep their
    main values bit for bit.

    Args:
        main: main values of a bucket.
        everywhere: True to compare all values, also where no edit was detected.

    Raises:
        RuntimeError: for new storage that does not fit.
    """
    written = [slot for slot in main.bucket.slots if slot.is_written]
    if not written and (main.is_view or not everywhere):
        return
    with torch.no_grad():
        for slot in written:
            if slot.has_new_storage:
                _restore_storage(main, slot)
            slot.version = slot.owned.param._version
        if main.is_view:
            return
        ranges = [range(main.flat.numel())] if everywhere else [main.local_range(slot) for slot in written]
        for here in ranges:
            _copy_unequal(main.bucket.own_params[here.start : here.stop], main.flat[here.start : here.stop])


def _copy_unequal(values: Tensor, kept: Tensor) -> None:
    """Copy ``[n]`` values where they are not those in ``kept``, rounded, block by block: caches of a CPU hold one."""
    size = _BLOCK if kept.is_cpu else _DEVICE_BLOCK
    for value, own in zip(values.split(size), kept.split(size), strict=True):
        own.copy_(torch.where(own.to(value.dtype) == value, own, value.to(own.dtype)))


def _restore_storage(main: MainValues, slot: Slot) -> None:
    param = slot.owned.param
    if param.shape != slot.data.shape or param.dtype != slot.data.dtype or param.device != slot.data.device:
        raise RuntimeError(
            f"{slot.owned.name!r} is now {param.dtype} {tuple(param.shape)} on {param.device}, but the optimizer was "
            f"set up for {slot.data.dtype} {tuple(slot.data.shape)} on {slot.data.device}: while fit runs a parameter "
            "keeps its dtype, shape and device"
        )
    main.bucket.finish_gather()
    slot.data.copy_(param)
    param.data = slot.data
