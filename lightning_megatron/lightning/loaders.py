"""DataLoaders of ranks that read the same samples: they must also draw the same random numbers."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, RandomSampler

from lightning_megatron.mesh import ParallelMesh


def share_randomness(loader: Any, mesh: ParallelMesh, seed: int) -> Any:
    """Let workers of a loader draw what their peers on tp, pp and cp draw, and other numbers than on other dp ranks.

    After ``seed_everything(workers=True)`` Lightning seeds workers by the global rank, so that peers would augment one
    sample in different ways; a function of the user's own is left alone. And where there are peers, the numbers that
    torch draws for each epoch's workers and order come from a generator of the loader's own, since layers of the user's
    own may draw from the default one, differently on every stage: then stages would read different samples.

    Args:
        loader: anything; only a ``DataLoader`` is changed.
        mesh: this rank's.
        seed: the same on all ranks.

    Returns:
        The loader.
    """
    if not isinstance(loader, DataLoader) or not mesh.is_distributed:
        return loader
    if loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=mesh.dp.rank)
    has_peers = mesh.world.size > mesh.dp.size
    if has_peers and loader.generator is None:
        loader.generator = torch.Generator().manual_seed(seed)
        if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
            loader.sampler.generator = loader.generator
    return loader
