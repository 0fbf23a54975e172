"""``lightning-megatron demo-data``: a corpus, a tokenizer and token files for a first try, without a network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.errors import raise_if_any
from lightning_megatron.tools.cli.common import below_one, command_parser, ending_by_signal, exit_status, one_line

_DESCRIPTION = """\
Write a corpus of artificial sentences, a sentencepiece tokenizer trained on it, and token files, to try training with.
One seed always gives the same files. A small model learns the sentences' grammar within a few hundred steps."""

_EXAMPLE = """\
example:
  lightning-megatron demo-data --output data
  writes data/corpus.jsonl, data/tokenizer.model, data/corpus_text_document.bin and .idx"""


def demo_data_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron demo-data`` with these arguments; returns the exit code (2: the user's error)."""
    parser = command_parser("demo-data", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--documents", type=int, default=2000, metavar="N", help="texts of the corpus (default: 2000)")
    parser.add_argument("--vocab-size", type=int, default=1000, metavar="N", help="tokens (default: 1000)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the text (default: 1234)")
    args = parser.parse_args(argv)
    return exit_status(lambda: _run(args), ValueError, OSError, text=one_line)


def _run(args: argparse.Namespace) -> int:
    from lightning_megatron.data.files.demo_text import write_demo_text
    from lightning_megatron.data.preprocessing.preprocess import TokenizerSpec, preprocess
    from lightning_megatron.data.preprocessing.train_tokenizer import train_tokenizer

    raise_if_any(below_one(args, "documents", "vocab_size"))
    corpus, model = args.output / "corpus.jsonl", args.output / "tokenizer.model"
    with ending_by_signal():
        write_demo_text(corpus, args.documents, args.seed)
        train_tokenizer([corpus], model, vocab_size=args.vocab_size)
        kind = "GPTSentencePieceTokenizer"
        (prefix,) = preprocess([corpus], args.output / "corpus", TokenizerSpec(kind, str(model)), append_eod=True)
    print(
        f"Wrote {corpus}, {model} and {prefix}.bin and .idx. To train on them:\n"
        f"  lightning-megatron fit --trainer.strategy megatron --trainer.max_steps 200 --trainer.accelerator cpu \\\n"
        f"      --model LlamaModule --model.config llama-tiny --model.dict_kwargs.vocab_size {args.vocab_size} \\\n"
        f"      --data MegatronDataModule --data.data_path {prefix} --data.seq_length 128 --data.batch_size 8"
    )
    return 0
