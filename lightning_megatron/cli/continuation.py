"""The work of ``lightning-megatron generate``, in a module of its own because it imports torch and Lightning."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.data import build_tokenizer
from lightning_megatron.device import best_available
from lightning_megatron.lightning.module import GPTModule
from lightning_megatron.lightning.pretrained.load_module import load_module, module_arguments
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.models.generate import generate


def continuation(args: argparse.Namespace) -> str | None:
    """The prompt and its continuation; ``None`` in a process that the first one has started."""
    tokenizer = build_tokenizer(
        args.tokenizer_type, args.tokenizer_model, vocab_file=args.vocab_file, merge_file=args.merge_file
    )
    if args.seed is None:
        torch.seed()  # seeds the generator that sampling draws its seed from
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
    """A module whose predictions continue a prompt.

    Args:
        options: arguments of :func:`generate`.
        **arguments: arguments of :class:`GPTModule`.
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
