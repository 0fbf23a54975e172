"""Blends from files and by split, through ``build_gpt_datasets`` and ``MegatronDataModule`` with its defaults."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lightning_megatron import MegatronDataModule
from lightning_megatron.data import BlendedDataset, IndexedDatasetWriter, build_gpt_datasets
from lightning_megatron.data.build import parse_data_path
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing.trainer import quiet_trainer

WriteCorpus = Callable[..., Path]


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, str]:
    """Pairs whose tokens tell the pair: a thousand times its number, and counted on."""
    found = {}
    for number, (name, documents) in enumerate({"a": 40, "b": 30, "v": 10, "t": 9}.items(), start=1):
        found[name] = str(tmp_path / "data" / name)
        Path(found[name]).parent.mkdir(exist_ok=True)
        with IndexedDatasetWriter(found[name], np.uint16) as writer:
            for k in range(documents):
                writer.add_document(np.arange(20) + number * 1000 + 20 * k, [20])
    return found


def shares(loader: Any) -> dict[int, float]:
    counts = Counter(int(token) // 1000 for batch in loader for token in batch["tokens"].flatten())
    return {pair: count / sum(counts.values()) for pair, count in sorted(counts.items())}


def set_up(*args: Any, **kwargs: Any) -> MegatronDataModule:
    data = MegatronDataModule(*args, **kwargs)
    data.trainer = quiet_trainer(max_epochs=1)
    assert data.data_problems() == []
    data.setup("fit")
    return data


def test_a_weighted_blend_works_with_all_defaults(corpora: dict[str, str]) -> None:
    data = set_up([0.7, corpora["a"], 0.3, corpora["b"]], 8)
    assert shares(data.train_dataloader()) == pytest.approx({1: 0.7, 2: 0.3}, abs=0.03)
    assert set(shares(data.val_dataloader())) == {1, 2}


def test_a_list_without_weights_reads_each_token_once(corpora: dict[str, str]) -> None:
    data = set_up([corpora["a"], corpora["b"]], 19, split="1")
    tokens = [int(token) for batch in data.train_dataloader() for token in batch["tokens"].flatten()]
    assert len(set(tokens)) == len(tokens)
    # The tokens behind the last whole sample of each pair are left out, with the one that is a label only.
    assert Counter(token // 1000 for token in tokens) == {1: (800 - 1) // 19 * 19, 2: (600 - 1) // 19 * 19}


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_a_file_is_what_it_holds(corpora: dict[str, str], tmp_path: Path, write: Any, ending: str) -> None:
    if ending == "json" and write is yaml.safe_dump:
        return
    file = tmp_path / f"blend.{ending}"
    file.write_text(write([0.7, "data/a", 0.3, corpora["b"]]))  # from the folder of the file, or absolute
    for path in (file, str(file)):
        assert parse_data_path(path) == parse_data_path([0.7, corpora["a"], 0.3, corpora["b"]])
    whole, named = (set_up(path, 8) for path in ([0.7, corpora["a"], 0.3, corpora["b"]], file))
    assert shares(whole.train_dataloader()) == shares(named.train_dataloader())
    assert whole.fingerprint == named.fingerprint


@pytest.mark.parametrize("as_file", [True, False])
def test_a_blend_for_each_split(corpora: dict[str, str], tmp_path: Path, as_file: bool) -> None:
    blends: Any = {
        "train": [0.5, corpora["a"], 0.5, corpora["b"]],
        "valid": [3, corpora["v"], 1, corpora["t"]],
        "test": corpora["t"],
    }
    given = blends
    if as_file:
        (tmp_path / "splits.json").write_text(json.dumps(blends))
        given = tmp_path / "splits.json"
    data = set_up(given, 8)
    assert shares(data.train_dataloader()) == pytest.approx({1: 0.5, 2: 0.5}, abs=0.02)
    assert shares(data.val_dataloader()) == pytest.approx({3: 0.75, 4: 0.25}, abs=0.05)
    data.setup("test")
    assert set(shares(data.test_dataloader())) == {4}
    built = build_gpt_datasets(given, seq_length=8)
    assert all(isinstance(each, BlendedDataset) for each in built[:2])
    separate = {f"{split}_data_path": path for split, path in blends.items()}
    for mine, theirs in zip(built, build_gpt_datasets(seq_length=8, **separate), strict=True):
        assert mine is not None
        assert theirs is not None
        assert len(mine) == len(theirs)
        assert mine[5]["tokens"].tolist() == theirs[5]["tokens"].tolist()


FAULTS: dict[str, tuple[Any, str]] = {
    "a split by another name": (
        {"train": "a", "validate": "b"},
        r"data_path='validate': is no split; nearest valid: valid",
    ),
    "training alone": ({"train": "a"}, "needs train and one of valid and test"),
    "no training": ({"valid": "a", "test": "b"}, "needs train and one of valid and test"),
    "numbers": ([1, 2], r"is a prefix, a list of prefixes"),
    "a list in a list": ([["a"]], "holds no prefix, list of prefixes"),
    "nothing": (None, "holds no prefix, list of prefixes"),
    "a weight of zero": ([0, "a", 1, "b"], "every weight must be a positive number"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_files(fault: str, tmp_path: Path) -> None:
    content, text = FAULTS[fault]
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=text):
        MegatronDataModule(str(tmp_path / "blend.yaml"), 8)


@pytest.mark.parametrize("name", ["one\u2028two", "one\x85two", "one\x7ftwo"], ids=ascii)
def test_a_json_file_is_read_as_json(name: str, tmp_path: Path) -> None:
    file = tmp_path / "blend.json"
    file.write_text(json.dumps([0.5, name, 0.5, "b"], ensure_ascii=False, indent="\t"), encoding="utf-8")
    assert parse_data_path(file).prefixes == (str(tmp_path / name), str(tmp_path / "b"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data_path='.*none\.json': the file cannot be read: .*No such file"):
        MegatronDataModule(str(tmp_path / "none.json"), 8)
    (tmp_path / "x.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"x\.yaml': the file cannot be read: while parsing"):
        MegatronDataModule(str(tmp_path / "x.yaml"), 8)
    (tmp_path / "splits.json").write_text(json.dumps({"train": "a", "valid": "b"}))
    with pytest.raises(ConfigError, match=r"val_data_path=.*names splits, which is for data_path alone"):
        MegatronDataModule("a", 8, val_data_path=str(tmp_path / "splits.json"))
    with pytest.raises(ConfigError, match="val_data_path='b': data_path names the data of each split already"):
        MegatronDataModule(str(tmp_path / "splits.json"), 8, val_data_path="b")
    with pytest.raises((ConfigError, TypeError), match="data_path, which is for training where"):
        MegatronDataModule(train_data_path="a", seq_length=8)  # type: ignore[call-arg]


def test_a_prefix_may_end_like_a_file(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "corpus.json", np.uint16) as writer:
        writer.add_document(range(50), [50])
    assert parse_data_path(tmp_path / "corpus.json").prefixes == (str(tmp_path / "corpus.json"),)
