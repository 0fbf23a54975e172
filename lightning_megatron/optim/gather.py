"""When new parameter values arrive: in the order the forward needs them, waited for as late as possible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.optim.bucket import Bucket


class ParamGather:
    """Gathers the shares of all ranks after an optimizer step.

    With overlap the collectives run on while the next forward begins: a hook in front of each module waits for the
    buckets of the parameters that the module itself owns, no others.

    Args:
        buckets: all buckets, in the order in which forward needs them.
        overlap: whether to return before the parameters are there.
    """

    def __init__(self, buckets: Sequence[Bucket], *, overlap: bool) -> None:
        self._buckets = list(buckets)
        self._overlap = overlap
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Begin all gathers; they are over on return unless overlap is on and :meth:`install` has been called."""
        for bucket in self._buckets:
            bucket.start_gather()
        if not (self._overlap and self._handles):
            self.finish()

    def finish(self) -> None:
        """Wait until all parameters are whole."""
        for bucket in self._buckets:
            bucket.finish_gather()

    def install(self, model: nn.Module) -> None:
        """Hook the modules of ``model`` that own parameters of the buckets."""
        where = {id(slot.owned.param): bucket for bucket in self._buckets for slot in bucket.slots}
        for module in model.modules():
            owned = [where[id(p)] for p in module.parameters(recurse=False) if id(p) in where]
            buckets = [b for b in self._buckets if b.sharded and b in owned]
            if buckets:
                self._handles.append(module.register_forward_pre_hook(partial(_wait_for, buckets)))

    def close(self) -> None:
        """Wait, and remove the hooks."""
        self.finish()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _wait_for(buckets: Sequence[Bucket], module: nn.Module, inputs: Any) -> None:
    for bucket in buckets:
        bucket.finish_gather()
