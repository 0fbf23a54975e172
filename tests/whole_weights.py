"""Whole weights into a model of any layout."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_megatron.params import ShardRanks, copy_slice, named_weights


def load_full(model: nn.Module, tensors: Mapping[str, Tensor], ranks: ShardRanks) -> None:
    """Copy this rank's slices of whole weights into a model; names that this part of it lacks are ignored."""
    for name, param, spec in named_weights(model):
        copy_slice(name, param, spec, tensors[name], ranks)
