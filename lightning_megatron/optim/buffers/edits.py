"""Edits of parameters and gradients between steps, carried over to main values and flat buffers.

In plain torch the parameter is the value and ``param.grad`` is the gradient. Here both are views of flat tensors, and
values may have a copy of higher precision; so values written, and tensors put in place of either, are looked for before
they would be overruled.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_megatron.optim.buffers.buffer import Slot
from lightning_megatron.optim.buffers.main_values import MainValues


def take_edited_grads(main: MainValues, optimizer: Optimizer) -> None:
    """Bring gradients that were assigned or set to ``None`` since they were complete to the main parameters.

    Raises:
        RuntimeError: for a gradient assigned where this rank does not hold the mean of all of it.
    """
    edited = [slot for slot in main.bucket.slots if slot.is_replaced or slot.is_cleared]
    if not edited:
        return
    for part in main.parts:
        if part.param.grad is not None and part.param.dtype != main.bucket.own_grads.dtype:
            # What has been done to the copy since, clipping for one.
            main.bucket.own_grads[part.here].copy_(part.param.grad.view(-1))
    for slot in edited:
        grad = slot.owned.param.grad
        if grad is None:
            slot.filled = False
            continue
        if main.bucket.sharded:
            refuse_replaced(slot)
        slot.take(grad)
    main.take_grads(optimizer, lambda slot: slot.filled)


def refuse_replaced(slot: Slot) -> None:
    """Say that a gradient cannot be assigned here."""
    raise RuntimeError(
        f"the gradient of {slot.owned.name!r} was replaced (param.grad = ...), but with several data-parallel ranks it "
        "is this rank's part of the mean: edit it in place, element by element (param.grad.mul_(...)), or in a hook "
        "on the parameter (param.register_hook); or set MegatronStrategy(distributed_optimizer=False) and replace it "
        "in on_before_optimizer_step, where it is the mean"
    )


@torch.no_grad()
def take_written_values(main: MainValues, everywhere: bool) -> None:
    """Bring values that somebody has written into parameters to their main values.

    A write in place shows in the parameter's version, new storage (``param.data = x``) in its address. A write through
    ``param.data`` in place leaves no trace: values are compared for that. Elements that were not changed keep
    their main values to the last bit.

    Args:
        main: main values of a bucket.
        everywhere: whether to compare values also where no trace is.

    Raises:
        RuntimeError: for new storage that does not fit.
    """
    written = []
    for slot in main.bucket.slots:
        param = slot.owned.param
        if slot.is_moved:
            _take_storage(main, slot)
        elif param._version == slot.version:
            continue
        written.append(slot)
        slot.version = param._version
    if main.is_view:
        return
    stretches = [range(main.flat.numel())] if everywhere else [main.stretch(slot) for slot in written]
    for here in stretches:
        value, kept = main.bucket.own_params[here.start : here.stop], main.flat[here.start : here.stop]
        kept.copy_(torch.where(kept.to(value.dtype) == value, kept, value.to(kept.dtype)))


def _take_storage(main: MainValues, slot: Slot) -> None:
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
