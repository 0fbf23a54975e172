"""Models of the programs of ``user_programs.py``: small ones of a user's own, Hugging Face's, and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from user_batches import CLASSES, FEATURES, LENGTH, WORDS, Batch, read
from user_grammar import Program

from lightning_megatron import GPTModule

WIDTH = 8
OUR_SIZES: Mapping[str, int] = {
    **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 16},
    **{"vocab_size": WORDS, "max_position_embeddings": LENGTH, "vocab_multiple": 4},
}


class OnFeatures(nn.Module):
    """Layers that look at the features of a batch."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: Batch) -> Tensor:
        out: Tensor = self.layers(batch.x)
        return out


class OnTokens(nn.Module):
    """An embedding, layers that look at a sequence, and the mean of what they say.

    Args:
        inner: layers of which the first output may be a tuple, as that of recurrent layers.
        tied: true if the output has the weights of the embedding.
    """

    def __init__(self, inner: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, WIDTH), inner
        self.head = nn.Linear(WIDTH, WORDS if tied else CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, batch: Batch) -> Tensor:
        out = self.inner(self.embedding(batch.tokens))
        hidden = out[0] if isinstance(out, tuple) else out
        logits: Tensor = self.head(hidden.mean(1))
        return logits


class OfTransformers(nn.Module):
    """A model of Hugging Face's, whose loss is its own."""

    def __init__(self, model: nn.Module, classifies: bool) -> None:
        super().__init__()
        self.model, self.classifies = model, classifies

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Its loss, and logits of classes."""
        out = self.model(input_ids=batch.tokens, labels=batch.y if self.classifies else batch.tokens)
        return out.loss, out.logits if self.classifies else out.logits.mean(1)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": WIDTH}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=WORDS, num_labels=CLASSES, max_position_embeddings=LENGTH, **sizes, **dropout)
    return OfTransformers(BertForSequenceClassification(config), classifies=True)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "vocab_size": WORDS}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return OfTransformers(GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ends)), classifies=False)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": WIDTH, "num_layers": 1, "num_heads": 2, "vocab_size": WORDS}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return OfTransformers(T5ForConditionalGeneration(config), classifies=False)


def _layers(*first: nn.Module, width: int = WIDTH) -> tuple[nn.Module, ...]:
    return (*first, nn.ReLU(), nn.Linear(width, CLASSES))


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)


NETS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": lambda: OnFeatures(*_layers(nn.Linear(FEATURES, WIDTH))),
    "conv": lambda: OnFeatures(
        nn.Unflatten(1, (1, 3, 4)), *_layers(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.LayerNorm(12), width=12)
    ),
    "norm": lambda: OnFeatures(*_layers(nn.Linear(FEATURES, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))),
    "embed": lambda: OnTokens(nn.Tanh()),
    "lstm": lambda: OnTokens(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "gru": lambda: OnTokens(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "attention": lambda: OnTokens(_attention()),
    "tied": lambda: OnTokens(nn.Linear(WIDTH, WIDTH), tied=True),
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
}


class Losses:
    """What cores have in common: the loss of a batch from losses of its samples."""

    program: Program

    def reduced(self, losses: Tensor, batch: Batch) -> Tensor:
        """The mean in one of the ways of writing it."""
        if self.program["loss"] == "weighted":
            weights = 1.0 + batch.y
            return (losses * weights).sum() / weights.sum()
        if self.program["loss"] == "parts":
            return 0.5 * losses.mean() + 0.5 * losses.sum() / len(losses)
        return losses.mean()


class OwnCore(Losses, LightningModule):
    """A LightningModule around a net of one's own, or of Hugging Face's.

    Args:
        text: the program.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.program = Program.parse(text)
        self.net = NETS[self.program["net"]]()
        if "dropout" in self.program:
            self.drop = nn.Dropout(0.25)

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss of a batch, and logits of its classes."""
        if "dropout" in self.program:
            batch = Batch(self.drop(batch.x), batch.tokens, batch.y, batch.number)
        out = self.net(batch)
        if isinstance(out, tuple):
            return out
        return self.reduced(F.cross_entropy(out, batch.y, reduction="none"), batch), out

    def trained(self) -> list[list[nn.Parameter]]:
        """Trained parameters in two halves."""
        params = [p for p in self.net.parameters() if p.requires_grad]
        return [params[: len(params) // 2], params[len(params) // 2 :]]


class OurCore(Losses, GPTModule):
    """A subclass of GPTModule with a loss of its own.

    Args:
        text: the program.
    """

    def __init__(self, text: str) -> None:
        self.program = Program.parse(text)
        GPTModule.__init__(self, f"{self.program['net']}-tiny", **OUR_SIZES)

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss of a batch, and logits of its classes."""
        named = {"tokens": batch.tokens, "labels": torch.roll(batch.tokens, -1, 1)}
        hidden = self.hidden(named)
        losses = self.token_losses(named, hidden).mean(1)
        return self.reduced(losses, batch), hidden.mean(1)[:, :CLASSES]

    def hidden_shape(self, batch: Any) -> tuple[int, ...]:
        """Shape of the activation between stages, for a batch of any form."""
        return super().hidden_shape({"tokens": read(batch, self.program["batch"]).tokens})

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch as it is: what the model is called with is made of it."""
        return batch

    def trained(self) -> list[list[nn.Parameter]]:
        """Trained parameters in two parts, those that are no matrices first: stages have both."""
        params = [p for p in self.parameters() if p.requires_grad]
        return [[p for p in params if p.ndim < 2], [p for p in params if p.ndim > 1]]
