"""The dtype in which gradients are summed over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron.config.layout import HasBatchShape
from lightning_megatron.device import HPU, DeviceKind
from lightning_megatron.lightning._private import training_data
from lightning_megatron.optim.loss_scale import grad_reduce_dtype_rule

GradReduceDtype = Literal["fp32", "bf16"]
REDUCE_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def reduce_dtype(
    asked: GradReduceDtype | None, kind: DeviceKind, params: torch.dtype, micro_batches: int | None, dp: int
) -> torch.dtype | None:
    """Dtype of gradients on the wire, said in the log where it follows a rule.

    Args:
        asked: argument of the strategy; ``None`` leaves it to Intel's rule on Gaudi.
        kind: of the devices.
        params: dtype of the parameters.
        micro_batches: of one optimizer step on one replica; ``None`` if unknown, which counts as many.
        dp: replicas.

    Returns:
        The dtype, ``None`` for that in which gradients are accumulated.
    """
    if asked is not None:
        return REDUCE_DTYPES[asked]
    if kind is not HPU or params != torch.bfloat16:
        return None
    if micro_batches is None:
        chosen, why = torch.float32, "the batch size is unknown before training"
    else:
        chosen = grad_reduce_dtype_rule(micro_batches, dp)
        why = f"{micro_batches} micro-batches x dp {dp} = {micro_batches * dp} summands"
    name = next(name for name, dtype in REDUCE_DTYPES.items() if dtype is chosen)
    rank_zero_info(f"gradients are summed over ranks in {name} ({why}; grad_reduce_dtype chooses otherwise)")
    return chosen


def micro_batches_of_step(trainer: Trainer, micro_batch_size: int | None) -> int | None:
    """Forwards of one optimizer step on one replica, the most of any epoch; ``None`` if nobody says the batch size."""
    accumulated = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            accumulated += callback.scheduling.values()
    if micro_batch_size is None:
        return max(accumulated)
    batch = _batch_size(getattr(trainer, "datamodule", None) or training_data(trainer))
    return None if batch is None else max(accumulated) * -(-batch // micro_batch_size)


def _batch_size(data: Any) -> int | None:
    """Samples of one batch of a data module or loader, if it says so; of several loaders the largest."""
    if isinstance(data, HasBatchShape):
        return data.batch_shape.batch_size
    if isinstance(data, Mapping | list | tuple):
        sizes = [_batch_size(item) for item in (data.values() if isinstance(data, Mapping) else data)]
        return None if None in sizes else max((size for size in sizes if size), default=None)
    size = getattr(data, "batch_size", None)
    size = getattr(getattr(data, "batch_sampler", None), "batch_size", None) if size is None else size
    return size if isinstance(size, int) else None
