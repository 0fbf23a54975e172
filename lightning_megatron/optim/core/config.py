"""Switches of the distributed optimizer, as one value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_megatron.optim.core.update_scope import OptimizerRef


@dataclass(frozen=True)
class DistributedOptimizerConfig:
    """Switches of :class:`~lightning_megatron.optim.zero.ShardedOptimizer`."""

    shard: bool = True
    """True if each data-parallel rank updates one share of the parameters, False if each updates all."""

    main_dtype: torch.dtype | None = torch.float32
    """Dtype of main parameters: fp32 for mixed precision, ``None`` for the dtype of the parameters.

    Where it equals the dtype of the parameters, main parameters are views of them and take no memory.
    """

    grad_dtype: torch.dtype = torch.float32
    """Dtype in which gradients are accumulated; the dtype of the parameters if that is wider."""

    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed over ranks; ``None`` for ``grad_dtype``."""

    overlap_grad_reduce: bool = True
    """Send gradients during the last backward."""

    overlap_param_gather: bool = True
    """Gather parameters during the next forward; needs ``install_gather_hooks``."""

    bucket_size: int | None = None
    """Number of elements sent at once; ``None`` for Megatron-LM's ``max(40e6, 1e6 x ranks)``."""

    elementwise: tuple[OptimizerRef, ...] = ()
    """Optimizers, besides the known ones, whose update of an element depends on that element alone."""

    alias_grads: bool | None = None
    """True if ``param.grad`` is a view of the flat gradient; ``None`` for a view where torch supports it."""

    keep_param_grads: bool = False
    """Leave gradients that are no views in ``param.grad`` until the step, so that the user can clear and replace them.

    They are then summed in the parameter's dtype (manual optimization).
    """
