"""Archives of one tensor: torch reads ours, and the values are found in torch's and in ours."""

from __future__ import annotations

import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint.formats.tensor_archive import ArchiveWriter, ValueFinder, Values
from lightning_megatron.checkpoint.integrity.hashed_files import HashedStream
from lightning_megatron.checkpoint.integrity.manifest import record
from lightning_megatron.checkpoint.integrity.metadata_file import Place

BEFORE = b"another item"
TENSORS = {
    "fp32": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(3.5),
    "larger than a block": torch.arange(300_001).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(5).view(1, 5, 1),
    "fp8": torch.arange(8.0).to(torch.float8_e4m3fn),
    "empty": torch.zeros(0, 3),
}


def written(file: Path, tensor: Tensor) -> Place:
    with ThreadPoolExecutor(2) as threads, HashedStream(file, threads) as stream:
        stream.write(BEFORE)
        ArchiveWriter(stream).write(tensor)
        place = Place(file.name, len(BEFORE), stream.tell() - len(BEFORE))
    assert stream.record() == record(file)
    return place


def by_torch(file: Path, value: Any, **options: Any) -> Place:
    content = io.BytesIO()
    torch.save(value, content, **options)
    file.write_bytes(BEFORE + content.getvalue())
    return Place(file.name, len(BEFORE), len(content.getvalue()))


def found(file: Path, place: Place) -> Values | None:
    with file.open("rb") as stream:
        return ValueFinder(stream).find(place)


@pytest.mark.parametrize("name", TENSORS)
def test_torch_reads_what_is_written_and_check_sums_are_right(name: str, tmp_path: Path) -> None:
    file, tensor = tmp_path / "a", TENSORS[name]
    place = written(file, tensor)
    content = file.read_bytes()[place.offset :]
    read = torch.load(io.BytesIO(content), weights_only=True)
    assert read.dtype == tensor.dtype
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8)) if read.ndim else read == tensor
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        assert all(entry.CRC for entry in archive.infolist() if entry.file_size)


@pytest.mark.parametrize("write", [written, by_torch])
@pytest.mark.parametrize("name", [name for name in TENSORS if name != "fp8"])
def test_the_values_are_found(name: str, write: Any, tmp_path: Path) -> None:
    file, tensor = tmp_path / "a", TENSORS[name]
    values = found(file, write(file, tensor))
    assert values is not None
    assert (values.dtype, values.shape) == (tensor.dtype, tuple(tensor.shape))
    content = file.read_bytes()[values.start : values.start + tensor.nbytes]
    assert content == bytes(tensor.flatten().view(torch.uint8).numpy())


def test_other_archives_are_left_to_torch(tmp_path: Path) -> None:
    file, whole = tmp_path / "a", torch.arange(12.0).view(3, 4)
    for value in (whole.t(), whole[1:], {"a": whole}, whole.to_sparse(), [1, 2], torch.nn.Parameter(whole)):
        assert found(file, by_torch(file, value)) is None, value
    assert found(file, by_torch(file, whole, _use_new_zipfile_serialization=False)) is None
    place = by_torch(file, whole)
    with zipfile.ZipFile(io.BytesIO(file.read_bytes()[place.offset :])) as archive:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
            for entry in archive.infolist():
                other.writestr(entry.filename, archive.read(entry))
    file.write_bytes(packed.getvalue())
    assert found(file, Place("a", 0, len(packed.getvalue()))) is None
    file.write_bytes(b"no archive")
    assert found(file, Place("a", 0, 10)) is None
