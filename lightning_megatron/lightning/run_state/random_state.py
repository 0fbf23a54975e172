"""Every random generator of a process, as plain values that load without running code."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_megatron.rng import RNGStreams


def random_state(streams: RNGStreams) -> dict[str, Any]:
    """Python's, NumPy's and torch's generators, and the rank's own streams."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "streams": streams.state_dict(),
    }


def restore_random_state(state: dict[str, Any], streams: RNGStreams) -> None:
    """Restore all generators to a state of :func:`random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    streams.load_state_dict(state["streams"])
