"""DataLoaders of ranks that belong together: those that read the same samples, and those that share experts."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_megatron import device as devices
from lightning_megatron.comm.collectives import all_reduce_max
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.mesh import ParallelMesh, coordinate, dense_grid


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


def shuffle_by_epoch(loader: Any) -> None:
    """Shuffle by seed and epoch, as Lightning does over replicas, where there is one replica.

    So all layouts read a shuffled loader in one order, and a resumed run reads what is due. Lightning tells the sampler
    of a loader's batch sampler which epoch it is.

    Args:
        loader: anything; only a ``DataLoader`` that torch itself shuffles is changed.
    """
    if not isinstance(loader, DataLoader):
        return
    sampler, batches = loader.sampler, loader.batch_sampler
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None
    if plain and len(sampler) == len(loader.dataset) and isinstance(batches, BatchSampler):  # type: ignore[arg-type]
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        batches.sampler = DistributedSampler(loader.dataset, num_replicas=1, rank=0, shuffle=True, seed=seed)


def start_workers_safely(loader: Any, device: torch.device) -> None:
    """Have workers started in the way that the device outlives, where the user has not chosen one.

    Args:
        loader: anything; only a ``DataLoader`` is changed.
        device: of this rank.
    """
    if isinstance(loader, DataLoader) and loader.num_workers and loader.multiprocessing_context is None:
        loader.multiprocessing_context = devices.worker_start_method(device)


def require_equal_lengths(loader: Any, mesh: ParallelMesh, device: torch.device) -> None:
    """Refuse loaders of different lengths where replicas wait for each other in every forward, to share experts.

    Lightning gives the replicas of ``predict`` the samples as they come, without repeating any to even out the rest.

    Args:
        loader: anything; what has no length is left alone.
        mesh: this rank's; all ranks that share experts call this together.
        device: of this rank.

    Raises:
        ConfigError: if a rank that shares experts with this one has more or fewer batches.
    """
    shared = {coordinate(dense_grid(mesh.layout), rank)["dp"] for rank in mesh.etp_ep.ranks}
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return
    if len(shared) == 1:
        return
    most, least = all_reduce_max(torch.tensor([length, -length], device=device), mesh.etp_ep).abs().tolist()
    if most != least:
        reason = (
            f"batches on this rank, and between {least} and {most} on those that share its experts, who would wait for "
            "each other for ever: pad the data to a multiple of batch_size x dp, or predict with ep=1 and etp=tp"
        )
        raise ConfigError([Problem("dataloader", length, reason)])
