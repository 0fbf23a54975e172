"""``lightning-megatron preprocess``: JSON lines to token files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_megatron.data.preprocessing.preprocess import preprocess
from lightning_megatron.data.preprocessing.textfiles import LONGEST_LINE
from lightning_megatron.tools.cli.common import command_parser, ending_by_signal, exit_status, one_line, size_in_bytes
from lightning_megatron.tools.cli.data.tokenizer_options import add_tokenizer_options, tokenizer_of

_DESCRIPTION = """\
Tokenize documents, one JSON object a line, into the .bin/.idx pairs that training reads.

Writes PREFIX_KEY_document.bin and .idx for each key (PREFIX_KEY_sentence with --split-sentences). The files appear when
everything went well; they do not depend on --workers or --partitions. Each can be read by Megatron-LM too.
Broken lines are left out, counted and reported, unless --strict."""

_EXAMPLE = """\
example:
  lightning-megatron preprocess --input 'books/*.jsonl.xz' --output-prefix data/books \\
      --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod --workers 8
It writes data/books_text_document.bin and .idx: train with data path data/books_text_document"""


def preprocess_parser() -> argparse.ArgumentParser:
    """The arguments, with the names of Megatron-LM's ``preprocess_data.py``."""
    parser = command_parser("preprocess", _DESCRIPTION, _EXAMPLE)
    data = parser.add_argument_group("input and output")
    data.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines: files or quoted patterns; .gz, .xz, .bz2 and .zst are read directly",
    )
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the output, without endings")
    data.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the texts to tokenize, each into its own pair; other keys are ignored (default: text)",
    )
    add_tokenizer_options(parser, required=True)
    how = parser.add_argument_group("how")
    how.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    how.add_argument("--split-sentences", action="store_true", help="one sequence a sentence, for masked words")
    how.add_argument(
        "--keep-newlines", action="store_true", help="with --split-sentences: leave line breaks at the sentences' ends"
    )
    how.add_argument(
        "--longest-line",
        type=size_in_bytes,
        default=LONGEST_LINE,
        metavar="SIZE",
        help="bytes of a line at most, decompressed, such as 500MB (default: 64MiB)",
    )
    how.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenize (default: 1)")
    how.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="parts of the input that are written separately and merged at the end (default: 1); a killed run "
        "resumes with the missing ones when it is started again",
    )
    how.add_argument("--strict", action="store_true", help="stop at the first broken line, naming its file and number")
    how.add_argument(
        "--skip-space-check", action="store_true", help="begin even if the output seems not to fit on the disk"
    )
    how.add_argument(
        "--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines (default: 1000)"
    )
    return parser


def preprocess_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron preprocess`` with these arguments; returns the exit code (2: the user's error)."""
    args = preprocess_parser().parse_args(argv)
    return exit_status(lambda: _run(args), ValueError, OSError, ModuleNotFoundError, text=one_line)


def _run(args: argparse.Namespace) -> int:
    with ending_by_signal():
        preprocess(
            args.input,
            args.output_prefix,
            tokenizer_of(args),
            json_keys=args.json_keys,
            append_eod=args.append_eod,
            workers=args.workers,
            partitions=args.partitions,
            split_sentences=args.split_sentences,
            keep_newlines=args.keep_newlines,
            log_interval=args.log_interval,
            longest_line=args.longest_line,
            strict=args.strict,
            check_space=not args.skip_space_check,
        )
    return 0
