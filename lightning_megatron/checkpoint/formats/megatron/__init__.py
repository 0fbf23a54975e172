"""Checkpoints of Megatron-LM read as ours: one file a concern, in the order in which they are met.

``directory`` finds out what lies at a path, ``torch_dist`` and ``legacy`` read the two formats into whole tensors under
the names of ``names``, ``rules`` turns these into ours, ``arguments`` reads the shape of the model, and ``sizes``
compares a shape with the tensors.
"""

from lightning_megatron.checkpoint.formats.megatron.arguments import config_from_arguments
from lightning_megatron.checkpoint.formats.megatron.directory import (
    MegatronCheckpoint,
    is_megatron_directory,
    open_megatron,
)
from lightning_megatron.checkpoint.formats.megatron.sizes import size_problems
from lightning_megatron.checkpoint.formats.megatron.weight_map import weight_map

__all__ = [
    "MegatronCheckpoint",
    "config_from_arguments",
    "is_megatron_directory",
    "open_megatron",
    "size_problems",
    "weight_map",
]
