"""Makes `masked.npz` and `sentences.*` with NVIDIA's megatron-core 0.16.1, as `make.py` does for GPT."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from masked_cases import BERT, FIRST, PIECES, SAMPLES, SENTINELS, SPECIAL, T5
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.datasets.utils import Split

HERE = Path(__file__).parent
TOKENIZER = SimpleNamespace(
    **SPECIAL,
    inv_vocab=dict(enumerate(PIECES)),
    vocab_size=len(PIECES),
    additional_special_tokens_ids=SENTINELS,
    unique_identifiers={"name": "none"},
)


def write() -> None:
    rng = np.random.RandomState(5)
    builder = IndexedDatasetBuilder(str(HERE / "sentences.bin"), np.uint16)
    for number in range(60):
        lengths = [int(n) for n in rng.randint(1, 14, rng.randint(0, 9))]
        if number % 20 == 7:
            lengths.append(600)
        builder.add_document(torch.from_numpy(rng.randint(FIRST, len(PIECES), sum(lengths))), lengths)
    builder.finalize(str(HERE / "sentences.idx"))


def main() -> None:
    write()
    arrays: dict[str, np.ndarray] = {}
    kinds = (
        ("bert", BERT, BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig),
        ("t5", T5, T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig),
    )
    with tempfile.TemporaryDirectory() as cache:
        for kind, cases, dataset, config in kinds:
            for name, (length, documents, seed, options) in cases.items():
                fixed = {"masking_do_permutation": False, "masking_use_longer_ngrams": False}
                fixed |= {"masking_use_geometric_distribution": kind == "t5", "masking_max_ngram": 3}
                fixed |= {"masking_probability": 0.15, "short_sequence_probability": 0.1, "masking_do_full_word": True}
                made = config(
                    random_seed=seed,
                    sequence_length=length,
                    split="1",
                    path_to_cache=f"{cache}/{kind}-{name}",
                    tokenizer=TOKENIZER,
                    blend=(["none"], None),
                    **fixed | options,
                )
                low = IndexedDataset(str(HERE / "sentences"))
                data = dataset(low, "none", np.arange(*documents), SAMPLES, Split.train, made)
                arrays[f"{kind}/{name}/index"] = np.array(data.sample_index)
                items = [data[number] for number in range(SAMPLES)]
                for key in items[0]:
                    arrays[f"{kind}/{name}/{key}"] = np.array([item[key] for item in items])
    np.savez_compressed(HERE / "masked.npz", **arrays)


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", f"file://{store.name}", rank=0, world_size=1)
        main()
        dist.destroy_process_group()
