"""Checkpoints that outlive the layout: sharded, published at once, verified, loaded under any other layout."""

from lightning_megatron.checkpoint.async_save import BackgroundWriter
from lightning_megatron.checkpoint.directory.atomic_dir import remove, remove_unlinked
from lightning_megatron.checkpoint.directory.leftovers import remove_stale
from lightning_megatron.checkpoint.directory.newest import Candidate, candidates, newest_good
from lightning_megatron.checkpoint.fragment import Fragment
from lightning_megatron.checkpoint.integrity.fault import Fault
from lightning_megatron.checkpoint.integrity.finite_values import refuse_nonfinite
from lightning_megatron.checkpoint.integrity.hashes import Check, faults_of
from lightning_megatron.checkpoint.integrity.manifest import Progress
from lightning_megatron.checkpoint.integrity.save_guard import SaveGuard
from lightning_megatron.checkpoint.integrity.verify import verify
from lightning_megatron.checkpoint.load import Loaded, load
from lightning_megatron.checkpoint.save import PendingSave, save
from lightning_megatron.checkpoint.state_dict import (
    State,
    local_tensors,
    model_state,
    optimizer_state,
    regrouped,
    shared_state,
)
from lightning_megatron.errors import CheckpointError

__all__ = [
    "BackgroundWriter",
    "Candidate",
    "Check",
    "CheckpointError",
    "Fault",
    "Fragment",
    "Loaded",
    "PendingSave",
    "Progress",
    "SaveGuard",
    "State",
    "candidates",
    "faults_of",
    "load",
    "local_tensors",
    "model_state",
    "newest_good",
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
