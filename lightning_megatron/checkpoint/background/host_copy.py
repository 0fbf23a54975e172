"""Copy of a state in host memory; a part of it may be copied while training goes on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron import device as devices
from lightning_megatron.checkpoint.tensors.fragment import Chunk, Fragment
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.errors import CheckpointError
from lightning_megatron.params import Box

_SHOWN = 3


class HostCopy:
    """Host memory for one copy of a state, allocated once and reused by later copies.

    Chunks of a device lie in few pieces of page-locked memory. Keys that show the same memory (fp32 parameters, which
    are their own main values) share one copy.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, Box, torch.dtype], Tensor] = {}

    def begin(self, state: State, late: Collection[str] = (), replicas: bool = False) -> StateCopy:
        """Copy a state over the previous copy, except for a part that may be copied later.

        Args:
            state: fragments of live memory, and plain values; lazy tensors cannot be copied.
            late: keys of fragments in host memory that :meth:`StateCopy.finish` copies.
            replicas: True to copy also the chunks that other ranks save.
        """
        waiting: set[torch.device] = set()
        seen: dict[Any, Tensor] = {}

        def early(key: str, chunk: Chunk) -> Chunk:
            data = chunk.data
            same = (data.data_ptr(), data.shape, data.stride(), data.dtype) if data.is_cpu else (key, chunk.box)
            if same not in seen:
                seen[same] = self.memory_for(key, chunk)
                devices.copy_to_host(data, seen[same])
                waiting.add(data.device)
            return replace(chunk, data=seen[same])

        def copied(key: str, value: Any) -> Any:
            if not isinstance(value, Fragment):
                return copy.deepcopy(value)
            chunks = [chunk for chunk in value.chunks if replicas or chunk.write]
            return replace(value, chunks=tuple(chunks if key in late else (early(key, chunk) for chunk in chunks)))

        self._reserve(state, late, replicas)
        found = {key: copied(key, value) for key, value in state.items()}
        for device in waiting:
            devices.synchronize(device)
        return StateCopy(found, late, self.memory_for)

    def _reserve(self, state: State, late: Collection[str], replicas: bool) -> None:
        """Allocate the memory of all chunks on a device that have none yet."""
        early = {key: value for key, value in state.items() if isinstance(value, Fragment) and key not in late}
        chunks = [(key, chunk) for key, value in early.items() for chunk in value.chunks if replicas or chunk.write]
        new = {_place(*each): each[1].data for each in chunks if not each[1].data.is_cpu}
        new = {place: data for place, data in new.items() if place not in self._memory}
        self._memory |= zip(new, devices.host_memories(list(new.values())), strict=True)

    def memory_for(self, key: str, chunk: Chunk) -> Tensor:
        """Host memory for copies of a chunk; it may still hold an earlier copy."""
        place = _place(key, chunk)
        if place not in self._memory:
            self._memory[place] = devices.host_memory(chunk.data)
        return self._memory[place]


def _place(key: str, chunk: Chunk) -> tuple[str, Box, torch.dtype]:
    return key, chunk.box, chunk.data.dtype


class StateCopy:
    """A state of which a part is still live memory: one thread calls :meth:`finish`, others :meth:`wait`.

    Args:
        state: the state; fragments under late keys show live memory.
        late: keys of fragments that are still to be copied; none may be written before :meth:`wait` has returned.
        memory_for: function that returns the memory to copy a chunk to.
    """

    def __init__(self, state: State, late: Collection[str], memory_for: Callable[[str, Chunk], Tensor]) -> None:
        self._state, self._memory_for = state, memory_for
        self._late: dict[str, Fragment] = {key: state[key] for key in late if key in state}
        self._versions = self._versions_now()
        self._is_copied = threading.Event()
        if not self._late:
            self._is_copied.set()

    def finish(self) -> State:
        """Copy the rest, on the calling thread alone, and return a state that refers to no live memory.

        Raises:
            CheckpointError: if the live memory was written before it was copied.
        """
        try:
            for key, value in self._late.items():
                self._state[key] = replace(value, chunks=tuple(self._copied(key, chunk) for chunk in value.chunks))
            written = [key for key, versions in self._versions_now().items() if versions != self._versions[key]]
        finally:
            self.release()
        if written:
            more = f" and {len(written) - _SHOWN} more" if len(written) > _SHOWN else ""
            raise CheckpointError(
                f"{', '.join(written[:_SHOWN])}{more} was written after the save and before the next optimizer step,"
                " while it was copied in the background: call trainer.strategy.finish_copy() before you write into"
                " the state of an optimizer"
            )
        return self._state

    def wait(self) -> None:
        """Wait until all is copied; live memory may be written afterwards."""
        self._is_copied.wait()

    def release(self) -> None:
        """Wake all waiting threads, even if copying has failed."""
        self._late = {}
        self._is_copied.set()

    def _copied(self, key: str, chunk: Chunk) -> Chunk:
        memory = self._memory_for(key, chunk)
        devices.copy_alone(chunk.data, memory)
        return replace(chunk, data=memory)

    def _versions_now(self) -> dict[str, list[int]]:
        """Write counters of the live memory, by key. Writes through ``tensor.data`` are not counted."""
        return {key: [chunk.data._version for chunk in value.chunks] for key, value in self._late.items()}
