"""``lightning-megatron merge``: several pairs of token files as one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_megatron.tools.cli.common import command_parser, ending_by_signal, exit_status, one_line

_DESCRIPTION = """\
Write the documents of several .bin/.idx pairs, in the order given, as one pair: the same bytes as from preprocessing
the texts together. All must have been made with one tokenizer. The output appears when it is complete."""

_EXAMPLE = """\
example:
  lightning-megatron merge --input data/books_text_document data/web --output-prefix data/all
  a folder (data/web) stands for all pairs in it, in alphabetical order"""


def merge_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron merge`` with these arguments; returns the exit code (2: the user's error)."""
    parser = command_parser("merge", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help="prefixes, or folders of pairs")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the output, without endings")
    parser.add_argument("--skip-space-check", action="store_true", help="begin even if the disk seems too full")
    args = parser.parse_args(argv)
    return exit_status(lambda: _run(args), ValueError, OSError, text=one_line)


def _run(args: argparse.Namespace) -> int:
    from lightning_megatron.data.files.merge import merge

    with ending_by_signal():
        made = merge(args.input, args.output_prefix, check_space=not args.skip_space_check)
    documents, tokens = len(made.document_indices) - 1, len(made.tokens)
    print(f"Wrote {args.output_prefix}.bin and .idx: {documents:,} documents, {tokens:,} tokens ({made.dtype.name})")
    return 0
