"""Parameters unused in this rank's backward that may have a gradient on other data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce_in_place
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.main_values import MainValues
from lightning_megatron.optim.buffers.slot import Slot


class UnusedParams:
    """Detects, after the reduction, parameters without a gradient here that have one on another rank.

    With a sharded update the owner of a parameter sees it in the sum, which is not zero. Where each rank updates all
    parameters, ranks must agree: at the first step they exchange which parameters are unused on every rank, and later
    check the sums of these alone. The other parameters always have a gradient, zero or not.

    Ranks wait for their device here only in steps with an unused parameter.
    """

    def __init__(self) -> None:
        self._unused_everywhere: dict[Bucket, set[Slot]] = {}

    def find_remote_grads(self, mains: Iterable[MainValues]) -> None:
        """Set ``has_grad`` of parameters that have a gradient on other ranks."""
        candidates: list[tuple[Bucket, Slot, Tensor]] = []
        for main in mains:
            bucket = main.bucket
            if bucket.axis.size == 1:
                continue
            unused = None if bucket.sharded else self._agree(bucket)
            for slot in bucket.slots:
                here = main.local_range(slot)
                if unused is not None and slot in unused:
                    candidates.append((bucket, slot, bucket.own_grads[here.start : here.stop]))
                elif slot.has_grad or slot.arrived or not slot.owned.param.requires_grad:
                    continue
                elif unused is not None:
                    slot.has_grad = slot.grad_is_remote = True
                elif here:
                    candidates.append((bucket, slot, bucket.own_grads[here.start : here.stop]))
        if candidates:
            has_any = torch.stack([grad.any() for *_, grad in candidates]).tolist()
            for (bucket, slot, _), has in zip(candidates, has_any, strict=True):
                slot.grad_is_remote = has and not slot.has_grad
                slot.has_grad = has
                if has:
                    self._unused_everywhere.get(bucket, set()).discard(slot)

    def _agree(self, bucket: Bucket) -> set[Slot]:
        if bucket not in self._unused_everywhere:
            used = torch.tensor([float(slot.has_grad) for slot in bucket.slots], device=bucket.grads.device)
            found = zip(bucket.slots, all_reduce_in_place(used, bucket.axis).tolist(), strict=True)
            self._unused_everywhere[bucket] = {slot for slot, count in found if not count}
        return self._unused_everywhere[bucket]
