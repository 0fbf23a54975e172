from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from lightning_megatron.checkpoint import load, model_state, save
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, record
from lightning_megatron.checkpoint.integrity.metadata_file import read_metadata
from lightning_megatron.checkpoint.loading import CheckpointError
from lightning_megatron.checkpoint.select.verify import verify
from lightning_megatron.mesh import ParallelMesh

MESH = ParallelMesh.single()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sound one, with tensors of several dtypes and values that are none."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}
    save(tmp_path / "x.ckpt", model_state(tensors, {}, MESH) | {"other": {"lr": 0.1}}, {"epoch": 1}, MESH)
    return tmp_path / "x.ckpt"


def rewrite(path: Path, content: bytes) -> None:
    """Put another ``.metadata`` in, with a manifest that fits."""
    (path / ".metadata").write_bytes(content)
    text = (path / MANIFEST).read_text()
    manifest = Manifest.parse(text)
    files = {**manifest.files, ".metadata": record(path / ".metadata")}
    (path / MANIFEST).write_text(Manifest(manifest.layout, files, manifest.torch).render())


def refused_everywhere(path: Path) -> str:
    """The fault that every way of reading finds."""
    (fault,) = verify(path)
    assert fault.file == ".metadata"
    with pytest.raises(CheckpointError):
        load(path, {}, MESH)
    with pytest.raises(CheckpointError):
        read_metadata(path)
    return fault.what


def test_the_table_is_the_one_that_torch_reads(checkpoint: Path) -> None:
    ours, theirs = read_metadata(checkpoint), FileSystemReader(checkpoint).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for index, place in theirs.storage_data.items():
        mine = ours.storage_data[index]
        assert (mine.relative_path, mine.offset, mine.length) == (place.relative_path, place.offset, place.length)


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_nothing_that_the_table_names_is_run(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    sound = (checkpoint / ".metadata").read_bytes()
    call = b"cos\nsystem\n(Vtouch " + str(mark).encode() + b"\ntR0"
    # In front of a sound table, as its planner_data, in its place, and as a class whose attributes are set.
    rewrite(checkpoint, sound[:2] + call + sound[2:])
    assert "os.system" in refused_everywhere(checkpoint)
    table = pickle.loads(sound)
    rewrite(checkpoint, pickle.dumps(Metadata(table.state_dict_metadata, Evil(mark), table.storage_data)))
    assert "names" in refused_everywhere(checkpoint)
    rewrite(checkpoint, pickle.dumps(Evil(mark)))
    refused_everywhere(checkpoint)
    rewrite(checkpoint, b"cargparse\nNamespace\n(N}Vcommon\nI1\nstb.")
    refused_everywhere(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/hostname", "a/b", "..", "", "a\\b"])
def test_no_file_outside_the_directory_is_read(checkpoint: Path, name: str) -> None:
    table = pickle.loads((checkpoint / ".metadata").read_bytes())
    index = MetadataIndex("model.a", torch.Size([0, 0]))
    table.storage_data[index] = _StorageInfo(name, 0, 100)
    rewrite(checkpoint, pickle.dumps(table))
    assert "own directory" in refused_everywhere(checkpoint)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04N.", b"\x80\x04}.", b"\x80\x04]\x94h\x00a.", b"(" * 100_000, pickle.dumps({"a": [1]})],
    ids=["empty", "none", "dict", "loop", "marks", "other"],
)
def test_what_is_no_table_is_refused_with_the_name_of_the_file(checkpoint: Path, content: bytes) -> None:
    rewrite(checkpoint, content)
    assert ".metadata" in refused_everywhere(checkpoint)


def test_fields_of_another_type_are_refused(checkpoint: Path) -> None:
    sound = (checkpoint / ".metadata").read_bytes()
    for change in (
        lambda table: table.state_dict_metadata["model.a"].chunks.append(3),
        lambda table: setattr(table.state_dict_metadata["model.a"], "size", "23"),
        lambda table: setattr(table.state_dict_metadata["model.a"], "size", torch.Size([-1, 2])),
        lambda table: setattr(table, "storage_data", [1]),
        lambda table: setattr(next(iter(table.storage_data.values())), "offset", -5),
        lambda table: setattr(next(iter(table.storage_data.values())), "length", 1.5),
    ):
        table = pickle.loads(sound)
        change(table)
        rewrite(checkpoint, pickle.dumps(table))
        refused_everywhere(checkpoint)


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/../../x"])
def test_a_manifest_names_only_files_of_its_directory(checkpoint: Path, name: str) -> None:
    manifest = Manifest.parse((checkpoint / MANIFEST).read_text())
    files = {**manifest.files, name: record(checkpoint / "meta.pt")}
    (checkpoint / MANIFEST).write_text(Manifest(manifest.layout, files, manifest.torch).render())
    (fault,) = verify(checkpoint)
    assert (fault.file, name in fault.what) == (MANIFEST, True)
    with pytest.raises(CheckpointError, match="no files of its directory"):
        load(checkpoint, {}, MESH)


def test_a_manifest_of_deep_brackets_is_a_fault(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    (fault,) = verify(checkpoint)
    assert fault.file == MANIFEST
    with pytest.raises(CheckpointError):
        load(checkpoint, {}, MESH)
