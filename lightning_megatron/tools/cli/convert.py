"""``lightning-megatron convert``: models and adapters of other programs to checkpoints, and back."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megatron.tools.cli.common import command_parser, ending_by_signal, exit_status, size_in_bytes

if TYPE_CHECKING:
    import torch

    from lightning_megatron.config.transformer import TransformerConfig

_DESCRIPTION = """\
Convert Hugging Face models of known families, tensor by tensor, in one process: it needs memory for the largest
tensors of the model only. Checkpoints may come from any layout, and load into any; those of Megatron can be read, not
written."""

_EXAMPLE = """\
examples:
  lightning-megatron convert hf-to-ckpt Llama-3.1-8B llama.ckpt
  lightning-megatron convert ckpt-to-hf run/last.ckpt exported --dtype bf16 --tokenizer Llama-3.1-8B
  lightning-megatron convert megatron-to-ckpt megatron/checkpoints llama.ckpt --config llama3.1-8b
  lightning-megatron convert ckpt-to-peft run/last.ckpt adapter
  lightning-megatron convert merge run/last.ckpt merged.ckpt"""

_OF_ADAPTERS = ("ckpt-to-peft", "peft-to-ckpt", "merge")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def convert_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = command_parser("convert", _DESCRIPTION, _EXAMPLE)
    ways = parser.add_subparsers(dest="way", required=True, metavar="WAY")
    there = ways.add_parser("hf-to-ckpt", help="a Hugging Face directory to a checkpoint that begins a run")
    there.add_argument("source", metavar="HF_DIR", help="directory with config.json and weights")
    there.add_argument("target", metavar="OUT.ckpt", help="checkpoint directory to make")
    back = ways.add_parser("ckpt-to-hf", help="a checkpoint to a directory that transformers loads")
    back.add_argument("source", metavar="CKPT", help="checkpoint directory of a module of a known family")
    back.add_argument("target", metavar="OUT_DIR", help="directory to make")
    back.add_argument(
        "--tokenizer", metavar="HF_DIR", help="directory whose tokenizer and chat template are copied (default: none)"
    )
    other = "copy a tokenizer even if it seems to differ from the checkpoint's"
    back.add_argument("--allow-other-tokenizer", action="store_true", help=other)
    back.add_argument(
        "--max-shard-size",
        type=size_in_bytes,
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file, such as 500MB or 5GB (default: 5GB)",
    )
    megatron = ways.add_parser("megatron-to-ckpt", help="a checkpoint of Megatron-LM to one that begins a run")
    megatron.add_argument(
        "source", metavar="MEGATRON_DIR", help="folder that Megatron saved to, or that of an iteration"
    )
    megatron.add_argument("target", metavar="OUT.ckpt", help="checkpoint directory to make")
    megatron.add_argument(
        "--config",
        type=transformer_config,
        metavar="NAME|FILE",
        help="preset, or JSON file with fields of TransformerConfig (default: Megatron's own command line)",
    )
    megatron.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read pickled objects, which files with Megatron's command line have; no code that they name is run",
    )
    adapters = _adapter_parsers(ways)
    for way in (there, back, megatron, *adapters):
        way.add_argument("--dtype", choices=_DTYPES, help="dtype of the tensors written (default: unchanged)")
    return parser


def _adapter_parsers(ways: Any) -> tuple[argparse.ArgumentParser, ...]:
    """Parsers of the conversions of adapters."""
    out = ways.add_parser("ckpt-to-peft", help="an adapter of a checkpoint to a directory that PEFT loads")
    out.add_argument("source", metavar="CKPT", help="checkpoint directory of a module with lora=")
    out.add_argument("target", metavar="OUT_DIR", help="directory to make")
    into = ways.add_parser("peft-to-ckpt", help="an adapter of PEFT to a checkpoint that begins a run")
    into.add_argument("source", metavar="PEFT_DIR", help="directory with adapter_config.json")
    into.add_argument("target", metavar="OUT.ckpt", help="checkpoint directory to make")
    into.add_argument("--base", required=True, metavar="HF_DIR", help="directory of the base model's weights")
    merge = ways.add_parser("merge", help="an adapter and its base model's weights to a checkpoint of a whole model")
    merge.add_argument("source", metavar="CKPT", help="checkpoint directory of a module with lora=")
    merge.add_argument("target", metavar="OUT.ckpt", help="checkpoint directory to make")
    merge.add_argument("--base", metavar="DIR", help="the base model's weights (default: where they were in training)")
    for way in (out, merge):
        way.add_argument("--adapter", metavar="NAME", help="name of the adapter (default: the only one)")
    return out, into, merge


def convert_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron convert`` with these arguments; returns the exit status."""
    args = convert_parser().parse_args(list(argv))
    from lightning_megatron.checkpoint import CheckpointError  # takes seconds with torch; --help must not wait for it

    return exit_status(lambda: _run(args), ValueError, OSError, CheckpointError)


def _run(args: argparse.Namespace) -> int:
    import torch

    dtype = None if args.dtype is None else getattr(torch, _DTYPES[args.dtype])
    with ending_by_signal():
        written = (_adapter if args.way in _OF_ADAPTERS else _model)(args, dtype)
    print(f"{args.target}{written}")
    return 0


def _model(args: argparse.Namespace, dtype: torch.dtype | None) -> str:
    """Convert a model; returns the text to print after the target's path."""
    from lightning_megatron.lightning.pretrained.convert import (
        checkpoint_to_hf,
        hf_to_checkpoint,
        megatron_to_checkpoint,
    )

    if args.way == "hf-to-ckpt":
        hf_to_checkpoint(args.source, args.target, dtype=dtype)
        return ""
    if args.way == "megatron-to-ckpt":
        options = {"config": args.config, "allow_pickle": args.allow_pickle}
        megatron_to_checkpoint(args.source, args.target, dtype=dtype, **options)
        return ""
    options = {name: getattr(args, name) for name in ("max_shard_size", "tokenizer", "allow_other_tokenizer")}
    return f": {checkpoint_to_hf(args.source, args.target, dtype=dtype, **options)}"


def _adapter(args: argparse.Namespace, dtype: torch.dtype | None) -> str:
    """Convert an adapter; returns the text to print after the target's path."""
    from lightning_megatron.lightning.pretrained.convert_adapter import (
        checkpoint_to_peft,
        merge_adapter,
        peft_to_checkpoint,
    )

    if args.way == "ckpt-to-peft":
        notes = checkpoint_to_peft(args.source, args.target, dtype=dtype, adapter=args.adapter)
        return "".join(f"\n{note}" for note in notes)
    if args.way == "peft-to-ckpt":
        peft_to_checkpoint(args.source, args.target, dtype=dtype, base=args.base)
    else:
        merge_adapter(args.source, args.target, dtype=dtype, base=args.base, adapter=args.adapter)
    return ""


def transformer_config(text: str) -> TransformerConfig:
    """The preset of that name, or the configuration in a JSON file.

    Raises:
        argparse.ArgumentTypeError: if it is neither, or the fields are no configuration.
    """
    from lightning_megatron.files.small import read_object
    from lightning_megatron.models.presets import configuration

    try:
        return configuration(read_object(text) if Path(text).is_file() else text)
    except (ValueError, TypeError, OSError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
