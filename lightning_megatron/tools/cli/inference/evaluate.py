"""``lightning-megatron evaluate``: a checkpoint's model measured on texts and tasks, in any layout."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_megatron.data.preprocessing.textfiles import LONGEST_LINE
from lightning_megatron.tools.cli.common import command_parser, print_text, size_in_bytes
from lightning_megatron.tools.cli.data.tokenizer_options import add_tokenizer_options
from lightning_megatron.tools.evaluation.corpora import FORMATS

_DESCRIPTION = """\
Measure perplexity on files, one line each, and tasks of lm-eval, with a decoder's checkpoint that was saved under any
layout, or a Hugging Face directory. Every choice of --tp, --pp, --cp and --ep gives the same numbers; more --devices
than these need are further replicas, which share the texts."""

_EXAMPLES = """\
examples:
  lightning-megatron evaluate --checkpoint run/last.ckpt --input held-out.jsonl --tp 2 --pp 2 \\
      --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model
  lightning-megatron evaluate --checkpoint gpt345m.ckpt --input wiki.test.tokens --format wikitext \\
      --seq-length 1024 --overlapping-eval 32 --tokenizer-type GPT2BPETokenizer --tokenizer-model gpt2
  lightning-megatron evaluate --checkpoint Llama-3.1-8B --lm-eval hellaswag,arc_easy --tp 4 \\
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model Llama-3.1-8B"""


def evaluate_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("evaluate", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="checkpoint directory, NAME.ckpt, or Hugging Face directory")
    add("--json", action="store_true", help="print everything as JSON")
    add_tokenizer_options(parser, required=False, trained=True)
    _add_files(parser)
    _add_tasks(parser)
    _add_spread(parser)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files").add_argument
    add("--input", nargs="+", action="extend", metavar="FILE", help="files or patterns; may be given several times")
    add(
        "--format",
        choices=FORMATS,
        default="documents",
        help="documents: JSON lines; text: a file as it is; wikitext: without the spacing of its words; lambada: JSON"
        " lines whose last word is asked for (default: documents)",
    )
    add("--json-keys", default="text", metavar="KEY", help="key of the text in JSON lines (default: text)")
    add("--longest-line", type=size_in_bytes, default=LONGEST_LINE, metavar="SIZE", help="bytes of a line at most")
    add("--seq-length", type=int, metavar="N", help="tokens of a window (default: the model's positions, at most 2048)")
    add(
        "--overlapping-eval",
        "--stride",
        type=int,
        metavar="N",
        help="tokens by which windows are shifted (default: as many as a window has)",
    )
    add("--begin", action="store_true", help="a begin token before each text, so that its first token is predicted too")
    add("--strict-lambada", action="store_true", help="all tokens of the last word, not only the last one")


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tasks of lm-eval (in a clone: pip install '.[eval]')").add_argument
    add("--lm-eval", metavar="TASK,...", help="names of tasks")
    add("--lm-eval-path", metavar="DIR", help="directory with tasks of your own")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (default: the task's)")
    add("--limit", type=int, metavar="N", help="questions of each task at most")


def _add_spread(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("devices").add_argument
    add("--device", metavar="TYPE", help="torch device (default: the best there is)")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    add("--pp", type=int, default=1, metavar="N", help="pipeline stages (default: 1)")
    add("--cp", type=int, default=1, metavar="N", help="context-parallel ranks (default: 1)")
    add("--ep", type=int, default=1, metavar="N", help="expert-parallel ranks (default: 1)")
    add("--etp", type=int, metavar="N", help="ranks that share an expert (default: --tp)")
    add("--devices", type=int, metavar="N", help="devices of a machine (default: those of one replica)")
    add("--num-nodes", type=int, default=1, metavar="N", help="machines (default: 1)")
    add("--precision", default="32-true", metavar="NAME", help="Lightning's name (default: 32-true)")
    add("--batch-size", type=int, default=8, metavar="N", help="windows of one forward (default: 8)")


def evaluate_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron evaluate`` with these arguments; returns the exit code (2: the user's error)."""
    args = evaluate_parser().parse_args(argv)
    from lightning_megatron.tools.cli.inference.report import evaluated  # takes seconds: not for --help

    return print_text(lambda: evaluated(args))
