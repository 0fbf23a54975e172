"""Train on shards of mosaicml-streaming: samples are split over replicas; a checkpoint resumes at the next sample.

    make demo  # makes the token files that are read here
    python examples/streaming/mosaic_tokens.py make .demo/corpus_text_document .demo/mosaic --seq-length 128
    torchrun --nproc-per-node 2 examples/streaming/mosaic_tokens.py fit --config examples/streaming/mosaic.yaml

Needs the extra ``mosaic``, which brings an older ``numpy`` and ``transformers``, and ``torchrun``: the library reads
its ranks from torchrun's variables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.world import World
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.data import IndexedDataset
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.tools.cli.main import main as command


def next_tokens(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Batch of samples ``[S + 1]``: tokens and the ones that follow them, ``[B, S]`` each."""
    rows = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def replication(strategy: MegatronStrategy) -> int:
    """Number of neighbouring ranks that read the same samples.

    Raises:
        ConfigError: if ranks of one replica are not neighbours, or the library sees other ranks than Lightning.
    """
    world, problems = World.detect(), []
    seen = {"RANK": world.rank, "WORLD_SIZE": world.num_ranks, "LOCAL_WORLD_SIZE": world.ranks_per_node}
    real = {"RANK": strategy.global_rank, "WORLD_SIZE": strategy.world_size, "LOCAL_WORLD_SIZE": strategy.num_processes}
    for name, value in seen.items():
        if value != real[name]:
            reason = f"mosaicml-streaming reads it, and it should be {real[name]}: start the job with torchrun"
            problems.append(Problem(name, value, reason, (real[name],)))
    layout, dp = strategy.layout, strategy.data_parallel_size
    if layout.pp > 1 and dp > 1:
        reason = (
            f"with dp {dp}: mosaicml-streaming gives equal samples to neighbouring ranks alone, and pipeline stages"
            " are no neighbours: take tp instead, dp=1, or examples/streaming/litdata_tokens.py"
        )
        problems.append(Problem("pp", layout.pp, reason, (1,)))
    raise_if_any(problems)
    return strategy.world_size // dp


class ReplicaLoader(StreamingDataLoader):
    """Loader that refuses to resume in another order of samples, and resumes at the next epoch after the end of one.

    Args:
        dataset: data set.
        dp_size: number of replicas.
        batch_size: samples of a batch of one replica.
        num_workers: processes that load samples.
    """

    def __init__(self, dataset: StreamingDataset, dp_size: int, batch_size: int, num_workers: int) -> None:
        super().__init__(dataset, batch_size=batch_size, num_workers=num_workers, collate_fn=next_tokens)
        self.order = {
            "dp": dp_size,
            "batch_size": batch_size,
            "shuffle": dataset.shuffle,
            "seed": dataset.shuffle_seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, and everything that the order of samples depends on."""
        state = super().state_dict()
        assert state is not None
        return {**state, **self.order}

    def load_state_dict(self, obj: Mapping[str, Any]) -> None:
        """Restore the position of a checkpoint.

        Args:
            obj: result of :meth:`state_dict`.

        Raises:
            ConfigError: if the next samples would differ from those of the run that saved it.
        """
        reason = "the checkpoint was saved with {}: other samples would follow"
        raise_if_any(
            Problem(name, value, reason.format(obj[name]), (obj[name],))
            for name, value in self.order.items()
            if value != obj[name]
        )
        place = {name: value for name, value in obj.items() if name not in self.order}
        if place["sample_in_epoch"] >= len(self) * self.order["batch_size"] * self.order["dp"]:
            place |= {"epoch": place["epoch"] + 1, "sample_in_epoch": 0}
        super().load_state_dict(place)


class MosaicTokens(LightningDataModule):
    """Samples of ``seq_length + 1`` tokens from shards of mosaicml-streaming.

    Args:
        local: folder of the shards, or of their copies if there is a ``remote`` one.
        remote: address of the shards.
        batch_size: samples of a batch of one data-parallel replica.
        shuffle: True to draw another order in each epoch.
        seed: seed of the order.
        num_workers: number of processes that load samples.
    """

    def __init__(
        self,
        local: str,
        remote: str | None = None,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 42,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.local, self.remote, self.batch_size, self.num_workers = local, remote, batch_size, num_workers
        self.shuffle, self.seed = shuffle, seed
        self._loader: ReplicaLoader | None = None
        self._saved: dict[str, Any] | None = None

    def train_dataloader(self) -> ReplicaLoader:
        """Batches of ``{"tokens", "labels"}``, each ``[batch_size, seq_length]``."""
        assert self.trainer is not None
        assert isinstance(self.trainer.strategy, MegatronStrategy)
        dataset = StreamingDataset(
            local=self.local,
            remote=self.remote,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            shuffle_seed=self.seed,
            replication=replication(self.trainer.strategy),
        )
        dp = self.trainer.strategy.data_parallel_size
        self._loader = ReplicaLoader(dataset, dp, self.batch_size, self.num_workers)
        if self._saved:
            self._loader.load_state_dict(self._saved)
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Position in the data; Lightning saves it too, but restores no loader created before its own restore."""
        return {} if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position, before or after the loader is created."""
        self._saved = state_dict
        if self._loader is not None and state_dict:
            self._loader.load_state_dict(state_dict)


def write(prefix: str, folder: str, seq_length: int, samples: int | None = None) -> None:
    """Cut token files into samples, and write them to shards in a folder."""
    tokens = IndexedDataset(prefix).tokens
    whole = (len(tokens) - 1) // seq_length
    with MDSWriter(out=folder, columns={"tokens": f"ndarray:int32:{seq_length + 1}"}) as shards:
        for first in range(0, seq_length * (whole if samples is None else min(whole, samples)), seq_length):
            shards.write({"tokens": np.asarray(tokens[first : first + seq_length + 1], dtype=np.int32)})


def main(arguments: Sequence[str]) -> int:
    """Make a folder, or run a command of ``lightning-megatron`` with the data module of this file."""
    if arguments[:1] != ["make"]:
        return command(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", help="path of the token files, without ending")
    parser.add_argument("folder", help="folder to make")
    parser.add_argument("--seq-length", type=int, default=128)
    options = parser.parse_args(arguments[1:])
    write(options.prefix, options.folder, options.seq_length)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
