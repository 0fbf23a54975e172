"""The state of a run in checkpoints: loops, callbacks, random generators, versions of the weights.

The names below are imported at their first use.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import exports_of

if TYPE_CHECKING:
    from lightning_megatron.lightning.checkpointing.optimizer_file import export_optimizers, import_optimizers
    from lightning_megatron.lightning.checkpointing.trainer_state import (
        LoadedModel,
        load_model,
        load_optimizers,
        save_trainer_checkpoint,
    )
    from lightning_megatron.lightning.run_state.hyper_parameters import build_module, target_device
    from lightning_megatron.lightning.run_state.other_settings import tell_other_settings

__all__ = [
    "LoadedModel",
    "build_module",
    "export_optimizers",
    "import_optimizers",
    "load_model",
    "load_optimizers",
    "save_trainer_checkpoint",
    "target_device",
    "tell_other_settings",
]

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    __getattr__, __dir__ = exports_of(__name__)
