"""Makes the files of this folder with NVIDIA's megatron-core 0.16.1; run only if the format itself changes."""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

HERE = Path(__file__).parent
EOD, PAD = 7, 3
CASES = {  # name: (seq_length, num_samples, split, options)
    "one_epoch": (8, (None, None, None), "8,1,1", {}),
    "epochs": (8, (200, 40, 7), "969,300,100", {"random_seed": 7}),
    "separate": (5, (150, 61, 20), "1,1,1", {}),
    "no_extra": (8, (100, 10, 10), "6,3,1", {"add_extra_token_to_sequence": False}),
    "partial": (16, (30, None, 3), "4,4,2", {"drop_last_partial_validation_sequence": False}),
    "masks": (
        32,
        (20, 5, 5),
        "5,3,2",
        {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
    ),
}
BLENDS = {  # name: (blend, num_samples)
    "weighted": ((["a", "b", "a"], [0.3, 0.5, 0.2]), (100, 20, 10)),
    "one_weight": ((["b"], [2.0]), (50, 10, 5)),
    "exhaustive": ((["a", "b"], None), (None, None, None)),
    "by_length": ((["b", "a"], None), (30, 6, 1000)),
}


class Tokenizer:
    eod = EOD
    pad = PAD
    vocab_size = 64
    unique_identifiers = {"name": "none"}  # noqa: RUF012


def write(prefix: Path, seed: int, documents: int, dtype: type) -> None:
    rng = np.random.RandomState(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for _ in range(documents):
        lengths = [int(n) for n in rng.choice([0, 1, 2, 5, 9, 20], rng.randint(0, 4))]
        builder.add_document(torch.from_numpy(rng.randint(0, 64, sum(lengths))), lengths)
    builder.finalize(f"{prefix}.idx")


def config(directory: Path, seq_length: int, split: str, **options: object) -> GPTDatasetConfig:
    settings = {
        "random_seed": 1234,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": bool(options.get("reset_attention_mask")),
        **options,
    }
    return GPTDatasetConfig(
        sequence_length=seq_length, split=split, path_to_cache=None, tokenizer=Tokenizer(), **settings
    )


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    write(HERE / "a", 1, 40, np.uint16)
    write(HERE / "b", 2, 25, np.uint16)
    write(HERE / "wide", 3, 6, np.int32)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for pair in "ab":
            for ending in ("bin", "idx"):
                (directory / f"{pair}.{ending}").write_bytes((HERE / f"{pair}.{ending}").read_bytes())
        for case, (seq_length, sizes, split, options) in CASES.items():
            made = config(directory, seq_length, split, blend=([str(directory / "a")], None), **options)
            for which, data in zip(("train", "valid", "test"), build(sizes, made), strict=True):
                key = f"{case}/{which}"
                arrays[f"{key}/documents"] = data.document_index
                arrays[f"{key}/samples"] = data.sample_index
                arrays[f"{key}/shuffle"] = data.shuffle_index
                for field in data[0]:
                    arrays[f"{key}/{field}"] = torch.stack([item(data, i)[field] for i in range(min(8, len(data)))])
        for case, ((pairs, weights), sizes) in BLENDS.items():
            made = config(directory, 8, "6,3,1", blend=([str(directory / p) for p in pairs], weights))
            for which, data in zip(("train", "valid", "test"), build(sizes, made), strict=True):
                arrays[f"{case}/{which}/dataset"] = data.dataset_index
                arrays[f"{case}/{which}/sample"] = data.dataset_sample_index
                arrays[f"{case}/{which}/tokens"] = torch.stack([data[i]["tokens"] for i in range(len(data))]).numpy()
    np.savez_compressed(HERE / "golden.npz", **arrays)
    (HERE / "cases.json").write_text(json.dumps({"cases": CASES, "blends": BLENDS}, indent=1) + "\n")


def item(data: GPTDataset, index: int) -> dict:
    # It reuses the loss mask of the first item, in which that item's padding is already zero: a fault not to copy.
    data.masks_and_position_ids_are_cached = False
    return data[index]


def build(sizes: tuple, made: GPTDatasetConfig) -> list:
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, made).build()


if __name__ == "__main__":
    main()
