"""Files that are cut off or overwritten while they are read: an error that names them, and no death without a word."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron.data import BlendedDataset, DataError, GPTDataset, IndexedDataset, IndexedDatasetWriter
from lightning_megatron.testing.workers import PRELOAD


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for _ in range(200):
            writer.add_document(np.arange(1000), [1000])
    return GPTDataset(IndexedDataset(tmp_path / "x"), seq_length=100)


def victims(dataset: GPTDataset) -> list[Path]:
    folder = Path(dataset.dataset.prefix).parent
    return [folder / "x.bin", folder / "x.idx", *(folder / "cache").rglob("*.npy")]


class Halting(torch.utils.data.Dataset[Any]):
    """Has its reader wait before a sample: one that reads while a file is cut off dies of SIGBUS."""

    def __init__(self, dataset: GPTDataset, at: int) -> None:
        self.dataset, self.at = dataset, at
        self.stands, self.goes_on = (mp.get_context("fork").Event() for _ in range(2))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            self.stands.set()
            self.goes_on.wait()
        return self.dataset[index]


def read(prefix: str, victim: str, answer: Connection, workers: int) -> None:
    """In a process of its own, which a signal may end: read, cut a file off, read on."""
    dataset = Halting(GPTDataset(IndexedDataset(prefix), seq_length=100), at=8)
    # Forked workers notice that this process has ended; those of a fork server of its own would not.
    more = {"num_workers": workers, "persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, **more)
    samples = iter(loader)
    next(samples)
    if workers:  # it reads two batches ahead
        dataset.stands.wait()
    os.truncate(victim, 0)
    time.sleep(0.05)
    dataset.goes_on.set()
    try:
        for _ in samples:
            pass
    except DataError as error:
        answer.send(str(error))
    if workers:
        samples._shutdown_workers()
    os._exit(0)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_file_cut_off_under_a_run_is_named(dataset: GPTDataset, workers: int) -> None:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    for victim in victims(dataset):
        content = victim.read_bytes()
        ours, theirs = context.Pipe(duplex=False)
        job = context.Process(target=read, args=(dataset.dataset.prefix, str(victim), theirs, workers))
        job.start()
        theirs.close()
        try:
            text = ours.recv()
            job.join()
        except EOFError:
            job.join()
            pytest.fail(f"{victim.name}: the process ended with {job.exitcode}")
        finally:
            job.kill()
        assert str(victim) in text
        assert f"cut off while it was in use: 0 bytes, {len(content)} were there" in text
        victim.write_bytes(content)


def test_data_that_is_replaced_or_removed_stays_readable(dataset: GPTDataset) -> None:
    before = dataset[3]["tokens"]
    for victim in victims(dataset):
        copy = victim.with_suffix(".copy")
        copy.write_bytes(b"short")
        os.replace(copy, victim)
    time.sleep(0.05)  # reads that follow closely do not look at the files again
    assert torch.equal(dataset[3]["tokens"], before)
    for victim in victims(dataset):
        victim.unlink()
    time.sleep(0.05)
    assert torch.equal(dataset[3]["tokens"], before)


def test_nonsense_in_the_files_of_a_run_names_them(dataset: GPTDataset) -> None:
    for name, value in (("samples", np.full((4000, 2), 2**30, np.int32)), ("shuffle", np.full(2000, -(10**9)))):
        other = pickle.loads(pickle.dumps(dataset))
        object.__setattr__(other.index, name, value)
        with pytest.raises(DataError, match=r"x: train sample 5 cannot be read .*changed under the run"):
            other[5]
    with pytest.raises(IndexError, match="there is no number 99999"):
        dataset[99999]


def test_every_read_after_a_fault_is_a_fault(dataset: GPTDataset) -> None:
    dataset[3]
    os.truncate(victims(dataset)[0], 0)
    time.sleep(0.05)
    for _ in range(3):  # as a worker does, which has the next samples in its queue
        with pytest.raises(DataError, match="cut off while it was in use"):
            dataset[3]


def test_a_blend_looks_at_its_order(dataset: GPTDataset, tmp_path: Path) -> None:
    blend = BlendedDataset([dataset, dataset], cache_dir=tmp_path / "blend")
    blend[0]
    order = next((tmp_path / "blend").glob("*dataset_index.npy"))
    os.truncate(order, 100)
    time.sleep(0.05)
    with pytest.raises(DataError, match="cut off while it was in use"):
        blend[1]
