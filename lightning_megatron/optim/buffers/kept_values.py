"""Main values between two trainings of a model: parameters of fewer bits hold them rounded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_megatron.params import ParamShard


class KeptValues:
    """Main values of a contiguous range of one flattened local parameter.

    Args:
        name: global name of the parameter.
        param: the parameter.
        start: first element of the range.
        values: ``[n]``, main values.
    """

    def __init__(self, name: str, param: nn.Parameter, start: int, values: Tensor) -> None:
        self.name, self.start, self.values = name, start, values
        self.shape = tuple(param.shape)
        self._param, self._version = param, param._version

    @property
    def is_valid(self) -> bool:
        """True if nobody has written the parameter since, such as by ``load_state_dict``."""
        return self._param._version == self._version


@dataclass(frozen=True)
class KeptModel:
    """Main values that an optimizer has left on this rank.

    Attributes:
        dtype: dtype of the parameters that it has trained, which hold the values rounded.
        values: the values; none where this rank had no share.
    """

    dtype: torch.dtype
    values: tuple[KeptValues, ...]

    def valid(self) -> KeptModel:
        """The values of parameters that nobody has written since."""
        return replace(self, values=tuple(kept for kept in self.values if kept.is_valid))

    def fill(self, shards: Iterable[ParamShard], dtype: torch.dtype) -> None:
        """Copy the values to ``shards``, of parameters of ``dtype``, where these are still what they round to."""
        found: dict[tuple[str, tuple[int, ...]], list[KeptValues]] = {}
        for kept in self.values:
            found.setdefault((kept.name, kept.shape), []).append(kept)
        for shard in shards:
            for kept in found.get((shard.name, shard.local_shape), ()):
                first, last = max(kept.start, shard.start), min(kept.start + kept.values.numel(), shard.end)
                if first < last:
                    values = kept.values[first - kept.start : last - kept.start].to(shard.main.device)
                    own = shard.main[first - shard.start : last - shard.start]
                    rounded = values.to(self.dtype).to(dtype).to(own.dtype)
                    own.copy_(torch.where(rounded == own, values.to(own.dtype), own))
