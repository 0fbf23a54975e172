"""``lightning-megatron inspect FILE.jsonl``: rows of chats with their documents and their learnt tokens."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_megatron.errors import ConfigError, Problem, raise_if_any

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_megatron.data.chat.packed import PackedChats
    from lightning_megatron.data.tokenizers import HuggingFaceTokenizer

_BEGIN, _END = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"


def is_chats(path: str) -> bool:
    """True for a file of conversations, False for the prefix of a pair of token files."""
    return Path(path).is_file() and Path(path).suffix not in (".bin", ".idx")


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of files of conversations to a parser."""
    group = parser.add_argument_group("chats")
    group.add_argument(
        "--chat-template", metavar="TEMPLATE", help="name, .jinja file or text (default: the tokenizer's)"
    )
    group.add_argument(
        "--too-long", choices=("error", "cut", "drop"), default="drop", help="of long conversations (default: drop)"
    )


def inspect_chats(args: argparse.Namespace) -> int:
    """Print the counts of a file of conversations, and one row with its documents."""
    raise_if_any(_problems(args))
    from rich.console import Console

    from lightning_megatron.lightning.datamodules.chat_data import ChatDataModule

    with tempfile.TemporaryDirectory(prefix="inspect-") as folder:  # beside the data nothing is written
        data = ChatDataModule(
            args.prefix,
            args.tokenizer_model,
            args.seq_length,
            chat_template=args.chat_template,
            too_long=args.too_long,
            seed=args.seed,
            cache_dir=folder,
        )
        rows = data.rows()
        assert rows is not None
        counts = {**asdict(rows.report), "efficiency": rows.report.efficiency}
        print(json.dumps(counts) if args.json else rows.report)
        if args.sample is not None:
            if not 0 <= args.sample < len(rows):
                raise ConfigError([Problem("--sample", args.sample, f"there are {len(rows)} rows, from 0")])
            _show(rows, args.sample, data.encoder.tokenizer, Console(soft_wrap=True, markup=False, highlight=False))
    return 0


def _problems(args: argparse.Namespace) -> list[Problem]:
    found = []
    if args.seq_length is None:
        found.append(Problem("--seq-length", None, "is needed: give the tokens of a row in training"))
    if args.tokenizer_model is None:
        found.append(Problem("--tokenizer-model", None, "chats need a tokenizer: a directory with tokenizer.json"))
    if args.document is not None:
        found.append(Problem("--document", args.document, "files of chats have --sample K, a row with its documents"))
    return found


def _show(rows: PackedChats, number: int, tokenizer: HuggingFaceTokenizer, console: Console) -> None:
    """Print a row; learnt tokens are green on a terminal with colours, and in white brackets elsewhere."""
    from rich.text import Text

    documents, places = rows.documents(number), rows.place(number)
    filled = sum(len(ids) for ids, _ in documents)
    longest = rows.report.seq_length
    console.print(f"\nrow {number}: {len(documents)} documents, {filled} tokens and {longest - filled} of padding")
    begin, end = ("", "") if console.color_system and console.is_terminal else (_BEGIN, _END)
    for segment, ((ids, is_answer), (path, line)) in enumerate(zip(documents, places, strict=True), 1):
        # The first token of a document is not learnt, since nothing predicts it.
        learnt = [bool(mark) and place > 0 for place, mark in enumerate(is_answer.tolist())]
        console.print(
            f"\ndocument {segment}: {len(ids)} tokens, {sum(learnt)} learnt ({path}, line {line})", style="bold"
        )
        text = Text()
        for is_learnt, group in groupby(zip(learnt, ids.tolist(), strict=True), key=lambda pair: pair[0]):
            piece = tokenizer.decode_whole([token for _, token in group])
            text.append(f"{begin}{piece}{end}" if is_learnt else piece, style="green" if is_learnt else "dim")
        console.print(text)
