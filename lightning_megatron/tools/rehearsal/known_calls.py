"""Cache of calls whose work depends on shapes only: the first call of its kind runs, later ones replay its effects.

Peak bytes, operations and results of a call are those of the first call with the same shapes, so a rehearsal reports
the same figures with and without the cache. With it, the time of a rehearsal does not grow with the number of equal
layers, micro-batches and blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from lightning_megatron.by_shape import is_by_shape
from lightning_megatron.device import multiplies_bf16
from lightning_megatron.tools.rehearsal.tracker import StorageTracker, Watched
from lightning_megatron.tools.rehearsal.values import KnownValues, _tensors


@dataclass(frozen=True)
class _Like:
    """A tensor that a call has made.

    Attributes:
        storage: number of its storage among those of the call.
        nbytes: bytes of the storage.
        place: size, stride and offset.
        dtype: dtype.
        device: device.
    """

    storage: int
    nbytes: int
    place: tuple[tuple[int, ...], tuple[int, ...], int]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Known:
    """Recorded effects of a call.

    Attributes:
        most: most bytes of its tensors at a time.
        flops: floating-point operations.
        kernels: operations by name.
        results: its result, with :class:`_Like` in place of tensors.
    """

    most: int
    flops: int
    kernels: Mapping[str, int]
    results: Any


class KnownCalls:
    """Cache of calls by function and shapes; rehearsals of several ranks of a job may share one."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known | None] = {}

    def __len__(self) -> int:
        """Number of kinds of calls that have run."""
        return len(self._known)

    def of(self, tracker: StorageTracker, values: KnownValues) -> TorchFunctionMode:
        """Mode in which the calls of one rank run."""
        return CallsOfRank(self._known, tracker, values)


class CallsOfRank(TorchFunctionMode):
    """Mode that runs or replays the marked functions of one rank; other functions run as they are.

    Args:
        known: effects of calls that have run; ``None`` for one that cannot be replayed.
        tracker: bytes of the rank.
        values: known values of the rank.
    """

    def __init__(self, known: dict[Hashable, _Known | None], tracker: StorageTracker, values: KnownValues) -> None:
        super().__init__()
        self._known, self._tracker, self._values = known, tracker, values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or one that is marked."""
        kwargs = kwargs or {}
        if is_by_shape(func):
            with self:  # torch leaves the mode for a call, and marked functions may be inside
                return self.run(func.__wrapped__, args, kwargs)
        if func is multiplies_bf16:
            return True  # as on accelerators, on every processor
        if func is Tensor.backward or func is torch.autograd.backward:
            with self:
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function, or replay an equal call."""
        key = function, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), *_shapes((args, kwargs))
        try:
            found = self._known.get(key)
            is_new = key not in self._known
        except TypeError:  # an unhashable argument
            return function(*args, **kwargs)
        if found is not None:
            return self._repeat(found)
        if not is_new:
            return function(*args, **kwargs)
        with self._tracker.watched() as watched:
            out = function(*args, **kwargs)
        self._known[key] = self._learnt(watched, args, kwargs, out)
        return out

    def _learnt(self, watched: Watched, args: Any, kwargs: Any, out: Any) -> _Known | None:
        """Effects of a call that has ended; ``None`` if they are not just new tensors without known values."""
        storages: dict[int, int] = {}
        for tensor in _tensors(out):
            storages.setdefault(id(tensor.untyped_storage()), len(storages))
        sizes = {id(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in _tensors(out)}
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        if given & storages.keys() or watched.left != sum(sizes.values()):
            return None
        if any(tensor.requires_grad or self._has_values(tensor) for tensor in _tensors(out)):
            return None
        likes = _replaced(out, lambda tensor: _like(tensor, storages[id(tensor.untyped_storage())]))
        return _Known(watched.most, watched.flops, watched.kernels, likes)

    def _has_values(self, tensor: Tensor) -> bool:
        with self._tracker.paused():
            return tensor.numel() > 0 and self._values.of(tensor) is not None

    def _repeat(self, known: _Known) -> Any:
        """Replay the effects of a known call."""
        tracker = self._tracker
        tracker.count_work(known.kernels, known.flops)
        storages: dict[int, Tensor] = {}
        with tracker.paused():
            if known.most:
                passing = torch.empty(known.most, dtype=torch.uint8)
                tracker.see(passing)
                del passing
            return _replaced(known.results, lambda like: self._make(like, storages))

    def _make(self, like: _Like, storages: dict[int, Tensor]) -> Tensor:
        """A new tensor like one of the recorded results."""
        whole = storages.get(like.storage)
        if whole is None:
            whole = torch.empty(like.nbytes // like.dtype.itemsize, dtype=like.dtype, device=like.device)
            storages[like.storage] = whole
            self._tracker.see(whole)
        return whole.view(like.dtype).as_strided(*like.place)


def _backward(
    tensors: Any,
    *,
    gradient: Any = None,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward`` from edges of the graph: for them it does not look for overrides again.

    ``gradient`` is the argument of ``Tensor.backward``.
    """
    roots, given = _listed(tensors), gradient if grad_tensors is None else grad_tensors
    grads = [None] * len(roots) if given is None else _listed(given)
    grads = [torch.ones_like(x) if grad is None else grad for x, grad in zip(roots, grads, strict=True)]
    ends = None if inputs is None else _edges(_listed(inputs))
    torch.autograd.backward(_edges(roots), grads, retain_graph, create_graph, inputs=ends)


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, Tensor) else [*given]


def _edges(given: list[Any]) -> list[Any]:
    return [get_gradient_edge(each) if isinstance(each, Tensor) else each for each in given]


def _like(tensor: Tensor, number: int) -> _Like:
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return _Like(number, tensor.untyped_storage().nbytes(), place, tensor.dtype, tensor.device)


def _shapes(tree: Any) -> Iterator[Hashable]:
    """Arguments as a sequence of hashable values, with tensors reduced to their shapes and types."""
    if isinstance(tree, Tensor):
        yield tuple(tree.shape), tree.stride(), tree.dtype, tree.device, tree.requires_grad
    elif isinstance(tree, list | tuple):
        yield type(tree), len(tree)
        for item in tree:
            yield from _shapes(item)
    elif isinstance(tree, dict):
        for name, item in tree.items():
            yield name
            yield from _shapes(item)
    else:
        yield tree


def _replaced(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """Copy of a structure of results, with every tensor replaced."""
    if isinstance(tree, Tensor | _Like):
        return replace(tree)
    if isinstance(tree, tuple | list):
        items = [_replaced(item, replace) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree
