"""When new parameter values arrive: in the order the forward needs them, waited for as late as possible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.optim.buffers.bucket import Bucket


class ParamGather:
    """Gathers the shares of all ranks after an optimizer step.

    With overlap the collectives run on while the next forward begins: a hook in front of each module waits for the
    buckets of the parameters that the module itself owns, no others. What may be read without such a call (parameters
    of the whole model's own, an embedding that only the output layer reads) is waited for where a step begins.

    Args:
        overlap: whether to return before the parameters are there.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._buckets: list[Bucket] = []
        self._overlap = overlap
        self._handles: list[RemovableHandle] = []
        self._uncalled: list[Bucket] = []

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Take charge of buckets, in the order in which forward needs them; before :meth:`install`."""
        self._buckets += buckets

    def start(self) -> None:
        """Begin all gathers; they are over on return unless overlap is on and :meth:`install` has been called."""
        for bucket in self._buckets:
            bucket.start_gather()
        if not (self._overlap and self._handles):
            self.finish()

    def finish_uncalled(self) -> None:
        """Wait for what no module's call waits for."""
        for bucket in self._uncalled:
            bucket.finish_gather()

    def finish(self) -> None:
        """Wait until all parameters are whole."""
        for bucket in self._buckets:
            bucket.finish_gather()

    def install(self, model: nn.Module) -> None:
        """Hook the modules of ``model`` that own parameters of the buckets; once more after buckets were added."""
        self._remove()
        where = {id(slot.owned.param): bucket for bucket in self._buckets for slot in bucket.slots}
        own = {id(where[id(p)]) for p in model.parameters(recurse=False) if id(p) in where}
        self._uncalled = [b for b in self._buckets if b.sharded and (b.key.tied_copy or id(b) in own)]
        for module in model.modules():
            owned = [where[id(p)] for p in module.parameters(recurse=_reads_its_parts(module)) if id(p) in where]
            buckets = [b for b in self._buckets if b.sharded and b in owned]
            if buckets:
                self._handles.append(module.register_forward_pre_hook(partial(_wait_for, buckets)))

    def close(self) -> None:
        """Wait, and remove the hooks."""
        self.finish()
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _reads_its_parts(module: nn.Module) -> bool:
    """True if a module may use parameters of its parts without calling them, as torch's attention does."""
    calls = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, calls)


def _wait_for(buckets: Sequence[Bucket], module: nn.Module, inputs: Any) -> None:
    for bucket in buckets:
        bucket.finish_gather()
