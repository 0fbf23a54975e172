"""Parameters unused in this rank's backward that may have a gradient on other data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_megatron.comm.collectives import all_reduce_in_place
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.main_values import MainValues
from lightning_megatron.optim.buffers.slot import Slot


class UnusedParams:
    """Detects, after the reduction, parameters without a gradient here that have one on another rank.

    With a sharded update, the owner of a parameter checks whether the sum of its gradients is zero. Where each rank
    updates all parameters, ranks must agree: at the first step they exchange which parameters are unused on every rank,
    and later check only the sums of these. The other parameters count as having a gradient, even a zero one.

    This synchronizes with the device only in steps with an unused parameter.
    """

    def __init__(self) -> None:
        self._unused_everywhere: dict[Bucket, set[Slot]] = {}

    def find_remote_grads(self, mains: Iterable[MainValues]) -> None:
        """Set ``has_grad`` of parameters that have a gradient on other ranks."""
        doubtful = [(main, slot) for main in mains if main.bucket.axis.size > 1 for slot in self._doubtful(main)]
        if not doubtful:
            return
        has_any = []
        for main, slot in doubtful:
            here = main.local_range(slot)
            has_any.append(main.bucket.own_grads[here.start : here.stop].any())
        for (main, slot), has in zip(doubtful, torch.stack(has_any).tolist(), strict=True):
            slot.grad_is_remote = has and not slot.has_grad
            slot.has_grad = has
            if has:
                self._unused_everywhere.get(main.bucket, set()).discard(slot)

    def _doubtful(self, main: MainValues) -> list[Slot]:
        """Parameters whose summed gradient must be checked for zero; sets ``has_grad`` of those known to have one."""
        bucket = main.bucket
        missing = [s for s in bucket.slots if s.owned.param.requires_grad and not (s.has_grad or s.arrived)]
        if bucket.sharded:
            return [slot for slot in missing if main.local_range(slot)]
        unused = self._agree(bucket)
        for slot in missing:
            if slot not in unused:
                slot.has_grad = slot.grad_is_remote = True
        return [slot for slot in bucket.slots if slot in unused]

    def _agree(self, bucket: Bucket) -> set[Slot]:
        if bucket not in self._unused_everywhere:
            used = torch.tensor([float(slot.has_grad) for slot in bucket.slots], device=bucket.grads.device)
            found = zip(bucket.slots, all_reduce_in_place(used, bucket.axis).tolist(), strict=True)
            self._unused_everywhere[bucket] = {slot for slot, count in found if not count}
        return self._unused_everywhere[bucket]
