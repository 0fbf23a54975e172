"""Preference tuning (DPO): of two answers, a model learns to give the better one.

An adapter is trained; without it the model is the reference.

    python examples/make_chats.py
    python examples/dpo.py --hf .demo/chat-base --pairs .demo/pairs.jsonl --devices 2 --tp 2

Lines of the file are {"prompt": ..., "chosen": ..., "rejected": ...}. Needs the extra ``hf``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split
from transformers import AutoTokenizer

from lightning_megatron import LlamaModule, LoRA, MegatronStrategy


class DPO(LlamaModule):
    """Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

    A batch is a dict of ``tokens`` and ``labels`` ``[B, 2, S]``: the chosen and the rejected answer of each prompt.
    Labels are -100 outside the answers.

    Args:
        beta: weight of the distance from the reference.
        *args: arguments of :class:`LlamaModule`.
        **kwargs: arguments of :class:`LlamaModule`; ``lora`` is needed.
    """

    def __init__(self, *args: Any, beta: float = 0.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_hyperparameters({"beta": beta})
        self.beta = beta

    def hidden_shape(self, batch: Mapping[str, Tensor]) -> tuple[int, ...]:
        return super().hidden_shape(batch["tokens"].flatten(0, 1))

    def rewards(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Implicit rewards ``[B, 2]`` of the answers: how much likelier they have become, in nats times ``beta``."""
        rows = {key: value.flatten(0, 1) for key, value in batch.items()}
        with torch.no_grad(), self.adapter_off():
            reference = self.token_losses(rows)
        gain = (reference - self.token_losses(rows)).sum(1)  # 0 where there is no label
        return self.beta * gain.unflatten(0, (-1, 2))

    def preference_loss(self, batch: Mapping[str, Tensor], prefix: str = "") -> Tensor:
        """The mean loss of a batch; logs it, and the share of the pairs in which the chosen answer gained more."""
        chosen, rejected = self.rewards(batch).unbind(1)
        loss = -F.logsigmoid(chosen - rejected).mean()
        values = {"loss": loss, "margin": (chosen - rejected).mean(), "accuracy": (chosen > rejected).float().mean()}
        self.log_dict({f"{prefix}{name}": value for name, value in values.items()}, prog_bar=True, sync_dist=True)
        return loss

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        return self.preference_loss(batch, "train_")

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.preference_loss(batch, "val_")


class Pairs(Dataset[dict[str, Tensor]]):
    """Pairs of answers as token ids, padded to one length.

    Args:
        path: JSON lines.
        tokenizer: a tokenizer of transformers with a chat template.
        seq_length: length of a row; the beginning of the prompt of a longer pair is cut.
    """

    def __init__(self, path: str | Path, tokenizer: Any, seq_length: int) -> None:
        self.tokenizer, self.length = tokenizer, seq_length
        with open(path, encoding="utf-8", newline="\n") as lines:
            self.pairs = [self._checked(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]

    @staticmethod
    def _checked(line: str, place: str) -> dict[str, str]:
        try:
            pair = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: not JSON ({error})") from None
        for key in ("prompt", "chosen", "rejected"):
            if not isinstance(pair, dict) or not isinstance(pair.get(key), str):
                raise ValueError(f'{place}: has no text under {key!r}; write {{"prompt", "chosen", "rejected"}}')
        return pair

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        pair = self.pairs[item]
        asked = [{"role": "user", "content": pair["prompt"]}]
        text = self.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        rows = [self._row(prompt, pair[key]) for key in ("chosen", "rejected")]
        return {key: torch.tensor([row[key] for row in rows]) for key in ("tokens", "labels")}

    def _row(self, prompt: list[int], text: str) -> dict[str, list[int]]:
        answer = self.tokenizer.encode(text + self.tokenizer.eos_token, add_special_tokens=False)[: self.length]
        prompt = prompt[max(0, len(prompt) + len(answer) - self.length - 1) :]
        ids = [*prompt, *answer]
        labels = [-100] * (len(prompt) - 1) + answer
        padding = self.length - len(labels)
        return {"tokens": [*ids[:-1], *[0] * padding], "labels": labels + [-100] * padding}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", required=True, help="directory of a LLaMA with its tokenizer")
    parser.add_argument("--pairs", required=True, help="JSON lines")
    parser.add_argument("--out", default="out/dpo")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8, help="pairs of one data-parallel replica")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args(arguments)
    L.seed_everything(1234)
    pairs = Pairs(options.pairs, AutoTokenizer.from_pretrained(options.hf), options.seq_length)
    held_out = max(1, len(pairs) // 10)
    train, val = random_split(pairs, [len(pairs) - held_out, held_out], torch.Generator().manual_seed(1))
    lora = LoRA(rank=options.rank, alpha=2 * options.rank)
    module = DPO.from_hf(options.hf, lora=lora, beta=options.beta, lr=options.lr, weight_decay=0.0)
    trainer = L.Trainer(
        devices=options.devices,
        strategy=MegatronStrategy(tp=options.tp, micro_batch_size=min(4, options.batch_size)),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        default_root_dir="out",
        callbacks=[ModelCheckpoint(options.out, save_last=True, save_top_k=0)],
    )
    trainer.fit(
        module,
        DataLoader(train, batch_size=options.batch_size, shuffle=True, drop_last=True),
        DataLoader(val, batch_size=options.batch_size),
    )
    if trainer.is_global_zero:
        print(f"the chosen answer gained more in {trainer.callback_metrics['val_accuracy']:.0%} of the held-out pairs")


if __name__ == "__main__":
    main()
