"""Import of Megatron-LM's checkpoints.

``directory`` finds the iteration and its format; ``torch_dist`` and ``legacy`` read the two formats into whole tensors
under the names of ``names``; ``weight_map`` has the rules from these to ours; ``arguments`` reads the configuration
from Megatron's command line; ``sizes`` compares a configuration with the tensors; ``families`` finds what else than a
decoder a checkpoint holds.
"""

from lightning_megatron.checkpoint.formats.megatron.arguments import config_from_arguments
from lightning_megatron.checkpoint.formats.megatron.directory import is_megatron_directory, open_megatron
from lightning_megatron.checkpoint.formats.megatron.legacy import MegatronCheckpoint
from lightning_megatron.checkpoint.formats.megatron.sizes import size_problems

__all__ = [
    "MegatronCheckpoint",
    "config_from_arguments",
    "is_megatron_directory",
    "open_megatron",
    "size_problems",
]
