"""``lightning-megatron convert``: Hugging Face directories to checkpoints and back, and Megatron's checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_megatron.cli.common import ending_by_signal, size_in_bytes

if TYPE_CHECKING:
    from lightning_megatron.config.transformer import TransformerConfig

_DESCRIPTION = """\
Convert LLaMA 2/3.x, GPT-2 and Mixtral, tensor by tensor, in one process: the memory it takes is that of the largest
tensors of the model. Checkpoints may come from any layout, and load into any; Megatron's are read, and not written."""

_EXAMPLE = """\
examples:
  lightning-megatron convert hf-to-ckpt Llama-3.1-8B llama.ckpt
  lightning-megatron convert ckpt-to-hf run/last.ckpt exported --dtype bf16 --tokenizer Llama-3.1-8B
  lightning-megatron convert megatron-to-ckpt megatron/checkpoints llama.ckpt --config llama3.1-8b"""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def convert_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron convert",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ways = parser.add_subparsers(dest="way", required=True, metavar="WAY")
    there = ways.add_parser("hf-to-ckpt", help="a Hugging Face directory to a checkpoint that begins a run")
    there.add_argument("source", metavar="HF_DIR", help="directory with config.json and weights")
    there.add_argument("target", metavar="OUT.ckpt", help="checkpoint directory to make")
    back = ways.add_parser("ckpt-to-hf", help="a checkpoint to a directory that transformers loads")
    back.add_argument("source", metavar="CKPT", help="checkpoint directory of GPTModule, LlamaModule or MixtralModule")
    back.add_argument("target", metavar="OUT_DIR", help="directory to make")
    back.add_argument(
        "--tokenizer", metavar="HF_DIR", help="directory whose tokenizer and chat template are copied (default: none)"
    )
    back.add_argument(
        "--max-shard-size",
        type=size_in_bytes,
        default="5GB",
        metavar="SIZE",
        help="bytes of one file at most, such as 500MB or 5GB (default: 5GB)",
    )
    megatron = ways.add_parser("megatron-to-ckpt", help="a checkpoint of Megatron-LM to one that begins a run")
    megatron.add_argument(
        "source", metavar="MEGATRON_DIR", help="what Megatron saved to, or the folder of an iteration"
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
        help="read files that hold objects, as those with Megatron's command line do; nothing that they name is run",
    )
    for way in (there, back, megatron):
        way.add_argument("--dtype", choices=_DTYPES, help="of the tensors written (default: as they are)")
    return parser


def convert_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron convert`` with these arguments; returns the exit code (2: the user's error)."""
    args = convert_parser().parse_args(argv)
    import torch  # takes seconds with Lightning; --help must not wait for it

    from lightning_megatron.checkpoint import CheckpointError
    from lightning_megatron.lightning.pretrained.convert import (
        checkpoint_to_hf,
        hf_to_checkpoint,
        megatron_to_checkpoint,
    )

    dtype = None if args.dtype is None else getattr(torch, _DTYPES[args.dtype])
    written = ""
    try:
        with ending_by_signal():
            if args.way == "hf-to-ckpt":
                hf_to_checkpoint(args.source, args.target, dtype=dtype)
            elif args.way == "megatron-to-ckpt":
                options = {"config": args.config, "allow_pickle": args.allow_pickle}
                megatron_to_checkpoint(args.source, args.target, dtype=dtype, **options)
            else:
                options = {"max_shard_size": args.max_shard_size, "tokenizer": args.tokenizer}
                written = f": {checkpoint_to_hf(args.source, args.target, dtype=dtype, **options)}"
    except (ValueError, OSError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.target}{written}")
    return 0


def transformer_config(text: str) -> TransformerConfig:
    """The preset of that name, or the configuration in a JSON file.

    Raises:
        argparse.ArgumentTypeError: if it is neither, or the fields are no configuration.
    """
    from lightning_megatron.config.transformer import TransformerConfig
    from lightning_megatron.files.small import read_object
    from lightning_megatron.models.presets import preset

    try:
        if not Path(text).is_file():
            return preset(text)
        return TransformerConfig.of(read_object(text))
    except (ValueError, TypeError, OSError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
