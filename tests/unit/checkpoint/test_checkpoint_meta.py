from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path

import pytest
import torch

from lightning_megatron.checkpoint.formats import meta as meta_file
from lightning_megatron.checkpoint.formats.meta import (
    META,
    objects_in,
    read_meta,
    refuse_other_writers,
    render_meta,
    write_meta,
)
from lightning_megatron.errors import CheckpointError


class Config:
    pass


PLAIN = {
    "epoch": 3,
    "global_step": 10**20,
    "loops": {"fit_loop": {"state_dict": {}, 1: [1, (2, None), {"x"}]}},
    "callbacks": {"ModelCheckpoint{'monitor': 'v'}": {"best_model_score": torch.tensor(1.5), "last": "a/b.ckpt"}},
    "shape": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "order": OrderedDict(a=1),
    "bytes": b"\x00\xff",
    "nan": float("inf"),
    "rng": [torch.arange(5, dtype=torch.uint8), (3, (1, 2, 3), None)],
}


def test_everything_plain_comes_back(tmp_path):
    write_meta(tmp_path, render_meta(PLAIN, allow_objects=False))
    back = read_meta(tmp_path, weights_only=True)
    assert {k: v for k, v in back.items() if k not in ("callbacks", "rng")} == {
        k: v for k, v in PLAIN.items() if k not in ("callbacks", "rng")
    }
    assert back["callbacks"]["ModelCheckpoint{'monitor': 'v'}"]["best_model_score"].item() == 1.5
    assert torch.equal(back["rng"][0], PLAIN["rng"][0])


@pytest.mark.parametrize(
    ("meta", "where"),
    [
        ({"hyper_parameters": {"data": {"root": Path("x")}}}, r"hyper_parameters\.data\.root: pathlib"),
        ({"callbacks": [1, {"c": Config()}]}, r"callbacks\[1\]\.c: .*Config"),
        ({"a": defaultdict(lambda: 1, b=2)}, r"a: collections\.defaultdict"),
        ({"f": print}, r"f: builtins\.builtin_function"),
        ({"k": {Path("x"): 1}}, r"k: the key .*Path"),
    ],
)
def test_what_is_not_plain_is_named_by_its_key_path(tmp_path, meta, where):
    with pytest.raises(CheckpointError, match=where) as error:
        render_meta({"epoch": 1, **meta}, allow_objects=False)
    assert "allow_objects=True" in str(error.value)
    assert not any(tmp_path.iterdir())


def test_every_object_is_named_at_once():
    assert len(list(objects_in({"a": Path("x"), "b": [Path("y"), 1], "c": 2}))) == 2


def test_objects_can_be_allowed_on_both_sides(tmp_path):
    write_meta(tmp_path, render_meta({"path": Path("x")}, allow_objects=True))
    with pytest.raises(CheckpointError, match="weights_only=False"):
        read_meta(tmp_path, weights_only=True)
    assert read_meta(tmp_path, weights_only=False) == {"path": Path("x")}


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"epoch": "3"}, "epoch is a str, and should be a int"),
        ({"hyper_parameters": [1, 2]}, "hyper_parameters is a list, and should be a dict"),
        ({"hugging_face": [1]}, "hugging_face is a list, and should be a dict"),
    ],
)
def test_entries_of_other_types_are_named_with_the_file(tmp_path, entry, text):
    write_meta(tmp_path, render_meta(entry, allow_objects=False))
    with pytest.raises(CheckpointError, match=f"{META}: the Trainer's state in it is damaged: {text}"):
        read_meta(tmp_path, weights_only=True)


def test_a_checkpoint_that_no_trainer_saved_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=f"{META} holds no pytorch-lightning_version: it was not saved by a T"):
        refuse_other_writers(tmp_path, {})
    refuse_other_writers(tmp_path, {"pytorch-lightning_version": "2.6.6"})


LOOP: list[object] = []
LOOP.append(LOOP)
SURE = [
    {"a": [1, 2.5, "x", None, True, (-(1 << 63), (1 << 63) - 1)], 3: {"\ud800": float("nan")}},
    [torch.zeros(2, 3), torch.zeros(3, dtype=torch.bfloat16), torch.arange(6).view(2, 3).t(), torch.tensor(1.0)],
    [torch.zeros(2, requires_grad=True), torch.zeros(2, dtype=torch.float8_e4m3fn), torch.zeros(0)],
]
NOT_SURE = [1 << 63, 1 << 3000, b"x", {1, 2}, OrderedDict(a=1), Path("x"), [{"a": (Path("x"),)}], LOOP, int, lambda: 0]


def test_what_is_taken_for_plain_without_a_trial_passes_the_trial():
    for value in SURE:
        assert meta_file.is_surely_plain(value)
        assert meta_file._survives(value)


def test_all_else_is_tried():
    marked = torch.zeros(2)
    marked.note = Path("x")
    odd = [marked, torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), torch.nn.Parameter(torch.zeros(1))]
    for value in (*NOT_SURE, *odd):
        assert not meta_file.is_surely_plain(value)
    assert meta_file.is_plain(OrderedDict(a=1))
    assert not meta_file.is_plain([{"a": (Path("x"),)}])
