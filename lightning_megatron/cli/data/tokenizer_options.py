"""Options that name a tokenizer and its files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lightning_megatron.data.tokenizers import TOKENIZER_TYPES

if TYPE_CHECKING:
    from lightning_megatron.data.preprocessing.encode import TokenizerSpec


def add_tokenizer_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add them to a parser.

    Args:
        parser: the parser.
        required: True if a tokenizer must be named.
    """
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=required, metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="sentencepiece model file, or directory of a Hugging Face tokenizer"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPE or vocab.txt of BertWordPiece")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPE")
    group.add_argument("--vocab-size", type=int, metavar="N", help="number of tokens, for NullTokenizer")


def tokenizer_of(args: argparse.Namespace) -> TokenizerSpec:
    """The tokenizer that arguments name."""
    from lightning_megatron.data.preprocessing.encode import TokenizerSpec

    return TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.vocab_size)
