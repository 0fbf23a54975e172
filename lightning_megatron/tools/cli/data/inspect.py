"""``lightning-megatron inspect``: the statistics of token files, and one document or sample of them as text."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_megatron.errors import ConfigError, DataError, Problem, raise_if_any
from lightning_megatron.tools.cli.common import below_one, command_parser, exit_status, one_line
from lightning_megatron.tools.cli.data.inspect_chats import add_chat_options, inspect_chats, is_chats
from lightning_megatron.tools.cli.data.tokenizer_options import add_tokenizer_options, tokenizer_of

if TYPE_CHECKING:
    from lightning_megatron.data.files.statistics import Statistics
    from lightning_megatron.data.indexed import IndexedDataset
    from lightning_megatron.data.tokenizers import Tokenizer

_DESCRIPTION = """\
Show what is in a .bin/.idx pair: documents, tokens, lengths, the largest id. With a tokenizer, ids beyond its
vocabulary are an error, and --document or --sample is printed as text, too. For a file of chats (JSON lines), --sample
shows a row as ChatDataModule packs it, with the learnt tokens in colour. Nothing is written."""

_EXAMPLE = """\
examples:
  lightning-megatron inspect data/books_text_document --document 3 \\
      --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model
  lightning-megatron inspect data/books_text_document --sample 0 --seq-length 4096 --split 969,30,1
  lightning-megatron inspect chats.jsonl --sample 0 --seq-length 4096 --tokenizer-model Llama-3.1-8B-Instruct \\
      --chat-template llama3"""


def inspect_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron inspect`` with these arguments; returns the exit code (2: the user's error)."""
    parser = command_parser("inspect", _DESCRIPTION, _EXAMPLE)
    parser.add_argument("prefix", metavar="PREFIX", help="path of the pair, without .bin and .idx; or a file of chats")
    parser.add_argument("--json", action="store_true", help="statistics as one JSON object")
    which = parser.add_argument_group("one of them")
    which.add_argument("--document", type=int, metavar="K", help="document K of the file, from 0")
    which.add_argument("--sample", type=int, metavar="K", help="sample K of training, in the order of its seed")
    which.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sample")
    which.add_argument("--samples", type=int, metavar="N", help="samples that training draws (default: one epoch)")
    which.add_argument("--split", default="969,30,1", help="shares of the documents (default: 969,30,1)")
    which.add_argument("--seed", type=int, default=1234, help="seed of the order (default: 1234)")
    add_tokenizer_options(parser, required=False)
    add_chat_options(parser)
    args = parser.parse_args(argv)
    run = inspect_chats if is_chats(args.prefix) else _run
    return exit_status(lambda: run(args), ValueError, OSError, IndexError, ModuleNotFoundError, text=one_line)


def _run(args: argparse.Namespace) -> int:
    raise_if_any(_problems(args))
    from lightning_megatron.data.files.statistics import statistics
    from lightning_megatron.data.indexed import IndexedDataset

    dataset = IndexedDataset(args.prefix)
    tokenizer = tokenizer_of(args).build() if args.tokenizer_type else None
    found = statistics(dataset, tokenizer.eod if tokenizer else None)
    print(json.dumps(asdict(found)) if args.json else "\n".join(_lines(found)))
    if tokenizer is not None and found.largest is not None and found.largest >= tokenizer.vocab_size:
        fault = f"holds the id {found.largest}, and the tokenizer has {tokenizer.vocab_size} tokens"
        raise DataError.at(args.prefix, fault, do="name the tokenizer that the files were made with")
    if args.document is not None:
        _show(f"document {args.document}", _document(dataset, args.document), tokenizer)
    if args.sample is not None:
        _show(f"sample {args.sample}", _sample(dataset, args), tokenizer)
    return 0


def _problems(args: argparse.Namespace) -> list[Problem]:
    found = []
    if args.sample is not None and args.seq_length is None:
        found.append(Problem("--seq-length", None, "is needed for --sample: give the tokens of a sample in training"))
    return found + below_one(args, "seq_length", "samples")


def _lines(found: Statistics) -> Iterable[str]:
    yield f"documents   {found.documents:,}" + (f", {found.empty:,} of them empty" if found.empty else "")
    if found.sequences != found.documents:
        yield f"sequences   {found.sequences:,}"
    yield f"tokens      {found.tokens:,} ({found.dtype}, {found.size / 2**20:,.2f} MB)"
    if found.largest is not None:
        yield f"ids         {found.least} to {found.largest}"
    if found.ends is not None:
        yield f"ends        {found.ends:,} end-of-document tokens"
    middle = ", ".join(f"{percent} % up to {length:,}" for percent, length in found.percentiles.items())
    yield f"a document  {found.shortest:,} to {found.longest:,} tokens, mean {found.mean:,.1f}; {middle}"


def _document(dataset: IndexedDataset, number: int) -> list[int]:
    bounds = dataset.document_indices
    if not 0 <= number < len(bounds) - 1:
        raise ConfigError([Problem("--document", number, f"{dataset.prefix} has {len(bounds) - 1}, from 0")])
    return [int(token) for part in dataset[int(bounds[number]) : int(bounds[number + 1])] for token in part]


def _sample(dataset: IndexedDataset, args: argparse.Namespace) -> list[int]:
    import numpy as np

    from lightning_megatron.data.build import build_gpt_datasets

    with tempfile.TemporaryDirectory(prefix="inspect-") as folder:  # beside the data nothing is written
        wanted = (args.samples, 0, 0)
        options = {"seq_length": args.seq_length, "split": args.split, "seed": args.seed, "cache_dir": folder}
        train = build_gpt_datasets(dataset.prefix, num_samples=wanted, **options)[0]
        count = 0 if train is None else len(train)
        if train is None or not 0 <= args.sample < count:
            raise ConfigError([Problem("--sample", args.sample, f"there are {count}, from 0")])
        sample = train[args.sample]
        # The label of the last token is the further one that a sample reads.
        return np.append(sample["tokens"].numpy(), sample["labels"].numpy()[-1:]).tolist()


def _show(name: str, tokens: Sequence[int], tokenizer: Tokenizer | None) -> None:
    print(f"\n{name}: {len(tokens):,} tokens\n{' '.join(map(str, tokens))}")
    if tokenizer is not None:
        print(f"\n{tokenizer.decode(tokens)}")
