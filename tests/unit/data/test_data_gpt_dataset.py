import contextlib
import json
import os
import pickle
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megatron.data import DataError, GPTDataset, IndexedDataset, IndexedDatasetWriter
from lightning_megatron.errors import ConfigError
from lightning_megatron.files.growing import GrowingFile

WriteCorpus = Callable[..., Path]


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in directory.rglob("*")}


def test_items_have_the_promised_types(write_corpus: WriteCorpus) -> None:
    data = GPTDataset(IndexedDataset(write_corpus([5, 9, 30])), seq_length=8, num_samples=10)
    item = data[0]
    assert {k: (v.dtype, tuple(v.shape)) for k, v in item.items()} == {
        "tokens": (torch.int64, (8,)),
        "labels": (torch.int64, (8,)),
        "loss_mask": (torch.float32, (8,)),
        "position_ids": (torch.int64, (8,)),
    }
    assert len(data) >= 10


def test_every_token_of_an_epoch_is_read_once(write_corpus: WriteCorpus) -> None:
    data = GPTDataset(IndexedDataset(write_corpus([3, 0, 17, 1, 4, 24])), seq_length=8)
    assert len(data) == 6
    tokens = torch.cat([data[i]["tokens"] for i in range(6)])
    assert sorted(tokens.tolist()) == sorted(set(tokens.tolist()))
    assert tokens.max() <= 48
    for i in range(6):
        item = data[i]
        assert torch.equal(item["tokens"][1:], item["labels"][:-1])


def test_masks_by_hand(tmp_path: Path) -> None:
    eod = 9
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1, 2, eod, 3, eod, eod, 4, 5, 6], [9])
    data = GPTDataset(
        IndexedDataset(tmp_path / "x"),
        seq_length=8,
        eod_id=eod,
        eod_mask_loss=True,
        reset_position_ids=True,
        reset_attention_mask=True,
    )
    item = data[0]
    assert item["tokens"].tolist() == [1, 2, 9, 3, 9, 9, 4, 5]
    assert item["labels"].tolist() == [2, 9, 3, 9, 9, 4, 5, 6]
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert item["loss_mask"].tolist() == [1, 1, 0, 1, 0, 0, 1, 1]
    assert item["segment_ids"].tolist() == [1, 1, 1, 2, 2, 3, 4, 4]


def test_padding_is_in_no_document(write_corpus: WriteCorpus) -> None:
    how = {"seq_length": 4, "drop_last_partial": False, "eod_id": 1, "reset_attention_mask": True}
    data = GPTDataset(IndexedDataset(write_corpus([6])), **how)  # type: ignore[arg-type]
    assert sorted(data[i]["segment_ids"].tolist() for i in range(2)) == [[1, 1, 0, 0], [1, 1, 2, 2]]


def test_padding(write_corpus: WriteCorpus) -> None:
    indexed = IndexedDataset(write_corpus([6]))
    data = GPTDataset(indexed, seq_length=4, drop_last_partial=False, pad_id=None)
    assert len(data) == 2
    items = [data[i] for i in range(2)]
    short = next(item for item in items if item["loss_mask"].sum() < 4)
    assert short["tokens"].tolist() == [4, 5, 0, 0]
    assert short["labels"].tolist() == [5, 0, 0, 0]
    assert short["loss_mask"].tolist() == [1, 0, 0, 0]
    assert data[None]["loss_mask"].tolist() == [0, 0, 0, 0]
    assert data[None]["tokens"].tolist() == data[0]["tokens"].tolist()


def test_without_extra_token_the_last_label_is_padding(write_corpus: WriteCorpus) -> None:
    data = GPTDataset(IndexedDataset(write_corpus([8])), seq_length=8, add_extra_token=False)
    assert data[0]["labels"].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert data[0]["loss_mask"].tolist() == [1] * 7 + [0]
    assert data[0]["tokens"].tolist() == list(range(8))


def test_pad_tokens_in_the_data_have_no_loss_unless_they_end_documents(write_corpus: WriteCorpus) -> None:
    indexed = IndexedDataset(write_corpus([9]))
    assert GPTDataset(indexed, seq_length=8, pad_id=3, eod_id=7)[0]["loss_mask"].tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    assert GPTDataset(indexed, seq_length=8, pad_id=3, eod_id=3)[0]["loss_mask"].tolist() == [1] * 8


def test_cache_keeps_the_data_directory_untouched(write_corpus: WriteCorpus, tmp_path: Path) -> None:
    prefix = write_corpus([20, 30], "data/corpus")
    before = snapshot(prefix.parent)
    made = GPTDataset(IndexedDataset(prefix), seq_length=4, num_samples=20, cache_dir=tmp_path / "cache")
    assert snapshot(prefix.parent) == before
    files = snapshot(tmp_path / "cache")
    assert len(files) == 4
    again = GPTDataset(IndexedDataset(prefix), seq_length=4, num_samples=20, cache_dir=tmp_path / "cache")
    assert snapshot(tmp_path / "cache") == files, "the second one maps what the first one built"
    assert isinstance(again.index.shuffle, np.memmap)
    assert np.array_equal(again.index.samples, made.index.samples)
    for other in ({"seed": 5}, {"seq_length": 5}, {"num_samples": 40}, {"split_name": "valid"}):
        arguments = {"seq_length": 4, "num_samples": 20, **other}
        GPTDataset(IndexedDataset(prefix), cache_dir=tmp_path / "cache", **arguments)  # type: ignore[arg-type]
    assert len(snapshot(tmp_path / "cache")) == 20


def test_cache_notices_new_data_under_an_old_name(write_corpus: WriteCorpus) -> None:
    first = GPTDataset(IndexedDataset(write_corpus([20, 30])), seq_length=4)
    second = GPTDataset(IndexedDataset(write_corpus([40, 30])), seq_length=4)
    assert (len(first), len(second)) == (12, 17)


def test_default_cache_is_beside_the_data(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus([20])
    GPTDataset(IndexedDataset(prefix), seq_length=4)
    names = {p.name.split("-", 1)[1] for p in (prefix.parent / "cache" / "GPTDataset_indices").iterdir()}
    assert names == {
        f"GPTDataset-train-{x}"
        for x in ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
    }


def zero_the_data(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:128] + bytes(len(content) - 128))


def save_instead(file: Path, array: np.ndarray) -> None:
    np.save(file, array)


def make_archive(file: Path) -> None:
    """Put an archive of arrays in its place, and its sums into the description."""
    with file.open("wb") as stream:
        np.savez(stream, a=np.arange(3))
    (marker,) = file.parent.glob("*-description.txt")
    described = json.loads(marker.read_text())
    described["files"][file.name] = [file.stat().st_size, zlib.crc32(file.read_bytes())]
    marker.write_text(json.dumps(described))


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: os.truncate(file, 100),
        lambda file: os.truncate(file, 0),
        zero_the_data,
        lambda file: save_instead(file, np.load(file)[::-1].copy()),
        lambda file: save_instead(file, np.load(file).astype(np.float64)),
        lambda file: save_instead(file, -np.load(file)),
        lambda file: np.save(file, np.array([{}], dtype=object), allow_pickle=True),
        lambda file: file.unlink(),
        make_archive,
    ],
    ids=["cut", "empty", "zeros", "reversed", "floats", "negative", "objects", "gone", "archive"],
)
def test_damaged_cache_is_built_again(write_corpus: WriteCorpus, damage: Callable[[Path], object], name: str) -> None:
    prefix = write_corpus([20])
    good = GPTDataset(IndexedDataset(prefix), seq_length=4)
    expected = [good[i]["tokens"].numpy() for i in range(len(good))]
    del good
    damage(next((prefix.parent / "cache").rglob(f"*{name}.npy")))
    again = GPTDataset(IndexedDataset(prefix), seq_length=4)
    assert np.array_equal([again[i]["tokens"].numpy() for i in range(len(again))], expected)


def test_cache_files_have_the_permissions_of_the_user(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus([20])
    before = os.umask(0o007)
    try:
        GPTDataset(IndexedDataset(prefix), seq_length=4)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (prefix.parent / "cache").rglob("*.*")} == {0o660}


def test_read_only_data_without_cache_dir_stays_in_memory(
    write_corpus: WriteCorpus, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_corpus([20])
    (prefix.parent / "cache").write_text("a file where the directory should be")
    data = GPTDataset(IndexedDataset(prefix), seq_length=4)
    assert len(data) == 4
    assert "cannot be written" in caplog.text
    assert "name a writable cache_dir" in caplog.text


def test_unwritable_cache_dir_is_an_error(write_corpus: WriteCorpus, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/cache: the index cache cannot be written \(.*\); name a writable"):
        GPTDataset(IndexedDataset(write_corpus([20])), seq_length=4, cache_dir=tmp_path / "file" / "cache")


def test_pickling_sends_no_arrays(write_corpus: WriteCorpus) -> None:
    data = GPTDataset(IndexedDataset(write_corpus([30000])), seq_length=2)
    packed = pickle.dumps(data)
    assert len(packed) < 3000
    assert torch.equal(pickle.loads(packed)[77]["tokens"], data[77]["tokens"])


def test_faults(write_corpus: WriteCorpus) -> None:
    indexed = IndexedDataset(write_corpus([20, 0]))
    with pytest.raises(ConfigError, match="seq_length=0: a sample has at least 1 token"):
        GPTDataset(indexed, seq_length=0)
    with pytest.raises(ConfigError, match="num_samples=-1: cannot be negative"):
        GPTDataset(indexed, seq_length=4, num_samples=-1)
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*eod_mask_loss=True: needs eod_id"):
        GPTDataset(indexed, seq_length=4, eod_mask_loss=True, reset_position_ids=True)
    with pytest.raises(DataError, match=r"corpus: the valid part has no tokens \(1 of 2 sequences\); give it a larger"):
        GPTDataset(indexed, np.array([1]), seq_length=4, split_name="valid")
    with pytest.raises(IndexError, match="4 train samples, there is no number 4"):
        GPTDataset(indexed, seq_length=4)[4]


def test_many_may_build_at_once(write_corpus: WriteCorpus, tmp_path: Path) -> None:
    prefix = write_corpus(list(range(1, 300)))

    def build(_: int) -> GPTDataset:
        return GPTDataset(IndexedDataset(prefix), seq_length=7, num_samples=9000, cache_dir=tmp_path / "cache")

    with ThreadPoolExecutor(8) as pool:
        built = list(pool.map(build, range(8)))
    assert len(list((tmp_path / "cache").iterdir())) == 4, "no temporary file is left"
    for data in built[1:]:
        for name in ("documents", "samples", "shuffle"):
            assert np.array_equal(getattr(data.index, name), getattr(built[0].index, name))


def test_nodes_that_start_together_leave_each_other_the_files_they_have_mapped(
    write_corpus: WriteCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS a mapped file that another machine replaces is lost, and its reader dies of SIGBUS."""
    prefix, together = write_corpus([30] * 200), threading.Barrier(4)

    def late(self: GrowingFile) -> None:
        sync(self)
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(5)  # nobody has given a file its name before all have written theirs

    sync = GrowingFile.sync
    monkeypatch.setattr(GrowingFile, "sync", late)

    def node(_: int) -> dict[str, int]:
        GPTDataset(IndexedDataset(prefix), seq_length=7, num_samples=900, cache_dir=tmp_path / "cache")
        return {path.name: path.stat().st_ino for path in (tmp_path / "cache").glob("*.npy")}

    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(node, range(4)))
    assert all(each == seen[0] for each in seen)
    monkeypatch.setattr(GrowingFile, "sync", sync)
    next((tmp_path / "cache").glob("*description.txt")).unlink()  # as if the first had not come to the end
    assert node(0) == seen[0]
    assert not list((tmp_path / "cache").glob("*.tmp-*"))
