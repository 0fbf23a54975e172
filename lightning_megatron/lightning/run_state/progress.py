"""Progress of a run whose batch size has changed: Lightning counts batches, data modules count samples."""

from __future__ import annotations

from typing import Any


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
