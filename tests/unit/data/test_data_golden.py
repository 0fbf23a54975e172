"""Our arrays, items and bytes against those that NVIDIA's megatron-core 0.16.1 made (see golden/README.md)."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megatron.data import BlendedDataset, GPTDataset, IndexedDataset, IndexedDatasetWriter, build_gpt_datasets

GOLDEN = Path(__file__).parent / "golden"
DESCRIPTION = json.loads((GOLDEN / "cases.json").read_text())
CASES, BLENDS = DESCRIPTION["cases"], DESCRIPTION["blends"]
SPLITS = ("train", "valid", "test")
RENAMED = {"random_seed": "seed", "add_extra_token_to_sequence": "add_extra_token"}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "golden.npz") as file:
        return dict(file)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for path in [*GOLDEN.glob("*.bin"), *GOLDEN.glob("*.idx")]:
        shutil.copy(path, tmp_path)
    return tmp_path


def masked(item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An item with its segments as the mask that they stand for: True where a token must not see another."""
    if "segment_ids" not in item:
        return item
    segments, places = item["segment_ids"], torch.arange(len(item["tokens"]))
    mask = (segments[:, None] != segments[None, :]) | (places[None, :] > places[:, None])
    return {key: value for key, value in item.items() if key != "segment_ids"} | {"attention_mask": mask[None]}


@pytest.mark.parametrize("case", CASES)
def test_arrays_and_items_equal_megatron_core(case: str, golden: dict[str, np.ndarray], corpus: Path) -> None:
    seq_length, sizes, split, options = CASES[case]
    options = {RENAMED.get(name, name): value for name, value in options.items()}
    built = build_gpt_datasets(
        corpus / "a", seq_length=seq_length, num_samples=sizes, split=split, pad_id=3, eod_id=7, **options
    )
    for which, data in zip(SPLITS, built, strict=True):
        assert isinstance(data, GPTDataset)
        for name in ("documents", "samples", "shuffle"):
            expected, array = golden[f"{case}/{which}/{name}"], getattr(data.index, name)
            assert array.dtype == expected.dtype
            assert np.array_equal(array, expected), f"{which} {name}"
        fields = {key.rsplit("/", 1)[1] for key in golden if key.startswith(f"{case}/{which}/")}
        fields -= {"documents", "samples", "shuffle"}
        items_of = [masked(data[i]) for i in range(len(golden[f"{case}/{which}/tokens"]))]
        assert set(items_of[0]) == fields
        for field in fields:
            expected = torch.from_numpy(golden[f"{case}/{which}/{field}"])
            items = torch.stack([item[field] for item in items_of])
            assert items.dtype == expected.dtype
            assert torch.equal(items, expected), f"{which} {field}"


@pytest.mark.parametrize("case", BLENDS)
def test_blends_equal_megatron_core(case: str, golden: dict[str, np.ndarray], corpus: Path) -> None:
    (pairs, weights), sizes = BLENDS[case]
    prefixes = [str(corpus / p) for p in pairs]
    path = prefixes if weights is None else [x for pair in zip(weights, prefixes, strict=True) for x in pair]
    built = build_gpt_datasets(path, seq_length=8, num_samples=sizes, split="6,3,1", pad_id=3, eod_id=7)
    for which, data in zip(SPLITS, built, strict=True):
        assert isinstance(data, BlendedDataset)
        order = np.array([data.locate(i) for i in range(len(data))])
        assert np.array_equal(order[:, 0], golden[f"{case}/{which}/dataset"])
        assert np.array_equal(order[:, 1], golden[f"{case}/{which}/sample"])
        tokens = torch.stack([data[i]["tokens"] for i in range(len(data))])
        assert torch.equal(tokens, torch.from_numpy(golden[f"{case}/{which}/tokens"]))


@pytest.mark.parametrize("name", ["a", "b", "wide"])
def test_writer_gives_the_bytes_of_megatron_core(name: str, corpus: Path, tmp_path: Path) -> None:
    source = IndexedDataset(corpus / name)
    bounds = source.document_indices
    with IndexedDatasetWriter(tmp_path / "copy", source.dtype) as writer:
        for begin, end in pairwise(bounds):
            parts = source[int(begin) : int(end)]
            writer.add_document(np.concatenate([*parts, np.empty(0, source.dtype)]), [len(p) for p in parts])
    for ending in ("bin", "idx"):
        assert (tmp_path / f"copy.{ending}").read_bytes() == (corpus / f"{name}.{ending}").read_bytes()
