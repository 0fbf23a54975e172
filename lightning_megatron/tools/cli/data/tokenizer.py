"""``lightning-megatron train-tokenizer``: a sentencepiece model trained on your own text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_megatron.data.preprocessing.textfiles import LONGEST_LINE
from lightning_megatron.data.preprocessing.train_tokenizer import train_tokenizer
from lightning_megatron.tools.cli.common import command_parser, exit_status, one_line, size_in_bytes

_DESCRIPTION = """\
Train a sentencepiece tokenizer on text or JSON lines. The same input gives the same file."""

_EXAMPLE = """\
example:
  lightning-megatron train-tokenizer --input corpus.jsonl --output tokenizer.model --vocab-size 32000
  then give it to lightning-megatron preprocess and to training:
  --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model"""


def train_tokenizer_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("train-tokenizer", _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files or quoted patterns; names with .json or .jsonl are JSON lines, others plain text; "
        ".gz, .xz, .bz2 and .zst are read directly",
    )
    add("--output", required=True, metavar="FILE", help="the .model file to write")
    add("--vocab-size", type=int, required=True, metavar="N", help="number of tokens")
    add("--model-type", default="bpe", metavar="TYPE", help="bpe (default) or unigram")
    add(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the texts in JSON lines (default: text)",
    )
    add(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="256 tokens for single bytes, so that no character is unknown",
    )
    add("--unk-id", type=int, default=0, metavar="ID", help="id of the unknown token (default: 0)")
    add("--bos-id", type=int, default=1, metavar="ID", help="id of the begin token, -1 for none (default: 1)")
    add("--eos-id", type=int, default=2, metavar="ID", help="id of the end token, -1 for none (default: 2)")
    add("--pad-id", type=int, default=-1, metavar="ID", help="id of the padding token, -1 for none (default: -1)")
    add(
        "--max-sentences",
        type=int,
        default=1_000_000,
        metavar="N",
        help="lines to train on, drawn at random where there are more (default: 1000000)",
    )
    add(
        "--longest-line",
        type=size_in_bytes,
        default=LONGEST_LINE,
        metavar="SIZE",
        help="bytes of a line at most, decompressed, such as 500MB (default: 64MiB)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the draw of lines (default: 0)")
    add("--threads", type=int, default=1, metavar="N", help="threads of the trainer (default: 1)")
    return parser


def train_tokenizer_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron train-tokenizer`` with these arguments; returns the exit code (2: the user's error)."""
    args = train_tokenizer_parser().parse_args(argv)
    return exit_status(lambda: _run(args), ValueError, OSError, ModuleNotFoundError, text=one_line)


def _run(args: argparse.Namespace) -> int:
    path = train_tokenizer(
        args.input,
        args.output,
        vocab_size=args.vocab_size,
        model_type=args.model_type,
        json_keys=args.json_keys,
        byte_fallback=args.byte_fallback,
        unk_id=args.unk_id,
        bos_id=args.bos_id,
        eos_id=args.eos_id,
        pad_id=args.pad_id,
        max_sentences=args.max_sentences,
        seed=args.seed,
        num_threads=args.threads,
        longest_line=args.longest_line,
    )
    print(f"{path}: {args.vocab_size} tokens", file=sys.stderr)
    return 0
