"""Overlap of communication with computation: gradients are sent during backward, parameters gathered during forward.

All ranks start their collectives in the same order: ranks that start two collectives in different orders hang or mix up
data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.comm.collectives import start_all_reduce_in_place
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.slot import Slot, hooks_run_without_gradient
from lightning_megatron.weight_grad_store import GradPlace

_Hooked = tuple[nn.Parameter, Callable[[Tensor], None], RemovableHandle]


class GradReducer:
    """Reduces buckets over data-parallel ranks while backward is still running.

    A hook on every parameter notes that its gradient of this step is complete. The reductions of buckets start strictly
    in the order given, which is the same on all ranks, although ranks may finish gradients in different orders.

    Attributes:
        complete: True if :meth:`finish` has run since gradients were last cleared or added to.
        is_last_backward: True during the last backward of the step for the parameters that it reaches.
        inspect: function called with each bucket when its local gradients are complete, before they are reduced.

    Args:
        tp: the ranks over which gradients of ``grad_sum_over_tp`` buckets are summed.
        dtype: dtype of gradients during communication; ``None`` for the dtype of the gradients.
        overlap: True to start reductions during the last backward, False to start them after it.
    """

    def __init__(self, tp: Axis, *, dtype: torch.dtype | None, overlap: bool) -> None:
        self.complete = False
        self.inspect: Callable[[Bucket], None] | None = None
        self.is_last_backward = False
        self._tp = tp
        self._dtype = dtype
        self._overlap = overlap
        self._buckets: list[Bucket] = []
        # Buckets whose gradients change after backward (sums over tp or tied copies), and so are reduced after that.
        self._late: list[Bucket] = []
        self._queue: list[Bucket] = []
        self._next = 0
        self._missing: dict[int, set[str]] | None = None
        self._handles: list[_Hooked] = []
        self._hooks_always_run = hooks_run_without_gradient()

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets, in the order in which backward completes them; not during a backward."""
        first = len(self._buckets)
        self._buckets += buckets
        self._late += [b for b in buckets if b.key.grad_sum_over_tp or b.key.reduce_late]
        self._queue += [b for b in buckets if b not in self._late]
        for i, bucket in enumerate(buckets, first):
            for k, slot in enumerate(bucket.slots):
                self._handles.append(_hooked(slot.owned.param, _grad_hook(ref(self), i, k)))

    def hook_last(self, has_others: Callable[[Tensor], bool]) -> None:
        """Let hooks that parameters have got besides ours run first, as they may change gradients that ours sends."""
        for number, (param, hook, handle) in enumerate(self._handles):
            if has_others(param):
                handle.remove()
                self._handles[number] = _hooked(param, hook)

    def __getstate__(self) -> dict[str, Any]:
        """State for ``copy`` and ``pickle``, without the hooks of this process; a copy is for inspection only."""
        return {**self.__dict__, "_handles": []}

    def _all_missing(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for bucket in self._queue:
            found[id(bucket)] = {slot.owned.name for slot in bucket.slots if slot.owned.param.requires_grad}
        return found

    def _arrived(self, bucket_index: int, slot_index: int) -> None:
        bucket = self._buckets[bucket_index]
        slot = bucket.slots[slot_index]
        if bucket.reduce_started and bucket.axis.size > 1:
            raise RuntimeError(
                f"a gradient of {slot.owned.name!r} arrived after its bucket had been sent to the other data-parallel "
                "ranks: a second backward ran although the one before was declared the last of the step. Declare only "
                "the last one (last_backward), or switch overlap_grad_reduce off."
            )
        if self.complete:
            if bucket.is_mean and slot.owned.param.grad is slot.grad:
                raise RuntimeError(
                    f"a gradient of {slot.owned.name!r} was added to one that has been averaged over ranks: call "
                    "self.manual_backward(loss) instead of loss.backward(), or zero_grad() before it"
                )
            self.continue_accumulation()
        slot.collect()
        if self.is_last_backward and self._overlap and not (bucket.key.grad_sum_over_tp or bucket.key.reduce_late):
            if self._missing is None:
                self._missing = self._all_missing()
            missing = self._missing[id(bucket)]
            missing.discard(slot.owned.name)
            if not missing:
                self._start_ready(self._missing)

    def place(self, bucket: Bucket, slot: Slot) -> GradPlace | None:
        """Place to which a layer's backward adds a gradient itself; ``None`` if the gradient must pass the hook.

        The hook still runs when all layers have added theirs, so that the bucket is sent as early as otherwise.
        """
        is_sent_now = self.is_last_backward and self._overlap and any(b.axis.size > 1 for b in self._buckets)
        if (is_sent_now and not self._hooks_always_run) or self.complete or bucket.reduce_started:
            return None
        return slot.place()

    def _start_ready(self, missing: dict[int, set[str]]) -> None:
        while self._next < len(self._queue) and not missing[id(self._queue[self._next])]:
            for slot in self._queue[self._next].slots:
                if not slot.arrived:  # frozen: the buffer still holds the gradient of an earlier step
                    slot.write_to_buffer()
            self._start(self._queue[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        if self.inspect is not None and bucket.axis.size > 1:
            self.inspect(bucket)
        bucket.start_reduce(self._dtype or bucket.grads.dtype)

    def finish(self) -> None:
        """Reduce the remaining buckets and wait for all; afterwards ``own_grads`` of each bucket are means."""
        for bucket in self._queue[self._next :]:
            self._start(bucket)
        if self._late:
            self.inspect_late()
        if self.inspect is not None:
            for bucket in self._queue:  # user hooks may have edited gradients that are not sent to other ranks
                self.inspect(bucket)
        if self._late:
            self._sum_over_tp()
        for bucket in self._late:
            self._start(bucket)
        self._end()

    def inspect_late(self) -> None:
        """Call ``inspect`` with the buckets whose gradients still change after backward."""
        if self.inspect is not None:
            for bucket in self._late:
                self.inspect(bucket)

    def _sum_over_tp(self) -> None:
        if self._tp.size > 1:
            summed = [bucket for bucket in self._late if bucket.key.grad_sum_over_tp]
            for pending in [start_all_reduce_in_place(bucket.grads, self._tp) for bucket in summed]:
                pending.wait()
            for bucket in summed:
                bucket.is_mean = True

    def _end(self) -> None:
        for bucket in self._queue + self._late:
            bucket.finish_reduce()
        self.is_last_backward = False
        self._next = 0
        self._missing = None

    def reset(self) -> None:
        """Discard the state of an interrupted step, after waiting for running reductions."""
        self._end()
        self.complete = False
        for bucket in self._buckets:
            bucket.is_mean = False

    def continue_accumulation(self) -> None:
        """Allow more gradients to be added to those of an earlier backward that were not cleared.

        In plain torch a gradient outlives the step. Here it has been averaged, and other ranks' shares are stale. So
        the averaging is undone such that the next reduction counts the earlier gradients once.
        """
        over = self.complete or self._next > 0
        if over:
            self._end()
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.is_empty:
                    slot.arrived = False
            if over and bucket.is_mean and not all(slot.is_empty for slot in bucket.slots):
                if self.complete and bucket.key.grad_sum_over_tp and self._tp.size > 1:
                    bucket.own_grads.div_(self._tp.size)
                bucket.undo_mean()
            bucket.is_mean = False
        self.complete = False

    def close(self) -> None:
        """Remove the hooks."""
        self.reset()
        for _, _, handle in self._handles:
            handle.remove()
        self._handles.clear()


class ParamGather:
    """Gathers the shares of all ranks after an optimizer step.

    With overlap the next forward begins while the collectives still run. A forward pre-hook of each module waits for
    the parameters that its forward reads: its own, and those of children that are not called. Parents read these
    directly (``F.linear(x, self.child.weight)``, or a method of the child other than its forward). The first training
    step, before any gather, shows which modules are called. :meth:`start` itself waits for all other parameters: those
    of the root module, whose ``training_step`` reads them at any time, and copies of tied ones.

    Args:
        overlap: True to return before the gathers have finished.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._buckets: list[Bucket] = []
        self._overlap, self._gathers = overlap, False
        self._model: nn.Module | None = None
        self._gates: dict[int, _Gate] = {}  # by id: the hash of a metric of torchmetrics changes with its state
        self._at_once: list[Bucket] | None = None  # not known before the first training step

    def __getstate__(self) -> dict[str, Any]:
        """State for ``copy`` and ``pickle``, without the hooks of this process; a copy is for inspection only."""
        return {**self.__dict__, "_gates": {}}

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets, in the order in which forward needs them; before :meth:`install`."""
        self._buckets += buckets
        self._gathers = any(bucket.sharded for bucket in self._buckets)

    def start(self) -> None:
        """Start all gathers; waits for them unless overlap is on and a training step has run."""
        if not self._gathers:
            return
        for bucket in self._buckets:
            bucket.start_gather()
        if self._at_once is None and any(gate.called for gate in self._gates.values()):
            self._at_once = self._assign()
        if self._at_once is None:
            self.finish()
            return
        for gate in self._gates.values():
            gate.waits = bool(gate.buckets)
        for bucket in self._at_once:
            bucket.finish_gather()

    def finish(self) -> None:
        """Wait until all parameters are complete."""
        for bucket in self._buckets:
            bucket.finish_gather()

    def install(self, model: nn.Module) -> None:
        """Hook the modules of ``model``, whose parameters the buckets hold; call it again after adding buckets."""
        self.close()
        self._model, self._at_once = model, None
        if self._overlap and self._gathers:
            # No gate for the root: its training_step reads its parameters, not its forward.
            self._gates = {id(module): _Gate(module) for module in model.modules() if module is not model}

    def _assign(self) -> list[Bucket]:
        """Assign buckets to the gates, and return the buckets to wait for at once."""
        assert self._model is not None
        bucket_of = {id(s.owned.param): bucket for bucket in self._buckets if bucket.sharded for s in bucket.slots}
        found: dict[int, set[Bucket]] = {}

        def walk(module: nn.Module, reader: nn.Module) -> None:
            """Assign a module's parameters to its own gate if it is called, else to the module that reads them."""
            gate, above = self._gates.get(id(module)), self._gates.get(id(reader))
            in_one_graph = gate is not None and gate.traced and above is not None and above.traced
            reader = module if gate is not None and gate.called and not in_one_graph else reader
            own = (bucket_of.get(id(param)) for param in module.parameters(recurse=False))
            found.setdefault(id(reader), set()).update(bucket for bucket in own if bucket is not None)
            for child in module.children():
                walk(child, reader)

        walk(self._model, self._model)
        for key, gate in [*self._gates.items()]:
            gate.buckets = [bucket for bucket in self._buckets if bucket in found.get(key, ())]
            if not gate.buckets and not gate.traced:  # code that was compiled with the hook would be compiled again
                gate.remove()
                del self._gates[key]
        at_once = found[id(self._model)]
        return [bucket for bucket in self._buckets if bucket in at_once or (bucket.sharded and bucket.key.tied_copy)]

    def close(self) -> None:
        """Wait, and remove the hooks."""
        self.finish()
        for gate in self._gates.values():
            gate.remove()
        self._gates.clear()


class _Gate:
    """Forward pre-hook of a module that waits for gathered parameters.

    Compiled code reads only ``waits``, and the wait itself stays outside of the graph. To avoid a graph break at every
    module, the outermost module of a compiled part waits for all parameters of the part.

    Attributes:
        module: the module.
        called: True if the module was called with gradients.
        traced: True if it was called while ``torch.compile`` traced it.
        buckets: buckets to wait for.
        waits: True if some of them may still be gathering.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module  # as long as it lives, its id is no other module's
        self.called = self.traced = self.waits = False
        self.buckets: list[Bucket] = []
        # Before hooks that compute weights from other parameters, as weight normalization does.
        self._handle = module.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self.called = True
        if torch.compiler.is_compiling():
            self.traced = True
        if self.waits:
            self._wait()

    @torch.compiler.disable
    def _wait(self) -> None:
        self.waits = False
        for bucket in self.buckets:
            bucket.finish_gather()

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def _hooked(param: nn.Parameter, hook: Callable[[Tensor], None]) -> _Hooked:
    return param, hook, param.register_post_accumulate_grad_hook(hook)


def _grad_hook(reducer: ref[GradReducer], bucket: int, slot: int) -> Callable[[Tensor], None]:
    # Python's garbage collector does not see these hooks in torch: one that refers to its parameter would keep the
    # model, its optimizer and their process groups alive as long as the process. Hence the weak reference.
    def hook(_: Tensor) -> None:
        found = reducer()
        if found is not None:
            found._arrived(bucket, slot)

    return hook
