"""Bytes of all tensors of a process by cause, at every moment of a run, on fake tensors as on real ones.

torch's ``MemTracker`` knows parameters, gradients and optimizer state of a plain model. Here all of them are ranges of
flat buffers, and a cause is a place in the schedule too. So storages are counted here: each from the operation that
returns it first to the end of its last tensor.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_megatron.tools.rehearsal.errors import RehearsalError
from lightning_megatron.tools.rehearsal.torch_private import (
    DATA_DEPENDENT,
    ITEM,
    TorchDispatchMode,
    UnsupportedOperatorException,
    without_fake_tensors,
)
from lightning_megatron.tools.rehearsal.values import KnownValues, _tensors

COMMUNICATION = "communication buffers"
PIECES = "pieces of sums, on a CPU"
"""Bytes that only a CPU has: its reduce-scatter receives a piece from every rank before it adds them up."""
PIPELINE = "pipeline buffers"
_DEVICE = torch.ops.prim.device.default
_MESSAGES = {"c10d::send", "c10d::recv_"}
_EXCHANGE = "c10d::alltoall_base_"


def _formula_of(operation: Any) -> Any:
    """Formula of the FLOPs of an operation; torch has none for those in place, such as a sum of weight gradients."""
    name = operation.__name__
    usual = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return flop_registry.get(operation) or flop_registry.get(usual)


def _sent_nothing(collective: Any, args: Any) -> Any:
    """Run a collective for which torch has no version on fake tensors, without sending data.

    It is called with empty real tensors. Its outputs are its first argument and the first item of its result.
    """
    with without_fake_tensors():
        result = collective(*_emptied(args))
    return (args[0], *result[1:]) if isinstance(result, tuple) else result


def _emptied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_emptied(each) for each in value]
    return torch.empty(0, dtype=value.dtype) if isinstance(value, Tensor) else value


class Context(Protocol):
    """Place of a program that runs."""

    @property
    def cause(self) -> str:
        """Cause of the bytes that are made now."""
        ...

    @property
    def moment(self) -> str:
        """Name of this moment of the step."""
        ...

    @property
    def is_reducing(self) -> bool:
        """True if the newest collective is a reduce-scatter."""
        ...


@dataclass
class Watched:
    """Work of a part of a program, once it has ended.

    Attributes:
        most: most bytes beyond those of its beginning.
        left: bytes at its end beyond those.
        flops: floating-point operations.
        kernels: number of operations by name.
    """

    most: int = 0
    left: int = 0
    flops: int = 0
    kernels: Mapping[str, int] = field(default_factory=dict)


class _Storage(weakref.ref):
    """A storage that is alive.

    Attributes:
        key: identity of the storage.
        nbytes: bytes.
        cause: cause of the bytes.
        module: cause that they have if they outlive the forward that made them.
    """

    __slots__ = ("cause", "key", "module", "nbytes")

    key: int
    nbytes: int
    cause: str
    module: str | None


class StorageTracker(TorchDispatchMode):
    """Mode that counts the bytes of living storages.

    Args:
        context: place of the program.
        values: known values of fake tensors; ``None`` for a run on real ones.

    Attributes:
        total: bytes now.
        by_cause: bytes now, by cause.
        peak: most bytes since :meth:`restart`.
        peak_without_pieces: most bytes since then without :data:`PIECES`.
        peak_by_cause: bytes at that time.
        moment: name of that time.
        kernels: number of operations by name.
        flops: floating-point operations of matrix products and attention.
    """

    def __init__(self, context: Context, values: KnownValues | None = None) -> None:
        super().__init__()
        self._context, self._values = context, values
        self._alive: dict[int, _Storage] = {}
        self._temporary: list[_Storage] = []
        self._is_paused = False
        self.total = self._most = 0
        self.by_cause: Counter[str] = Counter()
        self.restart()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is counted."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def watched(self) -> Iterator[Watched]:
        """Context that measures the work inside it, known at its end; contexts may be nested."""
        found, before, most = Watched(), self.total, self._most
        flops, kernels = self.flops, self.kernels.copy()
        self._most = before
        try:
            yield found
        finally:
            found.most, found.left = self._most - before, self.total - before
            found.flops, found.kernels = self.flops - flops, self.kernels - kernels
            self._most = max(most, self._most)

    def count_work(self, kernels: Mapping[str, int], flops: int) -> None:
        """Count operations that have not run."""
        self.kernels.update(kernels)
        self.flops += flops

    def restart(self) -> None:
        """Reset the peak to the bytes of now, and the operation counts to 0."""
        self.peak, self.moment = self.total, self._context.moment
        self.peak_without_pieces = self._lower = self.total - self.by_cause[PIECES]
        self._highest: _Storage | None = None
        self._stands = True
        self._at_peak: Mapping[str, int] = {}
        self.kernels: Counter[str] = Counter()
        self.flops = 0

    @property
    def peak_by_cause(self) -> dict[str, int]:
        """Bytes at the peak, by cause."""
        found = self.by_cause if self._stands else self._at_peak
        return {cause: size for cause, size in found.items() if size}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE or self._is_paused:  # torch's own query of a tensor's device, by far the most frequent call
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if func is ITEM and self._values is not None:
            return self._values.item(args[0])
        try:
            out = func(*args, **kwargs)
        except DATA_DEPENDENT as error:
            out = self._from_values(func, args, kwargs, error)
        except (UnsupportedOperatorException, NotImplementedError) as error:
            if func.namespace != "c10d":
                raise RehearsalError(f"{func} does not run on fake tensors: {error}") from error
            out = _sent_nothing(func, args)
        self._count(func, args, kwargs, out)
        if self._values is not None:
            self._values.follow(func, args, kwargs, out)
        return out

    def _from_values(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        real = None if self._values is None else self._values.compute(func, args, kwargs)
        if real is None:
            raise RehearsalError(
                f"the result of {func} depends on values of tensors, of which a rehearsal has only shapes"
            ) from error
        assert self._values is not None
        if not isinstance(real, Tensor):
            return real
        out = torch.empty(real.shape, dtype=real.dtype, device=next(_tensors((args, kwargs))).device)
        self._values.know(out, real)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.name()
        self.kernels[name] += 1
        formula = _formula_of(func.overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        for tensor in _tensors(out):
            self.see(tensor)
        if name.startswith("c10d::"):
            self._name_buffers(name, args)

    def see(self, tensor: Tensor) -> None:
        """Count the bytes of a tensor until its storage is freed; one on the meta device has none."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._alive.get(key)
        if known is not None and known() is storage:
            if known.nbytes != storage.nbytes():
                self._resize(known, storage.nbytes())
            return
        size = storage.nbytes()
        if not size:
            return
        made = _Storage(storage, self._free)
        made.key, made.nbytes, made.cause, made.module = key, size, self._context.cause, None
        self._alive[key] = made
        self._add(made, size)

    def _add(self, storage: _Storage, size: int) -> None:
        self.total += size
        self._most = max(self._most, self.total)
        self.by_cause[storage.cause] += size
        if self.total > self.peak:
            self.peak, self._stands, self.moment = self.total, True, self._context.moment
        others = self.total - self.by_cause[PIECES]
        if others > self.peak_without_pieces:
            self._lower, self.peak_without_pieces, self._highest = self.peak_without_pieces, others, storage

    def _keep_peak(self) -> None:
        if self._stands:
            self._at_peak, self._stands = dict(self.by_cause), False

    def _free(self, storage: _Storage) -> None:
        self._keep_peak()
        self.total -= storage.nbytes
        self.by_cause[storage.cause] -= storage.nbytes
        if self._alive.get(storage.key) is storage:
            del self._alive[storage.key]

    def _resize(self, storage: _Storage, size: int) -> None:
        self._keep_peak()
        change, storage.nbytes = size - storage.nbytes, size
        self._add(storage, change)

    # Causes

    def name(self, cause: str, tensors: Iterable[Tensor]) -> None:
        """Set the cause of some tensors' bytes."""
        for tensor in tensors:
            self.see(tensor)
            known = self._alive.get(id(tensor.untyped_storage()))
            if known is not None:
                self._rename(known, cause)

    def _rename(self, storage: _Storage, cause: str) -> None:
        if storage.cause != cause:
            self.by_cause[storage.cause] -= storage.nbytes
            self.by_cause[cause] += storage.nbytes
            storage.cause = cause
        if cause == PIECES and storage is self._highest:  # made a moment ago, for the collective that begins
            self.peak_without_pieces, self._highest = self._lower, None

    def _name_buffers(self, name: str, args: Any) -> None:
        """Set the cause of buffers that are sent or received, unless they are parameters, gradients or states."""
        is_message = name in _MESSAGES
        for tensor in _tensors(args[:1]):
            known = self._alive.get(id(tensor.untyped_storage()))
            if known is None or known.cause in OWNED:
                continue
            if not is_message:
                known.module = known.module or known.cause
                self._temporary.append(known)
            sums = name == _EXCHANGE and self._context.is_reducing
            self._rename(known, PIPELINE if is_message else PIECES if sums else COMMUNICATION)

    def end_forward(self) -> None:
        """Count buffers that outlive the forward of a micro-batch as its activations."""
        for storage in self._temporary:
            if storage() is not None and storage.cause == COMMUNICATION and storage.module is not None:
                self._rename(storage, storage.module)
        self._temporary.clear()


PARAMETERS, GRADIENTS = "parameters", "gradients"
MAIN_PARAMETERS, OPTIMIZER_STATE = "main parameters", "optimizer state"
OWNED = frozenset({PARAMETERS, GRADIENTS, MAIN_PARAMETERS, OPTIMIZER_STATE})
