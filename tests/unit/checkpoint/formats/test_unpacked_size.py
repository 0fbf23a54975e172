"""Files that are to take far more memory than they are long, that run things, or that are none."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_megatron import LlamaModule
from lightning_megatron.checkpoint import CheckpointError, load, model_state, save, verify
from lightning_megatron.checkpoint.formats.hf.directory import read_tensors
from lightning_megatron.checkpoint.formats.megatron import is_megatron_directory, open_megatron
from lightning_megatron.checkpoint.formats.megatron.unpickle import load_file
from lightning_megatron.checkpoint.formats.meta import read_meta
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, record
from lightning_megatron.files.small import read_object, read_small
from lightning_megatron.mesh import ParallelMesh

MESH = ParallelMesh.single()
CONFIG = '{"model_type": "llama", "num_hidden_layers": %s, "hidden_size": %s, "num_attention_heads": 2,'
CONFIG += ' "vocab_size": 30, "intermediate_size": 8, "rope_theta": 10000.0}'


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def packed(content: bytes) -> bytes:
    """An archive of ``torch.save`` whose parts are compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def bomb() -> bytes:
    return packed(pickle.dumps({"state_dict": bytes(1 << 24)}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "x.ckpt", model_state({"a": torch.ones(2, 3)}, {}, MESH), {"epoch": 1}, MESH)
    return tmp_path / "x.ckpt"


def renew(path: Path) -> None:
    manifest = Manifest.parse((path / MANIFEST).read_text())
    files = {name: record(path / name) for name in manifest.files}
    (path / MANIFEST).write_text(Manifest(manifest.layout, files, manifest.torch).render())


def test_packed_archives_are_refused_by_every_reader(checkpoint: Path, tmp_path: Path) -> None:
    for name, reader in {
        "meta.pt": lambda file: read_meta(file.parent, weights_only=True),
        "one.ckpt": lambda file: load(file, {}, MESH),
        "pytorch_model.bin": lambda file: read_tensors(file.parent),
        "common.pt": lambda file: load_file(file, allow_pickle=True),
    }.items():
        file = tmp_path / name
        file.write_bytes(bomb())
        with pytest.raises(CheckpointError, match=rf"{name}: an archive of \d+ bytes that unpacks to 167\d+"):
            reader(file)
    # In the place of a tensor, with a table and a manifest that fit.
    table = pickle.loads((checkpoint / ".metadata").read_bytes())
    (index, place), content = next((i, p) for i, p in table.storage_data.items() if i.fqn == "model.a"), bomb()
    file = checkpoint / place.relative_path
    table.storage_data[index] = type(place)(place.relative_path, file.stat().st_size, len(content))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))
    file.write_bytes(file.read_bytes() + content)
    renew(checkpoint)
    with pytest.raises(CheckpointError, match=r"distcp: an archive of \d+ bytes that unpacks to"):
        load(checkpoint, model_state({"a": torch.zeros(2, 3)}, {}, MESH), MESH)


def test_a_table_speaks_of_no_more_than_its_files_hold(checkpoint: Path) -> None:
    table = pickle.loads((checkpoint / ".metadata").read_bytes())
    entry = table.state_dict_metadata["model.a"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 40, 3])
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))
    renew(checkpoint)
    with pytest.raises(CheckpointError, match=r"\.metadata: the tensors in it take 131\d+ bytes, and the files"):
        load(checkpoint, {}, MESH)


def test_objects_and_what_is_no_dictionary_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for value, text in ((Touches(mark), "holds objects"), ([1], "holds a list"), (torch.ones(1), "holds a Tensor")):
        torch.save(value, checkpoint / "meta.pt")
        renew(checkpoint)
        with pytest.raises(CheckpointError, match=text):
            load(checkpoint, {}, MESH)
        torch.save(value, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            read_tensors(tmp_path)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            load_file(tmp_path / "pytorch_model.bin", allow_pickle=False)
    assert not mark.exists()


def test_entries_of_lightning_are_of_their_types(checkpoint: Path, tmp_path: Path) -> None:
    for name, value in (("pytorch-lightning_version", 7), ("loops", []), ("global_step", "3"), ("lr_schedulers", 3)):
        torch.save({"epoch": 1, name: value}, checkpoint / "meta.pt")
        renew(checkpoint)
        torch.save({"state_dict": {}, name: value}, tmp_path / "one.ckpt")
        for path in (checkpoint, tmp_path / "one.ckpt"):
            with pytest.raises(CheckpointError, match=rf"{path.name}: .*{name} is a {type(value).__name__}, and"):
                load(path, {}, MESH)


def test_tensors_that_are_no_numbers_in_memory_are_refused(tmp_path: Path) -> None:
    for tensor, text in (
        (torch.eye(3).to_sparse(), "w is no plain tensor"),
        (torch.ones(4, device="meta"), "w is no plain tensor"),
        (torch.ones(1).expand(1 << 33), r"w takes 34359738368 bytes, and the whole file has \d+"),
    ):
        torch.save({"w": tensor}, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=text):
            read_tensors(tmp_path)
        torch.save({"state_dict": {"w": tensor}}, tmp_path / "one.ckpt")
        with pytest.raises(CheckpointError, match=text):
            load(tmp_path / "one.ckpt", {}, MESH)


@pytest.mark.parametrize(("layers", "features"), [(10**9, 16), (2, 10**9), (2, 1 << 62)])
def test_a_model_far_larger_than_its_weights_is_not_built(tmp_path: Path, layers: int, features: int) -> None:
    (tmp_path / "config.json").write_text(CONFIG % (layers, features))
    save_file({f"model.{n}": torch.ones(30, 16) for n in range(20)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"config\.json describes {layers} layers of {features} features"):
        LlamaModule.from_hf(tmp_path)


def spoilers() -> dict[str, Callable[[Path], object]]:
    def device(file: Path) -> None:
        file.unlink()
        file.symlink_to("/dev/zero")

    def pipe(file: Path) -> None:
        file.unlink()
        os.mkfifo(file)

    return {"device": device, "pipe": pipe}


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_device_or_a_pipe_is_no_file(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    for name in ("meta.pt", ".metadata", "__0_0.distcp", MANIFEST):
        file = checkpoint / name
        content = file.read_bytes()
        spoilers()[kind](file)
        assert verify(checkpoint)
        with pytest.raises(CheckpointError):
            load(checkpoint, {}, MESH)
        file.unlink()
        file.write_bytes(content)
    assert not verify(checkpoint)
    for name, weights in (
        ("a", "model.safetensors"),
        ("b", "pytorch_model.bin"),
        ("c", "model.safetensors.index.json"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / weights).touch()
        spoilers()[kind](tmp_path / name / weights)
        with pytest.raises(CheckpointError, match="holds no weights"):
            read_tensors(tmp_path / name)
    (tmp_path / "c" / "small").touch()
    spoilers()[kind](tmp_path / "c" / "small")
    with pytest.raises(ValueError, match="no ordinary file"):
        read_small(tmp_path / "c" / "small")


@pytest.mark.parametrize(
    "content", [b"9" * 5000, b"9" * 300, "\u00b2".encode(), b"\xff\xfe", b"../x", b"-3", b"3\x00", b""]
)
def test_the_file_that_names_the_last_iteration_holds_a_number_or_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    assert is_megatron_directory(tmp_path)
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration\.txt should hold a number"):
        open_megatron(tmp_path)


def test_small_files_are_read_up_to_a_length(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a": 1}')
    assert read_object(file) == {"a": 1}
    with pytest.raises(ValueError, match="longer than 4 bytes"):
        read_small(file, 4)
    for text, fault in (("[1]", "not a JSON object"), ("[" * 10**5, "nested too deep"), ("{", "Expecting")):
        file.write_text(text)
        with pytest.raises(ValueError, match=fault):
            read_object(file)
