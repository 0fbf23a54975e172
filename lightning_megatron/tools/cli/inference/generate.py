"""``lightning-megatron generate``: continue a text with a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_megatron.tools.cli.common import command_parser, print_text
from lightning_megatron.tools.cli.data.tokenizer_options import add_tokenizer_options

_DESCRIPTION = """\
Continue a text with a checkpoint of a decoder, or answer one with that of an encoder and a decoder, saved under any
layout. Runs in one process; a decoder also in --tp processes, each with its part of every layer on its own
device."""

_EXAMPLE = """\
example:
  lightning-megatron generate --checkpoint run/last.ckpt --tokenizer-type GPTSentencePieceTokenizer \\
      --tokenizer-model tokenizer.model --prompt 'def main(' --temperature 0.8 --top-p 0.95 --seed 1"""


def generate_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("generate", _DESCRIPTION, _EXAMPLE)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="checkpoint directory, NAME.ckpt")
    add("--prompt", required=True, metavar="TEXT", help="the text to continue")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to add at most (default: 64)")
    add("--temperature", type=float, default=1.0, metavar="T", help="of sampling; 0 for the likeliest (default: 1)")
    add("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="sample among the likeliest tokens of joint probability P")
    add("--seed", type=int, metavar="N", help="seed of sampling (default: random)")
    add("--device", metavar="TYPE", help="torch device (default: the best there is)")
    add("--tp", type=int, default=1, metavar="N", help="devices to split the model over (default: 1)")
    add_tokenizer_options(parser, required=False, trained=True)
    return parser


def generate_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron generate`` with these arguments; returns the exit code (2: the user's error)."""
    args = generate_parser().parse_args(argv)
    from lightning_megatron.tools.cli.inference.continuation import continuation  # takes seconds: not for --help

    return print_text(lambda: continuation(args))
