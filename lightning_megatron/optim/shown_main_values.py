"""Main values in the place of parameters that hold them rounded, for code that averages or exchanges parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_megatron.optim.buffers.main_values import MainValues
from lightning_megatron.optim.buffers.slot import Slot
from lightning_megatron.optim.zero import ShardedOptimizer


class ShownMainValues:
    """Shows main values as ``param.data`` from :meth:`show` to :meth:`take_back`, which all ranks call."""

    def __init__(self) -> None:
        self._shown: list[tuple[ShardedOptimizer, list[tuple[MainValues, Slot, Tensor]]]] = []
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    def widen(self, params: Iterable[nn.Parameter], narrow: torch.dtype, wide: torch.dtype) -> None:
        """Before there are main values, cast parameters of ``narrow`` to ``wide``, in which they will be."""
        self._before = [(param, param.data) for param in params if param.dtype == narrow]
        for param, values in self._before:
            param.data = values.to(wide)

    def narrow(self) -> None:
        """Undo :meth:`widen`."""
        for param, values in self._before:
            param.data = values
        self._before = []

    def show(self, optimizers: Iterable[ShardedOptimizer]) -> None:
        """Let each parameter have its main values, gathered where replicas share them; others stay as they are."""
        for optimizer in optimizers:
            optimizer.finish_param_gather()
            optimizer.copy_written_values()
            found = [(main, slot, value) for main in optimizer.rounded for slot, value in main.values()]
            for _, slot, value in found:
                slot.owned.param.data = value
            self._shown.append((optimizer, found))

    @torch.no_grad()
    def take_back(self) -> None:
        """Copy what was written to main values, and round them into the parameters."""
        shown = self._shown
        for main, slot, value in (each for _, found in shown for each in found):
            if slot.owned.param.data_ptr() != value.data_ptr():
                value.copy_(slot.owned.param)
            if main.bucket.sharded:
                own = main.local_range(slot)
                first = main.bucket.own_start + own.start - slot.start
                main.flat[own.start : own.stop].copy_(value.view(-1)[first : first + len(own)])
        self.hide()
        for optimizer, _ in shown:
            optimizer.start_param_gather()
            optimizer.finish_param_gather()

    def hide(self) -> None:
        """Give parameters their own storage back, without a word to other ranks: after an error."""
        for _, slot, _ in (each for _, found in self._shown for each in found):
            slot.owned.param.data = slot.data
        self._shown = []
