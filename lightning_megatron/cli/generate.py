"""``lightning-megatron generate``: continue a text with a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.data import build_tokenizer
from lightning_megatron.data.tokenizers import TOKENIZER_TYPES
from lightning_megatron.device import best_available
from lightning_megatron.lightning.module import GPTModule
from lightning_megatron.lightning.restore import load_module, module_arguments
from lightning_megatron.lightning.strategy import MegatronStrategy
from lightning_megatron.models.generate import generate

_DESCRIPTION = """\
Continue a text with a checkpoint of GPTModule or LlamaModule, saved under any layout. Runs in one process, or
in as many as --tp says, each with its part of every layer on a device of its own."""

_EXAMPLE = """\
example:
  lightning-megatron generate --checkpoint run/last.ckpt --tokenizer-type GPTSentencePieceTokenizer \\
      --tokenizer-model tokenizer.model --prompt 'def main(' --temperature 0.8 --top-p 0.95 --seed 1"""


def generate_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron generate",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="checkpoint directory, NAME.ckpt")
    add("--tokenizer-type", required=True, metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    add("--tokenizer-model", metavar="PATH", help="sentencepiece model, or directory of a Hugging Face tokenizer")
    add("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPE or vocab.txt of BertWordPiece")
    add("--merge-file", metavar="FILE", help="merges.txt of GPT2BPE")
    add("--prompt", required=True, metavar="TEXT", help="the text to continue")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to add at most (default: 64)")
    add("--temperature", type=float, default=1.0, metavar="T", help="of sampling; 0 for the likeliest (default: 1)")
    add("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="sample among the likeliest tokens of joint probability P")
    add("--seed", type=int, metavar="N", help="of sampling (default: another one each time)")
    add("--device", metavar="TYPE", help="torch device (default: the best there is)")
    add("--tp", type=int, default=1, metavar="N", help="devices to cut the model into (default: 1)")
    return parser


def generate_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron generate`` with these arguments; returns the exit code (2: the user's error)."""
    args = generate_parser().parse_args(argv)
    try:
        text = _text(args)
    except (ValueError, OSError, ModuleNotFoundError, CheckpointError, MisconfigurationException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if text is not None:
        print(text)
    return 0


def _text(args: argparse.Namespace) -> str | None:
    """The prompt and what follows it; ``None`` in a process that the first one has started."""
    tokenizer = build_tokenizer(
        args.tokenizer_type, args.tokenizer_model, vocab_file=args.vocab_file, merge_file=args.merge_file
    )
    if args.seed is None:
        torch.seed()  # of the generator that sampling draws its seed from
    prompt = torch.tensor(tokenizer.encode(args.prompt))
    options = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
    options["stop"] = tokenizer.eod
    device = args.device or best_available().type
    if args.tp == 1:
        module = load_module(args.checkpoint).to(device)
        assert module.model is not None
        tokens = generate(module.model, prompt.to(device).unsqueeze(0), **options)
    else:
        predicted = _predict(args.checkpoint, prompt, options, device, args.tp)
        if predicted is None:
            return None
        tokens = predicted
    return tokenizer.decode(tokens[0].tolist())


class _Continues(GPTModule):
    """A module that predicts how a prompt goes on.

    Args:
        options: of :func:`generate`.
        **arguments: of :class:`GPTModule`.
    """

    def __init__(self, options: Mapping[str, Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._options = options

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Prompt and continuation ``[B, S + n]`` of prompts ``[B, S]``."""
        assert self.model is not None
        return generate(self.model, batch, **self._options)


def _predict(checkpoint: str, prompt: Tensor, options: Mapping[str, Any], device: str, tp: int) -> Tensor | None:
    """Prompt and continuation ``[1, S + n]`` of a prompt ``[S]``, from ``tp`` processes; the first one has it."""
    module = _Continues(options, **module_arguments(checkpoint))
    trainer = Trainer(
        accelerator=device,
        devices=tp,
        strategy=MegatronStrategy(tp=tp),
        logger=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    predictions: Any = trainer.predict(module, DataLoader([prompt]), ckpt_path=checkpoint)  # type: ignore[arg-type]
    return predictions[0] if trainer.is_global_zero else None
