"""Options that name a tokenizer and its files."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_megatron.data.tokenizers import TOKENIZER_TYPES

if TYPE_CHECKING:
    from lightning_megatron.data.preprocessing.encode import TokenizerSpec
    from lightning_megatron.data.tokenizers import Tokenizer


def add_tokenizer_options(parser: argparse.ArgumentParser, *, required: bool, trained: bool = False) -> None:
    """Add the options of a tokenizer to a parser.

    Args:
        parser: the parser.
        required: True if a tokenizer must be named.
        trained: True for a command with ``--checkpoint``, whose own tokenizer is the default.
    """
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=required, metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="sentencepiece model file, or directory of a Hugging Face tokenizer"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPE or vocab.txt of BertWordPiece")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPE")
    group.add_argument("--vocab-size", type=int, metavar="N", help="number of tokens, for NullTokenizer")
    if trained:
        text = "use a tokenizer even if it seems to differ from the checkpoint's (default: the checkpoint's own)"
        group.add_argument("--allow-other-tokenizer", action="store_true", help=text)


def tokenizer_for(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that arguments name, which must match the checkpoint's; by default the checkpoint's own."""
    from lightning_megatron.errors import ConfigError, Problem, raise_if_any
    from lightning_megatron.lightning.pretrained.trained_tokenizer import TrainedTokenizer

    trained, given = TrainedTokenizer.of_weights(args.checkpoint), tokenizer_of(args)
    if args.tokenizer_type is None and (trained.spec is None or any(asdict(given).values())):
        reason = "name the type, since the checkpoint does not, or its tokenizer is not here"
        raise ConfigError([Problem("--tokenizer-type", None, reason, TOKENIZER_TYPES)])
    spec = given if trained.spec is None or args.tokenizer_type is not None else trained.spec
    if not args.allow_other_tokenizer:
        raise_if_any(trained.problems("--tokenizer-model", spec, "or add --allow-other-tokenizer"))
    return spec.build()


def tokenizer_of(args: argparse.Namespace) -> TokenizerSpec:
    """The tokenizer that arguments name."""
    from lightning_megatron.data.preprocessing.encode import TokenizerSpec

    return TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.vocab_size)
