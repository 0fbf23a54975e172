"""Token files, samples and tokenizers, independent of models, process groups and Lightning."""

from lightning_megatron.data.blend import BlendedDataset
from lightning_megatron.data.build import build_gpt_datasets
from lightning_megatron.data.fingerprint import data_fingerprint, fingerprint_problems, tokenizer_fingerprint
from lightning_megatron.data.gpt_dataset import GPTDataset
from lightning_megatron.data.indexed import IndexedDataset, optimal_dtype
from lightning_megatron.data.indexed_writer import IndexedDatasetWriter
from lightning_megatron.data.resumable_loader import ResumableDataLoader
from lightning_megatron.data.sampler import MegatronSampler
from lightning_megatron.data.tokenizers import Tokenizer, build_tokenizer
from lightning_megatron.errors import DataError

__all__ = [
    "BlendedDataset",
    "DataError",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MegatronSampler",
    "ResumableDataLoader",
    "Tokenizer",
    "build_gpt_datasets",
    "build_tokenizer",
    "data_fingerprint",
    "fingerprint_problems",
    "optimal_dtype",
    "tokenizer_fingerprint",
]
