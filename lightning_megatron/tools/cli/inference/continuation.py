"""The work of ``lightning-megatron generate``, in a module of its own because it imports torch and Lightning."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoint import open_checkpoint
from lightning_megatron.device import best_available
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.families import module_of
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.modules.load_module import load_module
from lightning_megatron.lightning.run_state.hyper_parameters import config_of
from lightning_megatron.tools.cli.data.tokenizer_options import tokenizer_for
from lightning_megatron.tools.evaluation.ranks import Ranks, Spread, Step, on_ranks


def continuation(args: argparse.Namespace) -> str | None:
    """The prompt and its continuation; ``None`` in a process that the first one has started."""
    tokenizer = tokenizer_for(args)
    if args.seed is None:
        torch.seed()  # seeds the generator that sampling draws its seed from
    prompt = torch.tensor(tokenizer.encode(args.prompt))
    options = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
    options["stop"] = tokenizer.eod
    device = args.device or best_available().type
    kind = _module_class(args.checkpoint)
    if args.tp == 1:
        module = load_module(args.checkpoint, kind).to(device)
        tokens = module.generate(prompt.to(device).unsqueeze(0), **options)
    else:
        if not issubclass(kind, GPTModule):
            reason = f"only decoders can be split over devices here, and the checkpoint is of {kind.__name__}"
            raise ConfigError([Problem("--tp", args.tp, reason, (1,))])

        def work(ranks: Ranks) -> Tensor:
            step: Step = lambda module, batch: module.generate(batch["tokens"], **options)  # noqa: E731
            return ranks.run(step, {"tokens": prompt.unsqueeze(0)})["result"]

        predicted = on_ranks(Spread(tp=args.tp, device=device).trainer(), args.checkpoint, work)
        if predicted is None:
            return None
        tokens = predicted
    return tokenizer.decode(token for token in tokens[0].tolist() if token < tokenizer.vocab_size)


def _module_class(checkpoint: str) -> Any:
    """The module class of a checkpoint, if its model can generate text.

    Raises:
        ConfigError: if it cannot.
    """
    config = config_of(open_checkpoint(checkpoint, check="sizes").meta.get("hyper_parameters") or {})
    kind = GPTModule if config is None else module_of(config)
    if not hasattr(kind, "generate"):
        reason = "its model cannot generate text"
        raise ConfigError([Problem("--checkpoint", kind.__name__, reason, ("GPTModule",))])
    return kind
