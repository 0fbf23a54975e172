"""DataLoaders of ranks that read the same samples."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_megatron import device as devices
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.machine.host import shared_memory, shorten_socket_paths


def prepared(loader: Any, device: torch.device, dp_rank: int, *, orders: bool) -> Any:
    """A loader with safe workers, and with random numbers that peers share.

    Args:
        loader: what the user has made, or Lightning from it.
        device: device of this rank.
        dp_rank: number of its replica.
        orders: True to choose the order of a shuffled loader; see :func:`shuffle_by_epoch`.
    """
    start_workers_safely(loader, device)
    if orders:
        shuffle_by_epoch(loader)
    return share_randomness(loader, dp_rank)


def share_randomness(loader: Any, dp_rank: int) -> Any:
    """Make workers of a loader draw the same random numbers on tp, pp and cp peers, and others on other dp ranks.

    After ``seed_everything(workers=True)`` Lightning seeds workers by the global rank, so that peers would augment one
    sample in different ways. Neither a user's own ``worker_init_fn`` nor any loader but a ``DataLoader`` is changed.
    """
    if isinstance(loader, DataLoader) and loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=dp_rank)
    return loader


def shuffle_by_epoch(loader: Any) -> None:
    """Shuffle by seed and epoch if there is one replica, as Lightning does for several.

    Then all layouts read a shuffled loader in one order, and a resumed run continues with the right samples. Lightning
    sets the epoch of the sampler inside a loader's batch sampler. Only a ``DataLoader`` that torch shuffles is changed.
    """
    if not isinstance(loader, DataLoader):
        return
    sampler, batches = loader.sampler, loader.batch_sampler
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    if plain and len(sampler) == len(loader.dataset) and isinstance(batches, BatchSampler):  # type: ignore[arg-type]
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        batches.sampler = DistributedSampler(loader.dataset, num_replicas=1, rank=0, shuffle=True, seed=seed)


def start_workers_safely(loader: Any, device: torch.device) -> None:
    """Give a ``DataLoader``'s workers a start method that is safe with the device, unless the user has chosen one.

    Warns of a small ``/dev/shm``, through which workers pass batches.

    Raises:
        ConfigError: if the path of the folder for temporary files is too long for the sockets of workers.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    sockets = shorten_socket_paths()
    if sockets.fault:
        raise ConfigError([Problem(sockets.subject, sockets.value, sockets.fault, ("/tmp",))])
    memory = shared_memory()
    if memory.fault:
        rank_zero_warn(f"{memory.subject}: {memory.value}; {memory.fault}")
    if loader.multiprocessing_context is None:
        loader.multiprocessing_context = devices.worker_start_method(device)
