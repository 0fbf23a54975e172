"""One process, no process group: what users meet in a notebook, and every way to ask for the wrong thing."""

from __future__ import annotations

import ast
import random
import shutil
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import nn

import lightning_megatron.checkpoint as package
from lightning_megatron.checkpoint import (
    CheckpointError,
    load,
    local_tensors,
    model_state,
    open_checkpoint,
    optimizer_state,
    save,
    verify,
)
from lightning_megatron.checkpoint.directory.atomic_dir import place_for
from lightning_megatron.checkpoint.integrity.manifest import Manifest
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import ParamShard, ParamSpec

MESH = ParallelMesh.single()


def net(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))


def state_of(model):
    return model_state(local_tensors(model), {}, MESH)


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "step=10.ckpt", state_of(net()), {"epoch": 1}, MESH)
    return tmp_path / "step=10.ckpt"


def refused(path, state, *words, **options):
    with pytest.raises(CheckpointError) as error:
        load(path, state, MESH, **options)
    text = str(error.value)
    assert str(path) in text
    for word in words:
        assert word in text
    return text


def test_round_trip_with_objects_beside_tensors(tmp_path):
    model, other = net(), net()
    state = state_of(model) | {"model.extra": {"a": (1, [2.5])}}
    save(tmp_path / "a.ckpt", state, {"n": 1}, MESH, per_rank=MESH.rng.state_dict())
    back = state_of(other) | {"model.extra": None}
    loaded = load(str(tmp_path / "a.ckpt"), back, MESH)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert back["model.extra"] == {"a": (1, [2.5])}
    assert torch.equal(loaded.per_rank["default"], MESH.rng.state_dict()["default"])
    assert loaded.layout["tp"] == 1


def test_missing_keys_are_told_with_the_nearest_names(path):
    model = nn.Sequential()
    model.add_module("0", nn.Linear(3, 4))
    model.add_module("l", nn.BatchNorm1d(4))
    state = state_of(model)
    refused(path, state, "model.l.weight: not in the checkpoint", "nearest: model.1.weight", "but not in the model")
    loaded = load(path, state, MESH, strict=False)
    assert "model.l.weight" in loaded.missing
    assert "model.1.weight" in loaded.unexpected


def test_a_module_named_like_the_products_of_fp8_is_loaded_as_any_other(path, tmp_path):
    model = net()
    model.add_module("products", nn.Embedding(5, 3))
    refused(path, state_of(model), "model.products.weight: not in the checkpoint")
    save(tmp_path / "shop.ckpt", state_of(model), {}, MESH)
    refused(tmp_path / "shop.ckpt", state_of(net()), "model.products.weight: in the checkpoint, but not in the model")
    assert "model.products.weight" in open_checkpoint(tmp_path / "shop.ckpt").tensors()


def test_another_shape_is_told_with_both_even_if_not_strict(path):
    words = "model.0.weight: shape (4, 3) in the checkpoint, (5, 3) in the model"
    refused(path, state_of(net(5)), words)
    refused(path, state_of(net(5)), words, strict=False)


def test_a_checkpoint_of_weights_alone_says_so_once(path):
    shard = ParamShard("0.weight", ParamSpec((4, 3)), (4, 3), 0, 12, torch.zeros(12), {}, {"step": 1})
    optimizer = optimizer_state(0, [shard], MESH, [])
    text = refused(path, state_of(net()) | optimizer, "optimizer_0: the checkpoint has none of it", "save_weights_only")
    assert text.count("optimizer_0") == 1


def test_asking_for_less_than_all_families_is_no_error(path):
    assert load(path, {}, MESH).meta == {"epoch": 1}


def test_what_is_no_checkpoint_is_told_apart(path, tmp_path):
    refused(tmp_path / "step=11.ckpt", {}, "does not exist", "checkpoints there: step=10.ckpt")
    refused(tmp_path / "none" / "a.ckpt", {}, "nor does")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty" / "a.ckpt", {}, "holds no checkpoint")
    refused(tmp_path / "empty", {}, "no manifest.json")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    refused(tmp_path / "hf", {}, "Hugging Face")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / ".metadata").write_text("")
    refused(tmp_path / "foreign", {}, "written by another program")


def test_an_interrupted_save_is_told(path, tmp_path):
    half = place_for(tmp_path / "step=20.ckpt", "saving")
    shutil.copytree(path, half)
    refused(tmp_path / "step=20.ckpt", {}, "interrupted", "step=10.ckpt")
    refused(half, {}, "never completed")


def test_objects_are_refused_where_only_tensors_can_be_loaded(tmp_path):
    with pytest.raises(CheckpointError, match=r"(?s)saving.*config: .*type.*allow_objects"):
        save(tmp_path / "a.ckpt", {}, {"config": Path}, MESH)
    with pytest.raises(CheckpointError, match=r"(?s)model.extra must hold only"):
        save(tmp_path / "a.ckpt", {"model.extra": Path("x")}, {}, MESH)
    assert not (tmp_path / "a.ckpt").exists()
    save(tmp_path / "a.ckpt", {}, {"config": Path("x")}, MESH, allow_objects=True)
    refused(tmp_path / "a.ckpt", {}, "weights_only=False")
    assert load(tmp_path / "a.ckpt", {}, MESH, weights_only=False).meta == {"config": Path("x")}


FAULTS = {
    "flipped byte": lambda d: flip(d / "__0_0.distcp"),
    "flipped byte of the metadata": lambda d: flip(d / ".metadata"),
    "flipped byte of meta.pt": lambda d: flip(d / "meta.pt"),
    "truncated": lambda d: (d / "__0_0.distcp").write_bytes((d / "__0_0.distcp").read_bytes()[:-1]),
    "longer": lambda d: (d / "meta.pt").write_bytes((d / "meta.pt").read_bytes() + b"\0"),
    "missing": lambda d: (d / "__0_0.distcp").unlink(),
    "extra": lambda d: (d / "__7_0.distcp").write_bytes(b""),
    "swapped": lambda d: swap(d / "meta.pt", d / ".metadata"),
    "edited manifest": lambda d: edit(d / "manifest.json", '"tp": 1', '"tp": 2'),
    "spaces in the manifest": lambda d: edit(d / "manifest.json", "\n", "\n "),
    "no manifest": lambda d: (d / "manifest.json").unlink(),
}


def flip(file, place=None, bit=1):
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if place is None else place] ^= bit
    file.write_bytes(content)


def swap(a, b):
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def edit(file, old, new):
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds_and_load_refuses(fault, path):
    assert verify(path) == []
    FAULTS[fault](path)
    assert verify(path), "found"
    refused(path, {}, check="hashes")


def test_a_flipped_bit_anywhere_is_found(path):
    chance = random.Random(0)
    files = sorted(path.iterdir())
    originals = {file: file.read_bytes() for file in files}
    for _ in range(200):
        file = chance.choice(files)
        flip(file, chance.randrange(len(originals[file])), 1 << chance.randrange(8))
        assert verify(path), file.name
        file.write_bytes(originals[file])
    assert verify(path) == []


def test_another_format_is_told(path):
    manifest = Manifest({}, {}, "9.9", version=99)
    (path / "manifest.json").write_text(manifest.render())
    refused(path, {}, "it has format version 99, this package knows 2")
    assert "not there" in str(verify(path / "nothing")[0])


def test_lightning_consolidates_the_directory(tmp_path):
    vocabulary = ParamSpec((13, 3), tp_dim=0)
    weight = torch.zeros(16, 3)
    weight[:13] = torch.randn(13, 3)
    model = model_state({"embedding.weight": weight, "norm": torch.ones(3)}, {"embedding.weight": vocabulary}, MESH)
    moment = torch.randn(48)
    state = {"exp_avg": moment}, {"step": torch.tensor(5.0)}
    entry = ParamShard("embedding.weight", vocabulary, (16, 3), 0, 48, weight.flatten().clone(), *state)
    groups = [{"lr": 0.1, "params": ["embedding.weight"]}]
    save(tmp_path / "a.ckpt", model | optimizer_state(0, [entry], MESH, groups), {"epoch": 2}, MESH)
    whole = _format_checkpoint(_load_distributed_checkpoint(tmp_path / "a.ckpt"))
    assert whole["epoch"] == 2
    assert whole["state_dict"].keys() == {"embedding.weight", "norm"}
    assert torch.equal(whole["state_dict"]["embedding.weight"], weight[:13])
    (optimizer,) = whole["optimizer_states"]
    assert optimizer["param_groups"] == groups
    state = optimizer["state"]["embedding.weight"]
    assert state.keys() == {"master", "exp_avg", "step"}
    assert torch.equal(state["exp_avg"], moment.view(16, 3)[:13])
    assert state["step"] == 5.0


def private_names_of_torch(source):
    """Private names that a module imports from torch, or reads off something of torch's that it has imported."""
    tree, imported, found = ast.parse(source), {"torch"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            words = [*node.module.split("."), *(name.name for name in node.names)]
            imported |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.Import):
            words = [word for name in node.names if name.name.split(".")[0] == "torch" for word in name.name.split(".")]
            imported |= {name.asname for name in node.names if name.name.startswith("torch.") and name.asname}
        else:
            words = []
        found |= {word for word in words if word.startswith("_")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in imported:
                found.add(node.attr)
    return found


def test_private_names_of_torch_are_found_in_whatever_way_they_are_used():
    for source, names in {
        "from torch.distributed._shard import x": {"_shard"},
        "from torch.distributed.checkpoint.filesystem import _StorageInfo": {"_StorageInfo"},
        "import torch._utils": {"_utils"},
        "import torch.distributed as dist\ndist._tensor.x()": {"_tensor"},
        "import torch\nx = torch.utils._pytree.map(f)": {"_pytree"},
        "from torch import nn\nfrom other import _x\nself._y, nn.Linear, other._z": set(),
    }.items():
        assert private_names_of_torch(source) == names, source


def test_no_private_name_of_torch_is_used_but_the_one_that_is_in_the_files():
    """In each ``.metadata``, so that ``dcp.load`` reads it; ``tests/trainer/strategy/test_private.py`` has the rest."""
    folder = Path(package.__file__).parent
    files = {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*.py")}
    assert len(files) > 40, "folders inside, too"
    found = {name: private for name, source in files.items() if (private := private_names_of_torch(source))}
    assert found == {"dcp/box_writer.py": {"_StorageInfo"}}
