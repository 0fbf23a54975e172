"""Train on a data set of litdata: samples are split over replicas, and a checkpoint resumes at the next sample.

    make demo  # makes the token files that are read here
    python examples/streaming/litdata_tokens.py make .demo/corpus_text_document .demo/litdata --seq-length 128
    python examples/streaming/litdata_tokens.py fit --config examples/streaming/litdata.yaml

Needs the extra ``litdata``. Convert your own text files with ``litdata.optimize``, as here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import litdata
import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from litdata.utilities.env import Environment
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.data import IndexedDataset
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.tools.cli.main import main as command


def next_tokens(samples: Sequence[Any]) -> dict[str, Tensor]:
    """Batch of samples ``[S + 1]``: tokens and the ones that follow them, ``[B, S]`` each."""
    rows = torch.stack([torch.as_tensor(sample).long() for sample in samples])
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


class ReplicaLoader(litdata.StreamingDataLoader):
    """Loader of one data-parallel replica, whose ranks all read the same samples.

    litdata treats every process as a separate reader, so the data set gets the number of this replica.

    Args:
        dataset: data set, not read yet.
        dp_rank: number of this replica.
        dp_size: number of replicas.
        batch_size: samples of a batch of one replica.
        num_workers: processes that load samples.
    """

    restore: bool

    def __init__(
        self, dataset: litdata.StreamingDataset, dp_rank: int, dp_size: int, batch_size: int, num_workers: int
    ) -> None:
        self._processes = dataset.distributed_env.world_size
        replica = Environment.from_args(dp_size, dp_rank, max(1, num_workers), 0).dist_env
        assert replica is not None
        replica.num_nodes = 1  # litdata takes every card of the node for a replica
        dataset.distributed_env = replica
        self.dp_size, self._place = dp_size, 0
        super().__init__(
            dataset, batch_size=batch_size, num_workers=num_workers, drop_last=True, collate_fn=next_tokens
        )

    def __iter__(self) -> Any:
        """Batches of the rest of a restored epoch, or of a whole one."""
        # Lightning stops at an epoch's last batch without exhausting the loader: litdata would repeat a restored epoch.
        if self.restore and self._place >= len(self):
            self.restore = False
        if not self.restore:
            self._place = 0
        for batch in super().__iter__():
            self._place += 1
            yield batch

    def load_state_dict(self, obj: Mapping[str, Any]) -> None:
        """Restore the position of a checkpoint.

        Args:
            obj: result of ``state_dict``.

        Raises:
            ConfigError: if it was saved with other batches or other numbers of replicas or workers, by which litdata
                divides the files.
        """
        saved = obj["dataset"]
        today = {"dp": self.dp_size, "batch_size": self.batch_size, "num_workers": max(1, self.num_workers)}
        before = {"dp": saved["world_size"], "batch_size": saved["batch_size"], "num_workers": saved["num_workers"]}
        reason = "litdata divides its files by it, and the checkpoint was saved with {}: other samples would follow"
        raise_if_any(
            Problem(name, value, reason.format(before[name]), (before[name],))
            for name, value in today.items()
            if value != before[name]
        )
        super().load_state_dict({**obj, "dataset": {**saved, "world_size": self._processes}})
        self.dataset.load_state_dict(dict(saved))  # with replicas again, where the loader compares processes
        self._place = obj["num_samples_yielded"] // self.batch_size


class LitDataTokens(LightningDataModule):
    """Samples of ``seq_length + 1`` tokens from a folder that litdata has made.

    Args:
        input_dir: folder with litdata's ``index.json``, readable by all machines.
        batch_size: samples of a batch of one data-parallel replica.
        shuffle: True to draw another order in each epoch.
        seed: seed of the order.
        num_workers: number of processes that load samples.
    """

    def __init__(
        self, input_dir: str, batch_size: int = 1, shuffle: bool = True, seed: int = 42, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.input_dir, self.batch_size, self.num_workers = input_dir, batch_size, num_workers
        self.shuffle, self.seed = shuffle, seed
        self._loader: ReplicaLoader | None = None
        self._saved: dict[str, Any] | None = None
        if "://" in input_dir:
            reason = "ranks of one replica would delete files of a shared cache under one another: mount or copy it"
            raise_if_any([Problem("input_dir", input_dir, reason)])

    def train_dataloader(self) -> ReplicaLoader:
        """Batches of ``{"tokens", "labels"}``, each ``[batch_size, seq_length]``."""
        assert self.trainer is not None
        assert isinstance(self.trainer.strategy, MegatronStrategy)
        strategy = self.trainer.strategy
        dataset = litdata.StreamingDataset(self.input_dir, shuffle=self.shuffle, drop_last=True, seed=self.seed)
        replica = strategy.data_parallel_rank, strategy.data_parallel_size
        self._loader = ReplicaLoader(dataset, *replica, self.batch_size, self.num_workers)
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


def sample(number: int, prefix: str, seq_length: int) -> Tensor:
    """Tokens of one sample; the last token is the first of the next sample."""
    tokens = IndexedDataset(prefix).tokens[number * seq_length :][: seq_length + 1]
    return torch.from_numpy(np.asarray(tokens, dtype=np.int32))


def write(prefix: str, folder: str, seq_length: int, samples: int | None = None) -> None:
    """Cut token files into samples, and have litdata write them to a folder."""
    whole = (len(IndexedDataset(prefix).tokens) - 1) // seq_length
    litdata.optimize(
        partial(sample, prefix=prefix, seq_length=seq_length),
        list(range(whole if samples is None else min(whole, samples))),
        folder,
        chunk_bytes="8MB" if samples is None else None,
        chunk_size=None if samples is None else 8,
        num_workers=1,
    )


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
