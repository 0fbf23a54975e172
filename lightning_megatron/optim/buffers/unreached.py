"""Parameters that this rank's backward did not reach, and other data-parallel ranks' may have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.buffer import Slot
from lightning_megatron.optim.buffers.main_values import MainValues
from lightning_megatron.recorder.file_format import Kind


class OtherRanks:
    """Finds out, once gradients are reduced, whether a parameter without a gradient here has one elsewhere.

    Where ranks share the update out, the owner of a parameter sees it in the sum: it is not zero. Where each rank
    updates all, ranks must not come to different answers: at the first step they agree which parameters are reached
    nowhere, and all look at the sums of these alone. One of the others has a gradient from then on, zero or not.

    Ranks wait for their device here, at steps in which something is out of reach, and at no others.
    """

    def __init__(self) -> None:
        self._nowhere: dict[Bucket, set[Slot]] = {}

    def ask(self, mains: Iterable[MainValues]) -> None:
        """Set ``filled`` of parameters that are to have a gradient on account of other ranks."""
        asked: list[tuple[Bucket, Slot, Tensor]] = []
        for main in mains:
            bucket = main.bucket
            if bucket.axis.size == 1:
                continue
            nowhere = None if bucket.sharded else self._agreed(bucket)
            for slot in bucket.slots:
                here = main.stretch(slot)
                if nowhere is not None and slot in nowhere:
                    asked.append((bucket, slot, bucket.own_grads[here.start : here.stop]))
                elif slot.filled or slot.arrived or not slot.owned.param.requires_grad:
                    continue
                elif nowhere is not None:
                    slot.filled = slot.lent = True
                elif here:
                    asked.append((bucket, slot, bucket.own_grads[here.start : here.stop]))
        if asked:
            answers = torch.stack([grad.any() for *_, grad in asked]).tolist()
            for (bucket, slot, _), has in zip(asked, answers, strict=True):
                slot.lent = has and not slot.filled
                slot.filled = has
                if has:
                    self._nowhere.get(bucket, set()).discard(slot)

    def _agreed(self, bucket: Bucket) -> set[Slot]:
        if bucket not in self._nowhere:
            reached = torch.tensor([float(slot.filled) for slot in bucket.slots], device=bucket.grads.device)
            bucket.axis.call(Kind.ALL_REDUCE, reached).run(dist.all_reduce, reached, group=bucket.axis.group)
            found = zip(bucket.slots, reached.tolist(), strict=True)
            self._nowhere[bucket] = {slot for slot, count in found if not count}
        return self._nowhere[bucket]
