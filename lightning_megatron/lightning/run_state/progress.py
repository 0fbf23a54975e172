"""Progress of a run in its data: Lightning counts batches, data modules and loaders count samples."""

from __future__ import annotations

from typing import Any

from lightning_megatron.data.loading.plain_loader import EpochPosition

_OWN = "plain_loaders"


def follow_batch_size(checkpoint: dict[str, Any], datamodule: Any) -> None:
    """Convert Lightning's count of batches to the present global batch size, so that the epoch ends with its samples.

    With more replicas and less accumulation, a batch of all replicas has more samples than those that were counted.

    Args:
        checkpoint: Lightning's dictionary, changed in place.
        datamodule: data module of this run; no action unless it has a ``global_batch_size``, and saved one, too.
    """
    before = checkpoint.get(type(datamodule).__qualname__, {}).get("global_batch_size")
    now = getattr(datamodule, "global_batch_size", None)
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if not before or not now or before == now or progress is None:
        return
    count = progress["current"]
    batches = count["ready"] * before // now
    # A checkpoint may be written before the last batch counts as completed: the difference stays.
    progress["current"] = {name: batches - (count["ready"] - value) for name, value in count.items()}


def put_positions_aside(checkpoint: dict[str, Any]) -> None:
    """Move positions of plain loaders in Lightning's dictionary to an entry that stock Lightning does not read.

    It refuses states of loaders that have none there. If any other loader has a state, all states stay where they are.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    states = loop.get("state_dict", {}).get("combined_loader", ())
    if states and all(map(EpochPosition.is_state, states)):
        loop[_OWN] = loop["state_dict"].pop("combined_loader")


def restore_positions(checkpoint: dict[str, Any]) -> None:
    """Undo :func:`put_positions_aside`."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    if _OWN in loop:
        loop["state_dict"]["combined_loader"] = loop.pop(_OWN)
