"""The default generators of torch, NumPy and Python, from which data and the code of users draw."""

from __future__ import annotations

import ctypes
import hashlib
import random
import zlib
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_megatron import device as devices
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.mesh import ParallelMesh

_NAMES = "python", "numpy", "torch"


def generator_hashes() -> dict[str, str]:
    """Hash of the state of each generator, by name."""
    hashes = (hashlib.sha256(each).hexdigest() for each in _bytes_of(_states()))
    return dict(zip(_NAMES, hashes, strict=True))


def generators_checksum(device: torch.device) -> int:
    """Checksum of the states of all generators and the device's; cheap enough for every step."""
    checksum = 0
    for state in _bytes_of(_states(device)):
        checksum = zlib.crc32(state, checksum)
    return checksum


def copy_generators(mesh: ParallelMesh) -> None:
    """Give the ranks of each replica the generators of its first rank; every rank must call this."""
    found = all_gather_object(mesh, (mesh.dp.rank, _states(mesh.rng.device)))
    _restore(next(states for replica, states in found if replica == mesh.dp.rank), mesh.rng.device)


def seed_generators(seed: int) -> None:
    """Reseed all generators."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


@contextmanager
def kept_generators(device: torch.device) -> Generator[None, None, None]:
    """Restore all generators, the device's too, at the end: stages of a pipeline draw different amounts from them."""
    kept = _states(device)
    try:
        yield
    finally:
        _restore(kept, device)


def _states(device: torch.device | None = None) -> tuple[Any, ...]:
    own = () if device is None else (devices.rng_state(device),)
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), *own


def _restore(states: tuple[Any, ...], device: torch.device) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    devices.set_rng_state(states[3], device)


def _bytes_of(states: tuple[Any, ...]) -> Generator[bytes, None, None]:
    (version, numbers, gauss), (_, keys, *others), *tensors = states
    yield array("Q", numbers).tobytes() + repr((version, gauss)).encode()
    yield np.asarray(keys).tobytes() + repr(others).encode()
    for state in tensors:  # bytes without a tensor operation
        yield ctypes.string_at(state.data_ptr(), state.numel())
