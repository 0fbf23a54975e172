"""Files that are written tensor after tensor, read by ``torch.load`` as those of ``torch.save``."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint.formats.lightning_content import in_order_of_definition
from lightning_megatron.checkpoint.formats.lightning_file import record_faults
from lightning_megatron.checkpoint.formats.torch_file import TensorSlot, TorchFile

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16)
WHOLE = torch.arange(15, dtype=torch.int32).view(3, 5)
VALUES = {str(dtype): WHOLE.to(dtype) for dtype in DTYPES} | {"scalar": torch.tensor(7.0), "none": torch.zeros(0, 3)}
VALUES["one of a column"] = torch.arange(8.0)[::2][:1]


def write(path: Path) -> None:
    slots = {key: TensorSlot(key, value.dtype, tuple(value.shape)) for key, value in VALUES.items()}
    of_model = OrderedDict(slots, tied=slots["torch.float32"])
    file = TorchFile(path, {"state_dict": of_model, "rest": [1, "a", torch.ones(3), None]})
    for slot in file.slots:
        file.add(VALUES[slot.key])
    file.close()


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_torch_reads_every_dtype(tmp_path: Path, mmap: bool, weights_only: bool) -> None:
    write(tmp_path / "a.ckpt")
    found: dict[str, Any] = torch.load(tmp_path / "a.ckpt", mmap=mmap, weights_only=weights_only)
    model = found["state_dict"]
    assert type(model) is OrderedDict
    for key, value in VALUES.items():
        assert model[key].dtype == value.dtype
        assert model[key].shape == value.shape
        same = value.clone(memory_format=torch.contiguous_format).as_strided((value.numel(),), (1,))
        assert bytes(model[key].view(-1).view(torch.uint8).tolist()) == bytes(same.view(torch.uint8).tolist())
    assert model["tied"] is model["torch.float32"]
    assert found["rest"][2].equal(torch.ones(3))
    if mmap:
        assert not any(value.data_ptr() % 64 for value in model.values() if value.numel()), "aligned, as torch's are"


def test_every_record_has_its_check_sum(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt")
    assert not record_faults(tmp_path / "a.ckpt", 0, 1)
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        records = {entry.filename: entry for entry in archive.infolist()}
    assert all(entry.CRC for name, entry in records.items() if entry.file_size)
    content = bytearray((tmp_path / "a.ckpt").read_bytes())
    content[content.index(VALUES["torch.int64"].numpy().tobytes()) + 8] ^= 1
    (tmp_path / "a.ckpt").write_bytes(content)
    assert len(record_faults(tmp_path / "a.ckpt", 0, 1)) == 1


@pytest.mark.parametrize(
    "stages",
    [
        [["embed", "layers.0.a", "layers.0.b"], ["layers.1.a", "layers.1.b", "norm"]],
        [["embed", "layers.0.a", "layers.0.b", "layers.2.a", "layers.2.b"], ["layers.1.a", "layers.1.b", "layers.3.a"]],
        [["embed", "layers.0.a"], ["embed", "layers.1.a", "norm"], ["embed", "layers.0.a"]],
        [["layers.2.a", "layers.10.a"], ["layers.9.a", "layers.11.a", "head"]],
        [["encoder.0.a", "encoder.1.a"], ["decoder.0.a", "decoder.1.a", "norm"]],
    ],
    ids=["blocks", "interleaved", "tied, on several ranks", "numbers", "two stacks"],
)
def test_names_of_stages_come_in_the_order_of_one_process(stages: list[list[str]]) -> None:
    found = in_order_of_definition(stages)
    assert sorted(found) == sorted({name for names in stages for name in names})
    for names in stages:
        assert [name for name in found if name in names] == names
    numbers = [int(name.split(".")[1]) for name in found if name.startswith("layers")]
    assert numbers == sorted(numbers)
    assert found[0] == stages[0][0]
