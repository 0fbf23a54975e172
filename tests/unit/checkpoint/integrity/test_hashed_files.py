"""Files that are hashed while they are written."""

from __future__ import annotations

import errno
import os
import random
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_megatron.checkpoint.integrity import hashed_files
from lightning_megatron.checkpoint.integrity.block_sums import BLOCK
from lightning_megatron.checkpoint.integrity.hashed_files import HashedStream
from lightning_megatron.checkpoint.integrity.manifest import record

LENGTHS = [[], [1], [BLOCK], [BLOCK - 1, 1], [5, 3 * BLOCK + 7, 2, BLOCK], [70_000, 2 * BLOCK, BLOCK + 1, 9]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_hash_is_that_of_the_file_and_each_piece_has_its_check_sum(lengths: list[int], tmp_path: Path) -> None:
    chance = random.Random(1)
    pieces = [chance.randbytes(length) for length in lengths]
    with ThreadPoolExecutor(2) as threads, HashedStream(tmp_path / "a", threads) as stream:
        for piece in pieces:
            assert stream.put(memoryview(piece)) == zlib.crc32(piece)
        assert stream.tell() == sum(lengths)
        assert os.fstat(stream.fileno()).st_size == sum(lengths), "all is with the system before it is synced"
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)
    assert stream.record() == record(tmp_path / "a")


@pytest.mark.parametrize("act", [HashedStream.fileno, HashedStream.close])
def test_an_error_of_the_disk_on_the_way_is_raised(
    act: Callable[[HashedStream], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hashed_files, "_SYNC", full)
    monkeypatch.setattr(hashed_files, "_PIECE", 1 << 17)
    with ThreadPoolExecutor(2) as threads:
        stream = HashedStream(tmp_path / "a", threads)
        stream.write(bytes(1 << 17))
        with pytest.raises(OSError, match="No space left"):
            act(stream)
        stream.close()
