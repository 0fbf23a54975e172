"""Weights from files: of other programs, of this package, into modules with and without a Trainer.

The names below are imported at their first use.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import exports_of

if TYPE_CHECKING:
    from lightning_megatron.lightning.pretrained.adapter_base import path_of_base, resume_adapter
    from lightning_megatron.lightning.pretrained.config_check import refuse_unfilled_checkpoint
    from lightning_megatron.lightning.pretrained.hugging_face import (
        checked_hf_config,
        hf_config,
        hf_module_class,
        hf_problems,
        take_settings,
        weight_problems,
    )
    from lightning_megatron.lightning.pretrained.load_weights import PendingWeights

__all__ = [
    "PendingWeights",
    "checked_hf_config",
    "hf_config",
    "hf_module_class",
    "hf_problems",
    "path_of_base",
    "refuse_unfilled_checkpoint",
    "resume_adapter",
    "take_settings",
    "weight_problems",
]

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    __getattr__, __dir__ = exports_of(__name__)
