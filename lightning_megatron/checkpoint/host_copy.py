"""A state as it is now, on the host: what later steps do to the live one does not reach it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron import device as devices
from lightning_megatron.checkpoint.fragment import Fragment, Part
from lightning_megatron.checkpoint.state_dict import State
from lightning_megatron.params import Box


class HostCopy:
    """Memory on the host that holds one copy of a state, allocated by the first and used again by those that follow.

    Each part has memory of its own: torch.distributed.checkpoint copies once more what is a view of a larger storage.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, Box, torch.dtype], Tensor] = {}

    def of(self, state: State, replicas: bool = False) -> State:
        """Copy a state; the copy before is overwritten.

        Args:
            state: fragments of live memory, and plain values. Tensors that are yet to be made cannot be copied.
            replicas: copy also the parts that other ranks save.
        """
        waiting: set[torch.device] = set()

        def part_of(key: str, part: Part) -> Part:
            place = key, part.box, part.data.dtype
            if place not in self._memory:
                self._memory[place] = devices.host_memory(part.data)
            devices.copy_to_host(part.data, self._memory[place])
            waiting.add(part.data.device)
            return replace(part, data=self._memory[place])

        def copied(key: str, value: Any) -> Any:
            if not isinstance(value, Fragment):
                return copy.deepcopy(value)
            return replace(value, parts=tuple(part_of(key, part) for part in value.parts if replicas or part.write))

        found = {key: copied(key, value) for key, value in state.items()}
        for device in waiting:
            devices.synchronize(device)
        return found
