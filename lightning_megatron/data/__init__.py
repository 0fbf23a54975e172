"""Token files, samples and tokenizers, independent of models, process groups and Lightning.

The names below are imported at their first use, so that programs that only read or write token files need no torch.
"""

from typing import TYPE_CHECKING

from lightning_megatron.errors import DataError
from lightning_megatron.lazy_exports import exports_of

if TYPE_CHECKING:
    from lightning_megatron.data.blend import BlendedDataset
    from lightning_megatron.data.build import build_gpt_datasets
    from lightning_megatron.data.chat.packed import PackedChats
    from lightning_megatron.data.fingerprint import data_fingerprint, fingerprint_problems, tokenizer_fingerprint
    from lightning_megatron.data.gpt_dataset import GPTDataset
    from lightning_megatron.data.indexed import IndexedDataset, optimal_dtype
    from lightning_megatron.data.indexed_writer import IndexedDatasetWriter
    from lightning_megatron.data.loading.resumable_loader import ResumableDataLoader
    from lightning_megatron.data.sampler import MegatronSampler
    from lightning_megatron.data.tokenizers import Tokenizer, build_tokenizer
    from lightning_megatron.encoders.bert.dataset import BertDataset
    from lightning_megatron.encoders.t5.dataset import T5Dataset

__all__ = [
    "BertDataset",
    "BlendedDataset",
    "DataError",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MegatronSampler",
    "PackedChats",
    "ResumableDataLoader",
    "T5Dataset",
    "Tokenizer",
    "build_gpt_datasets",
    "build_tokenizer",
    "data_fingerprint",
    "fingerprint_problems",
    "optimal_dtype",
    "tokenizer_fingerprint",
]

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    __getattr__, __dir__ = exports_of(__name__)
