"""Sharded checkpoints: published atomically, verified, and loadable under any other layout.

The names below are imported at their first use, so that a run without checkpoints does not wait for
``torch.distributed.checkpoint``.
"""

from typing import TYPE_CHECKING

from lightning_megatron.errors import CheckpointError
from lightning_megatron.lazy_exports import exports_of

if TYPE_CHECKING:
    from lightning_megatron.checkpoint.background.writer import BackgroundWriter
    from lightning_megatron.checkpoint.directory.atomic_dir import remove, remove_unlinked
    from lightning_megatron.checkpoint.directory.leftovers import remove_stale
    from lightning_megatron.checkpoint.formats.lightning_content import SavedName
    from lightning_megatron.checkpoint.formats.meta import objects_in
    from lightning_megatron.checkpoint.integrity.fault import Fault
    from lightning_megatron.checkpoint.integrity.finite_values import refuse_nonfinite
    from lightning_megatron.checkpoint.integrity.manifest import Progress
    from lightning_megatron.checkpoint.loading import Loaded, OpenCheckpoint, load, open_checkpoint
    from lightning_megatron.checkpoint.saving import PendingSave, SaveGuard, save
    from lightning_megatron.checkpoint.saving_file import PendingFile
    from lightning_megatron.checkpoint.select.hashes import Check, faults_of
    from lightning_megatron.checkpoint.select.newest import Candidate, candidates, newest_good
    from lightning_megatron.checkpoint.select.verify import verify
    from lightning_megatron.checkpoint.tensors.fragment import Fragment
    from lightning_megatron.checkpoint.tensors.state_dict import (
        State,
        local_tensors,
        model_state,
        optimizer_state,
        regrouped,
        shared_state,
    )

__all__ = [
    "BackgroundWriter",
    "Candidate",
    "Check",
    "CheckpointError",
    "Fault",
    "Fragment",
    "Loaded",
    "OpenCheckpoint",
    "PendingFile",
    "PendingSave",
    "Progress",
    "SaveGuard",
    "SavedName",
    "State",
    "candidates",
    "faults_of",
    "load",
    "local_tensors",
    "model_state",
    "newest_good",
    "objects_in",
    "open_checkpoint",
    "optimizer_state",
    "refuse_nonfinite",
    "regrouped",
    "remove",
    "remove_stale",
    "remove_unlinked",
    "save",
    "shared_state",
    "verify",
]

if not TYPE_CHECKING:  # a type checker would accept any name as public
    __getattr__, __dir__ = exports_of(__name__)
