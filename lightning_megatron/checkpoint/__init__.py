"""Checkpoints that outlive the layout: sharded, published at once, verified, loaded under any other layout."""

from lightning_megatron.checkpoint.background import BackgroundWriter
from lightning_megatron.checkpoint.dcp import Loaded, load, save
from lightning_megatron.checkpoint.draft import Draft, complete
from lightning_megatron.checkpoint.fault import Fault
from lightning_megatron.checkpoint.fragment import Fragment
from lightning_megatron.checkpoint.guard import SaveGuard
from lightning_megatron.checkpoint.integrity import Check, faults_of
from lightning_megatron.checkpoint.leftovers import sweep
from lightning_megatron.checkpoint.manifest import Progress
from lightning_megatron.checkpoint.newest import Candidate, candidates, newest_good
from lightning_megatron.checkpoint.publish import remove, remove_unlinked
from lightning_megatron.checkpoint.sound_values import refuse_nonfinite
from lightning_megatron.checkpoint.state import (
    State,
    local_tensors,
    model_state,
    optimizer_state,
    regrouped,
    shared_state,
)
from lightning_megatron.checkpoint.together import CheckpointError
from lightning_megatron.checkpoint.verify import verify

__all__ = [
    "BackgroundWriter",
    "Candidate",
    "Check",
    "CheckpointError",
    "Draft",
    "Fault",
    "Fragment",
    "Loaded",
    "Progress",
    "SaveGuard",
    "State",
    "candidates",
    "complete",
    "faults_of",
    "load",
    "local_tensors",
    "model_state",
    "newest_good",
    "optimizer_state",
    "refuse_nonfinite",
    "regrouped",
    "remove",
    "remove_unlinked",
    "save",
    "shared_state",
    "sweep",
    "verify",
]
