"""Kernels of a program, in numbers: memory traffic of elementwise kernels, number of launches, fusion, overlap."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.tools.planning.core.device_file import DeviceSpec


@dataclass(frozen=True)
class Software:
    """Properties of a program's kernels that the time of a step depends on.

    Attributes:
        passes: bytes that elementwise kernels move, relative to one fused kernel for each norm, sum, rotation and
            activation.
        kernels: kernels of a layer's forward; a backward has twice as many.
        expert_kernels: kernels that experts add to it.
        kernels_per_expert: kernels that each expert of the rank adds to it, where every expert has its own products.
        tp_overlap: share of tensor-parallel communication that overlaps with matrix products, forward and backward.
        loss_in_forward: True if the output layer computes its gradients together with its logits, chunk by chunk.
        fused_loss: True if softmax, loss and gradient are one kernel that writes the gradient over the logits.
        fused_ring: True if the attention of a ring keeps no scores in memory.
        fused_sum: True if weight gradients are added to their sum by the matrix product.
        sum_block: elements of a 16-bit weight gradient that one kernel adds to the fp32 sum; 0 for all
            (``ops/accumulate.py``).
        loss_chunks: chunks of tokens in which the output layer computes 16-bit losses (``layers/cross_entropy.py``).
    """

    passes: float = 1.5
    kernels: int = 40
    expert_kernels: int = 60
    kernels_per_expert: int = 0
    tp_overlap: float = 0.0
    loss_in_forward: bool = True
    fused_loss: bool = False
    fused_ring: bool = False
    fused_sum: bool = False
    sum_block: int = 0
    loss_chunks: int = 8


def software_of(device: DeviceSpec, *, compiled: bool = False) -> Software:
    """This library on a device.

    Args:
        compiled: True with ``compile=True``: layers leave sums of gradients to autograd, which adds them whole.
    """
    if compiled:
        return Software(passes=1.0, kernels=15, fused_loss=device.asynchronous)
    return Software(fused_sum=device.adds_products, sum_block=0 if device.asynchronous else 1 << 18)
