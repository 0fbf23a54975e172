"""Files of a Hugging Face directory: read one tensor at a time, written so that others read them, every fault named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory, read_config, read_tensors
from lightning_megatron.checkpoint.formats.hf.write import plan_shards, shard_names, write_hf
from lightning_megatron.checkpoint.formats.weight_map import Split, WeightMap, same, stacked
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor, in_dtype
from lightning_megatron.errors import ConfigError
from tests.foreign import lazy, to_native

RULES = WeightMap((same("w", "model.w"), stacked("m", "model.gate", "model.up")), ignored="inv_freq$", prefix="model.")
SHAPES: dict[str, tuple[int, ...]] = {"w": (5,), "m": (2, 3, 4)}


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"model.w": torch.randn(5), "model.gate": torch.randn(3, 4), "model.up": torch.randn(3, 4)}


def noted(tensor: Tensor, made: list[str], name: str) -> LazyTensor:
    def make() -> Tensor:
        made.append(name)
        return tensor

    return LazyTensor(tuple(tensor.shape), tensor.dtype, make)


def in_one(folder: Path) -> None:
    save_file(tensors(), folder / "model.safetensors")


def in_several(
    folder: Path, save: Callable[..., None] = save_file, name: str = "model", end: str = "safetensors"
) -> None:
    given = tensors()
    places = {"model.w": f"{name}-1.{end}", "model.gate": f"{name}-1.{end}", "model.up": f"{name}-2.{end}"}
    for file in set(places.values()):
        save({tensor: given[tensor] for tensor in places if places[tensor] == file}, folder / file)
    (folder / f"{name}.{end}.index.json").write_text(json.dumps({"weight_map": places}))


def pickled(folder: Path) -> None:
    torch.save(tensors(), folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    "write", [in_one, in_several, pickled, partial(in_several, save=torch.save, name="pytorch_model", end="bin")]
)
def test_every_kind_of_directory_is_read(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    found = read_tensors(tmp_path)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert (found[name].shape, found[name].dtype) == (tuple(tensor.shape), torch.float32)
        assert torch.equal(found[name].materialize(), tensor)


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    in_several(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    edit(content["weight_map"])
    index.write_text(json.dumps(content))


def truncate(folder: Path, name: str) -> None:
    in_several(folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:-8])


def duplicate(folder: Path) -> None:
    in_several(folder)
    save_file({name: tensors()[name] for name in ("model.w", "model.up")}, folder / "model-2.safetensors")


def cut_pickle(folder: Path) -> None:
    pickled(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    ("spoil", "texts"),
    [
        (lambda folder: None, ["holds no weights: neither model.safetensors nor pytorch_model.bin"]),
        (partial(truncate, name="model-1.safetensors"), ["model-1.safetensors: truncated"]),
        (
            partial(edit_index, edit=lambda m: m.update({"a": "model-3.safetensors", "b": "model-4.safetensors"})),
            ["model-3.safetensors: missing", "model-4.safetensors: missing"],
        ),
        (duplicate, ["model-2.safetensors: model.w is a duplicate of the one in model-1.safetensors"]),
        (cut_pickle, ["pytorch_model.bin: truncated"]),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), ["index.json: cannot be read"]),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), ["it has no weight_map"]),
        (
            partial(edit_index, edit=lambda m: m.update({"a": 3, "b": ["x"], "c": "../model-1.safetensors"})),
            ["a is said to be in 3, which", "b is said to be in ['x']", "c is said to be in '../model-1.safetensors'"],
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("[" * 10**5 + "]" * 10**5),
            ["index.json: cannot be read: its brackets are nested too deep"],
        ),
    ],
)
def test_faults_are_named_with_file_and_tensor(spoil: Callable[[Path], Any], texts: list[str], tmp_path: Path) -> None:
    spoil(tmp_path)
    with pytest.raises(CheckpointError) as error:
        read_tensors(tmp_path)
    for text in texts:
        assert text in str(error.value)


def test_a_tied_tensor_that_is_there_twice_must_be_the_same_twice() -> None:
    rules = WeightMap((same("w", "model.w", "lm_head.weight"),), ignored="inv_freq$", prefix="model.")
    given = {"model.w": torch.ones(5), "lm_head.weight": torch.ones(5)}
    assert torch.equal(to_native(rules, given, {"w": (5,)})["w"], torch.ones(5))
    given["lm_head.weight"] = torch.ones(5).index_fill(0, torch.tensor(3), 2.0)
    text = r"tensor='lm_head\.weight': the configuration ties it to model\.w, and their values differ"
    found = rules.to_native(lazy(given), {"w": (5,)})
    with pytest.raises(ConfigError, match=text):
        found["w"].materialize()


def test_a_pickle_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    torch.save({"model.w": torch.nn.Linear(2, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        read_tensors(tmp_path)


def test_what_a_hugging_face_directory_is(tmp_path: Path) -> None:
    assert not is_hf_directory(tmp_path)
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert is_hf_directory(tmp_path)
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "manifest.json").touch()
    assert not is_hf_directory(tmp_path)


def test_our_tensors_are_joined_when_they_are_wanted() -> None:
    made: list[str] = []
    given = {name: noted(tensor, made, name) for name, tensor in tensors().items()}
    given["rotary.inv_freq"] = given["model.w"]
    found = RULES.to_native(given, SHAPES)
    assert made == []
    assert found["m"].shape == SHAPES["m"]
    assert torch.equal(found["m"].materialize(), torch.stack([tensors()["model.gate"], tensors()["model.up"]]))
    assert made == ["model.gate", "model.up"]
    assert RULES.to_native(given, {"w": (5,)}).keys() == {"w"}, "a stage takes what it holds"
    assert in_dtype(found, torch.bfloat16)["m"].materialize().dtype == torch.bfloat16


def test_shapes_and_names_that_do_not_fit_are_named_together() -> None:
    given = lazy(tensors())
    with pytest.raises(CheckpointError) as error:
        RULES.to_native(given | lazy({"model.up": torch.ones(2, 4)}), SHAPES | {"w": (6,)})
    assert "model.w [5]: makes w [5], and the model's is [6]" in str(error.value)
    assert "model.gate [3, 4], model.up [2, 4]: cannot be joined to m" in str(error.value)
    with pytest.raises(ConfigError, match=r"model\.x"):
        RULES.to_native(given | {"model.x": given["model.w"]}, SHAPES)


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    native = RULES.to_native(lazy(tensors()), SHAPES)
    for size, files in ((10**9, 1), (60, 3), (70, 2)):
        path = tmp_path / str(size)
        write_hf(path, {"model_type": "x"}, RULES.to_foreign(native), max_shard_size=size)
        assert len(list(path.glob("*.safetensors"))) == files
        back = {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}
        assert back.keys() == tensors().keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors().items())
        assert {name: x.materialize().tolist() for name, x in read_tensors(path).items()} == {
            name: x.tolist() for name, x in tensors().items()
        }
        assert read_config(path) == {"model_type": "x", "torch_dtype": "float32"}
    index = json.loads((tmp_path / "60" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (5 + 12 + 12)
    assert index["weight_map"]["model.w"] == "model-00001-of-00003.safetensors"
    with pytest.raises(CheckpointError, match="exists already"):
        write_hf(tmp_path / "60", {}, [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_written(dtype: torch.dtype, tmp_path: Path) -> None:
    native = RULES.to_native(lazy(tensors()), SHAPES)
    write_hf(tmp_path / "a", {}, RULES.to_foreign(native), dtype=dtype)
    back = load_file(tmp_path / "a" / "model.safetensors")
    assert all(torch.equal(back[name], tensor.to(dtype)) for name, tensor in tensors().items())


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> Any:
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        write_hf(tmp_path / "a", {}, [Split({"w": torch.empty(3, device="meta")}, fail)])
    assert list(tmp_path.iterdir()) == []


def test_shards_are_cut_in_order_and_a_large_tensor_has_its_own() -> None:
    sizes = {"a": (4,), "b": (4,), "c": (40,), "d": (1,)}
    shards = plan_shards({name: (torch.float32, shape) for name, shape in sizes.items()}, 32)
    assert [list(shard) for shard in shards] == [["a", "b"], ["c"], ["d"]]
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2)[1] == "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("shards_remain", [True, False])
def test_a_single_file_is_read_before_an_index(shards_remain: bool, tmp_path: Path) -> None:
    in_several(tmp_path)
    if not shards_remain:
        for shard in tmp_path.glob("model-*.safetensors"):
            shard.unlink()
    save_file({"model.w": torch.full((5,), 7.0)}, tmp_path / "model.safetensors")
    found = read_tensors(tmp_path)
    assert {name: tensor.materialize().tolist() for name, tensor in found.items()} == {"model.w": [7.0] * 5}


@pytest.mark.parametrize(
    "edit",
    [
        lambda places: places.pop("model.gate"),
        lambda places: places.update({"model.w": "model-2.safetensors"}),
        lambda places: places.update({"model.rotary.inv_freq": "model-2.safetensors"}),
    ],
    ids=["without", "elsewhere", "nowhere"],
)
def test_an_index_names_files_and_all_of_their_tensors_count(edit: Callable[..., object], tmp_path: Path) -> None:
    edit_index(tmp_path, edit)
    found = {name: tensor.materialize() for name, tensor in read_tensors(tmp_path).items()}
    assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in tensors().items()}


def test_a_pickle_of_a_torch_before_1_6_is_read(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    found = read_tensors(tmp_path)
    assert {n: t.materialize().tolist() for n, t in found.items()} == {n: t.tolist() for n, t in tensors().items()}


def test_norms_of_old_files_get_the_names_of_today(tmp_path: Path) -> None:
    save_file({"LayerNorm.gamma": torch.ones(2), "LayerNorm.beta": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path).keys() == {"LayerNorm.weight", "LayerNorm.bias"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_that_overflows_names_the_tensors_and_writes_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    largest = torch.finfo(torch.float32).max
    given = {"ids": torch.tensor([1 << 40]), "fine": torch.tensor([1.0, torch.inf, torch.nan])}
    given |= {f"w{i}": torch.tensor([1.0, largest, -largest, torch.inf]) for i in range(10)}
    floats = {name: value for name, value in given.items() if name != "ids"}
    splits = [Split({name: value.to("meta")}, partial(list, [value])) for name, value in floats.items()]
    limit = f"{str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:g}, and values are beyond it in "
    named = ", ".join(f"w{i} (2)" for i in range(8)) + " and 2 more tensors: write them in fp32"
    with pytest.raises(CheckpointError, match=re.escape(limit + named)):
        write_hf(tmp_path / "a", {}, splits, dtype=dtype)
    with pytest.raises(CheckpointError, match=re.escape(limit + "w9 (2), w0 (2), w1")):
        in_dtype(lazy(given), dtype)["w9"].materialize()
    assert list(tmp_path.iterdir()) == []


def test_a_cast_keeps_values_that_are_not_finite_and_integers() -> None:
    value = torch.tensor([1.0, 65504.0, -torch.inf, torch.nan])
    found = in_dtype(lazy({"w": value, "count": torch.tensor([1003])}), torch.float16)
    assert torch.equal(found["w"].materialize().view(torch.int16), value.half().view(torch.int16))
    assert (found["count"].dtype, found["count"].materialize().tolist()) == (torch.int64, [1003])
