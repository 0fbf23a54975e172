"""Comparison of ranks, without processes."""

from __future__ import annotations

import argparse
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE
from torch.distributed import HashStore

from lightning_megatron import ConfigError, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.lightning.comparison.code import class_digest, code_facts
from lightning_megatron.lightning.comparison.compare import RankComparison, differences, rank_ranges
from lightning_megatron.lightning.comparison.facts import Statement, loader_statement, start_statement
from lightning_megatron.lightning.comparison.values import flat


@dataclass
class Sizes:
    width: int = 2


class Kept:
    def __init__(self, shown: int, hidden: float, gone: str) -> None:
        self.shown, self._hidden, self.counter = shown, hidden, 7


def test_values_become_plain_and_say_what_they_are() -> None:
    given = {
        "flag": True,
        "sizes": Sizes(),
        "space": argparse.Namespace(a=1),
        "names": SimpleNamespace(b=[1, None, "x"]),
        "nested": [{"c": 1}, {"c": 2}],
        "letters": set("abcdefghijkl"),  # hashes of so many have the order of letters in one process of 12!
        "tensor": torch.zeros(2, 3),
        "number": np.float32(0.5),
        "time": timedelta(minutes=1),
        "path": Path("a/b"),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu", 0),
        "kept": Kept(1, 0.5, "x"),
        "call": partial(max, 1, key=abs),
        "long": list(range(100)),
        "module": torch.nn.Linear(1, 1),
    }
    assert dict(flat("x", given)) == {
        "x.flag": True,
        "x.sizes.width": 2,
        "x.space.a": 1,
        "x.names.b": "[1, None, 'x']",
        "x.nested.0.c": 1,
        "x.nested.1.c": 2,
        "x.letters": str(list("abcdefghijkl")),
        "x.tensor": "Tensor [2, 3] torch.float32",
        "x.number": 0.5,
        "x.time": "0:01:00",
        "x.path": "a/b",
        "x.dtype": "torch.bfloat16",
        "x.device": "cpu",
        "x.kept": f"{__name__}.Kept",
        "x.kept.shown": 1,
        "x.kept.hidden": 0.5,
        "x.call.function": "builtins.max",
        "x.call.args": "[1]",
        "x.call.key": "builtins.abs",
        "x.long": next(iter(dict(flat("y", list(range(100)))).values())),
        "x.module": "torch.nn.modules.linear.Linear",
    }
    ring: dict[str, Any] = {}
    ring["itself"] = ring
    assert len(dict(flat("x", ring))) == 1


def test_a_class_is_known_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(where: str, factor: int) -> type:
        """The class of one module, as the files of a machine have it."""
        file = tmp_path / where / "of_a_user.py"
        file.parent.mkdir()
        file.write_text(f"class Made:\n    slope = {factor}\n\n    def f(self, x):\n        return x * {factor}\n")
        spec = spec_from_file_location("of_a_user", file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "of_a_user", module)
        spec.loader.exec_module(module)
        return module.Made

    found = [class_digest(made(where, factor)) for where, factor in (("one", 2), ("copy", 2), ("other", 3))]
    assert found[0] == found[1] != found[2]
    facts = code_facts(made("last", 2)(), torch.nn.Linear(1, 1))
    assert facts["code.torch"] == torch.__version__
    assert [name for name in facts if "Made" in name or "Linear" in name] == ["code.Made"]
    assert class_digest(type("Nowhere", (), {"__module__": "nowhere"})) == "no source"


def test_differences_say_who_has_what_and_one_setting_is_named_once() -> None:
    facts = {rank: {"a.lr": 1.0, "b.lr": 1.0, "c": 2, "same": 0} for rank in range(6)}
    facts[3] |= {"a.lr": 2.0, "b.lr": 2.0}
    facts[4] |= {"a.lr": 2.0, "b.lr": 2.0}
    del facts[5]["c"]
    assert differences(facts) == [
        (["a.lr", "b.lr"], 1.0, "on ranks 0-2, 5, but 2.0 on ranks 3-4"),
        (["c"], 2, "on ranks 0-4, but '(nothing)' on rank 5"),
    ]
    assert rank_ranges([7]) == "rank 7"
    assert rank_ranges([1, 2, 3, 7, 9, 10]) == "ranks 1-3, 7, 9-10"


def compared(*statements: Statement, may_differ: tuple[str, ...] = ()) -> list[str]:
    """Results of a comparison, by rank; threads stand for processes."""
    store, texts = HashStore(), [""] * len(statements)

    def rank(number: int, statement: Statement) -> None:
        try:
            RankComparison(store, number, len(statements), may_differ).compare(statement)
        except ConfigError as error:
            texts[number] = str(error)

    threads = [threading.Thread(target=rank, args=pair) for pair in enumerate(statements)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(set(texts)) == 1, texts
    return texts


def test_every_rank_raises_one_error_with_every_difference_and_a_way_out() -> None:
    one = Statement({"a": 1, "b": 2}, {"replica 0": {"n": 1}})
    other = Statement({"a": 1, "b": 3}, {"replica 0": {"n": 2}})
    assert compared(one, one) == ["", ""]
    assert compared(one, Statement(one.shared, {"replica 1": {"n": 2}})) == ["", ""]  # another replica's own data
    text = compared(one, other, one)[0]
    assert "b=2: on ranks 0, 2, but 3 on rank 1" in text
    assert "n=1: on ranks 0, 2, but 2 on rank 1" in text
    assert "may_differ=[]: " in text
    assert "['b', 'n']" in text
    assert compared(one, other, may_differ=("b", "n*")) == ["", ""]
    assert compared(one, other, may_differ=("n",))[0].count("\n  - ") == 2  # what is left, and the way out


def told_by(rank: int, **changes: Any) -> Statement:
    strategy = MegatronStrategy(**changes)
    return start_statement(strategy.settings, strategy._job.layout, rank, 4, None)


def test_ranks_of_one_replica_are_compared_apart_and_layouts_at_all_events() -> None:
    first, third = told_by(0, tp=2), told_by(2, tp=2)
    assert first.shared == third.shared
    assert list(first.within) != list(third.within)
    assert list(first.within) == list(told_by(1, tp=2).within)
    assert "strategy.tp=2: on rank 0, but 1 on rank 1" in compared(first, told_by(1))[0]
    assert told_by(0, tp=3).within  # a layout that cannot be is compared all the same


def test_loaders_of_one_replica_are_compared_and_none_may_be_empty_alone() -> None:
    statement = loader_statement([1, 2], "train", 0, may_be_empty=False)
    expected = {"length": 2, "samples": None, "batch_size": None}
    assert statement.within == {"replica 0": {f"train_dataloader.{name}": value for name, value in expected.items()}}
    empty = loader_statement([], "train", 1, may_be_empty=False)
    assert "train_dataloader.is_empty=False: on rank 0, but True on rank 1" in compared(statement, empty)[0]
    allowed = [loader_statement(data, "train", n, may_be_empty=True) for n, data in enumerate(([1], []))]
    assert compared(*allowed) == ["", ""]


def test_megatrons_data_are_known_by_content_and_not_by_path(tmp_path: Path) -> None:
    def facts(name: str, shift: int = 0) -> dict[str, Any]:
        with IndexedDatasetWriter(str(tmp_path / name), np.uint16) as writer:
            for _ in range(20):
                writer.add_document((np.arange(20) + shift) % 30, [20])
        return MegatronDataModule(str(tmp_path / name), seq_length=4).facts()

    assert facts("one") == facts("copy")
    assert facts("one") != facts("other", 1)
    (tmp_path / "one.bin").unlink()
    assert "cannot be read" in str(MegatronDataModule(str(tmp_path / "one"), seq_length=4).facts())
