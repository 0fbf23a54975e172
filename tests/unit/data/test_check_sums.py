"""Check sums of token files: what each of them finds, and that files of other programs are read without."""

from __future__ import annotations

import pickle
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data import DataError, IndexedDataset, IndexedDatasetWriter
from lightning_megatron.data.check_sums import sums_path
from lightning_megatron.data.files.merge import merge
from lightning_megatron.data.files.statistics import statistics

BLOCK = 1 << 16


def write(prefix: Path, tokens: int, seed: int = 0, dtype: type = np.uint16) -> np.ndarray:
    """A pair of documents of 999 tokens, the last one shorter."""
    values = np.random.RandomState(seed).randint(0, 60000, tokens).astype(dtype)
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for part in np.split(values, range(999, tokens, 999)):
            writer.add_document(part, [len(part)])
    return values


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("size", [0, 2, BLOCK - 2, BLOCK, BLOCK + 2, 3 * BLOCK + 500])
def test_the_file_holds_the_sum_of_each_block(tmp_path: Path, size: int) -> None:
    write(tmp_path / "x", size // 2)
    content = (tmp_path / "x.bin").read_bytes()
    expected = [zlib.crc32(content[start : start + BLOCK]) for start in range(0, size, BLOCK)]
    raw = sums_path(tmp_path / "x").read_bytes()
    assert np.frombuffer(raw, "<u4", offset=24).tolist() == expected
    assert int.from_bytes(raw[8:16], "little") == size
    assert int.from_bytes(raw[16:20], "little") == zlib.crc32((tmp_path / "x.idx").read_bytes())


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 77, 3 * BLOCK + 499])
def test_a_flipped_bit_is_found_when_its_block_is_read(tmp_path: Path, at: int) -> None:
    values = write(tmp_path / "x", (3 * BLOCK + 500) // 2)
    flip(tmp_path / "x.bin", at)
    data = pickle.loads(pickle.dumps(IndexedDataset(tmp_path / "x")))  # as in a loader's worker
    bad = at // 2
    for start in range(0, len(values), 500):
        end = min(start + 500, len(values))
        touched = start * 2 // BLOCK <= at // BLOCK <= (end * 2 - 1) // BLOCK
        if touched:
            with pytest.raises(DataError, match=r"x\.bin: damaged: bytes \d+ to \d+ are not those that were written"):
                data.read(start, end)
        else:
            assert np.array_equal(data.read(start, end), values[start:end])
    with pytest.raises(DataError, match="damaged"):
        data.get(bad // 999)
    with pytest.raises(DataError, match="damaged"):
        statistics(IndexedDataset(tmp_path / "x"))
    with pytest.raises(DataError, match="damaged"):
        merge([tmp_path / "x"], tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


def test_tokens_of_four_bytes_and_merged_pairs(tmp_path: Path) -> None:
    parts = [write(tmp_path / name, 40_001, seed, np.int32) for seed, name in enumerate("ab")]
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    data = IndexedDataset(tmp_path / "both")
    assert np.array_equal(data.read(0, 80_002), np.concatenate(parts))
    flip(tmp_path / "both.bin", 4 * 80_001)
    with pytest.raises(DataError, match="damaged"):
        IndexedDataset(tmp_path / "both").get(-1)


def test_the_index_is_compared_too(tmp_path: Path) -> None:
    """Two documents change their bounds: lengths and offsets still fit each other."""
    write(tmp_path / "x", 2000)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[-16:-8] = (1).to_bytes(8, "little")
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(DataError, match=r"x\.crc: the check sum of .*x\.idx differs"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "no check sums of token files"),
        (b"not check sums, but a text", "no check sums of token files"),
        (None, "damaged themselves"),
    ],
)
def test_damaged_check_sums_are_named(tmp_path: Path, content: bytes | None, fault: str) -> None:
    write(tmp_path / "x", 5000)
    if content is None:
        flip(tmp_path / "x.crc", 24)
    else:
        (tmp_path / "x.crc").write_bytes(content)
    with pytest.raises(DataError, match=rf"x\.crc: .*{fault}(.|\n)*remove this file"):
        IndexedDataset(tmp_path / "x")


def test_a_pair_that_another_program_has_written_anew_is_told_from_the_old_sums(tmp_path: Path) -> None:
    write(tmp_path / "x", 5000)
    values = write(tmp_path / "y", 6000, 1)
    for end in ("bin", "idx"):
        shutil.copy(tmp_path / f"y.{end}", tmp_path / f"x.{end}")
    with pytest.raises(DataError, match=r"check sums of 10000 bytes of tokens, and there are 12000(.|\n)*remove this"):
        IndexedDataset(tmp_path / "x")
    sums_path(tmp_path / "x").unlink()
    assert np.array_equal(IndexedDataset(tmp_path / "x").read(0, 6000), values)
