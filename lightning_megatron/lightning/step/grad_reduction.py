"""The dtypes in which gradients are accumulated, and summed over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info

from lightning_megatron.config.layout import HasBatchShape
from lightning_megatron.device import HPU, DeviceKind
from lightning_megatron.lightning.compat._private import training_data
from lightning_megatron.optim.core.bf16_sums import allows_bf16_sums

GradReduceDtype = Literal["fp32", "bf16"]
MainGradsDtype = Literal["fp32", "bf16", "auto"]
GRAD_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def accumulation_dtype(
    requested: MainGradsDtype | None, default: torch.dtype, micro_batches_per_step: int | None, data_parallel_size: int
) -> torch.dtype:
    """Dtype in which the gradients of micro-batches are accumulated; logged if it follows Intel's rule.

    Args:
        requested: the strategy's argument; ``"auto"`` for Intel's rule.
        default: dtype of the precision, for ``None``.
        micro_batches_per_step: forwards of one optimizer step on one replica; ``None`` if unknown, which gives fp32.
        data_parallel_size: number of replicas.
    """
    if requested == "auto":
        return _by_rule("accumulated", "main_grads_dtype", micro_batches_per_step, data_parallel_size)
    return default if requested is None else GRAD_DTYPES[requested]


def reduce_dtype(
    requested: GradReduceDtype | None,
    kind: DeviceKind,
    params: torch.dtype,
    micro_batches_per_step: int | None,
    data_parallel_size: int,
) -> torch.dtype | None:
    """Dtype in which gradients are summed over ranks; logged if it follows Intel's rule.

    Args:
        requested: the strategy's argument; ``None`` for Intel's rule on Gaudi.
        kind: kind of the devices.
        params: dtype of the parameters.
        micro_batches_per_step: forwards of one optimizer step on one replica; ``None`` if unknown, which gives fp32.
        data_parallel_size: number of replicas.

    Returns:
        The dtype; ``None`` to sum in the dtype in which gradients are accumulated.
    """
    if requested is not None:
        return GRAD_DTYPES[requested]
    if kind is not HPU or params != torch.bfloat16:
        return None
    return _by_rule("summed over ranks", "grad_reduce_dtype", micro_batches_per_step, data_parallel_size)


def _by_rule(summed: str, argument: str, micro_batches_per_step: int | None, data_parallel_size: int) -> torch.dtype:
    if micro_batches_per_step is None:
        name, why = "fp32", "the batch size is unknown before training"
    else:
        name = "bf16" if allows_bf16_sums(micro_batches_per_step, data_parallel_size) else "fp32"
        summands = micro_batches_per_step * data_parallel_size
        why = f"{micro_batches_per_step} micro-batches x dp {data_parallel_size} = {summands} summands"
    rank_zero_info(f"gradients are {summed} in {name} ({why}; {argument} overrides this)")
    return GRAD_DTYPES[name]


def micro_batches_of_step(trainer: Trainer, micro_batch_size: int | None) -> int | None:
    """Most forwards of one optimizer step on one replica in any epoch; ``None`` if the batch size is unknown."""
    accumulated = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            accumulated += callback.scheduling.values()
    if micro_batch_size is None:
        return max(accumulated)
    batch = loader_batch_size(training_data(trainer))
    return None if batch is None else max(accumulated) * -(-batch // micro_batch_size)


def loader_batch_size(data: Any) -> int | None:
    """Samples of one batch of a data module or loader, the largest of several loaders; ``None`` if unknown."""
    if isinstance(data, HasBatchShape):
        return data.batch_shape.batch_size
    if isinstance(data, Mapping | list | tuple):
        sizes = [loader_batch_size(item) for item in (data.values() if isinstance(data, Mapping) else data)]
        return None if None in sizes else max((size for size in sizes if size), default=None)
    size = getattr(data, "batch_size", None)
    size = getattr(getattr(data, "batch_sampler", None), "batch_size", None) if size is None else size
    return size if isinstance(size, int) else None


def declared_batch_size(trainer: Trainer, loader: int = 0) -> int | None:
    """Samples of a batch by the present stage's loader, else by the data module or module; ``None`` if unknown.

    ``loader`` is the index of an evaluation's loader.
    """
    assert trainer.state.stage is not None
    stage = trainer.state.stage.dataloader_prefix
    data = trainer.train_dataloader if stage == "train" else getattr(trainer, f"{stage}_dataloaders")
    if stage != "train":
        data = CombinedLoader(data).flattened[loader]
    found = (
        loader_batch_size(source) for source in (data, getattr(trainer, "datamodule", None), trainer.lightning_module)
    )
    return next((size for size in found if size is not None), None)
