"""The default generators of torch, NumPy and Python, from which data and the code of users draw."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Collection, Generator
from contextlib import contextmanager

import numpy as np
import torch

from lightning_megatron import device as devices

_NAMES = "python", "numpy", "torch"


def generator_hashes() -> dict[str, str]:
    """Hash of the state of each generator, by name."""
    _, keys, position, *gauss = np.random.get_state()
    numpy = np.asarray(keys).tobytes() + repr((position, *gauss)).encode()
    state = torch.get_rng_state()  # its bytes without an operation, which in a rehearsal would have no values
    states = repr(random.getstate()).encode(), numpy, ctypes.string_at(state.data_ptr(), state.numel())
    hashes = (hashlib.sha256(each).hexdigest() for each in states)
    return dict(zip(_NAMES, hashes, strict=True))


def seed_generators(seed: int, names: Collection[str] = _NAMES) -> None:
    """Reseed the generators of these names."""
    if "python" in names:
        random.seed(seed)
    if "numpy" in names:
        np.random.seed(seed % (1 << 32))
    if "torch" in names:
        torch.manual_seed(seed)


@contextmanager
def kept_generators(device: torch.device) -> Generator[None, None, None]:
    """Restore all generators, the device's too, at the end: stages of a pipeline draw different amounts from them."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state(), devices.rng_state(device)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
        devices.set_rng_state(kept[3], device)
