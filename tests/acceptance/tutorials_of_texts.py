"""More programs of tutorials: texts and series."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tutorials import PROGRAMS, SAMPLES, Program, Rows, generator, loader, tutorial, vectors

__all__ = ["PROGRAMS"]


def sentences(seed: int = 0) -> Rows:
    lengths = torch.randint(3, 7, (SAMPLES,), generator=generator(seed)).tolist()
    return Rows([torch.randint(1, 20, (n,), generator=generator(seed + 1 + i)) for i, n in enumerate(lengths)])


def padded(texts: list[Tensor]) -> dict[str, Tensor]:
    source = pad_sequence(texts, batch_first=True)
    return {"source": source, "target": pad_sequence([text.flip(0) for text in texts], batch_first=True)}


@tutorial
def translation() -> Program:
    class Translation(pl.LightningModule):
        """torch's transformer, with masks, batches that are dictionaries, and a warm-up."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 16, padding_idx=0)
            self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(16, 20)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            source, target = batch["source"], batch["target"]
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
            hidden = self.transformer(
                self.embed(source),
                self.embed(target[:, :-1]),
                tgt_mask=mask,
                src_key_padding_mask=(source == 0).float() * -1e9,
            )
            loss = F.cross_entropy(self.head(hidden).transpose(1, 2), target[:, 1:], ignore_index=0)
            self.log("train_loss", loss, batch_size=len(source))
            return loss

        def configure_optimizers(self) -> Any:
            # Keys' biases have no gradient but rounding, of which Adam would make whole steps.
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
            return [optimizer], [{"scheduler": warm, "interval": "step"}]

    return Program(
        Translation(), loader(sentences(), collate_fn=padded), trainer={"gradient_clip_val": 0.5}, exact=False
    )


@tutorial
def hugging_face_classifier() -> Program:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    how = {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2}

    class FineTuned(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = BertForSequenceClassification(BertConfig(**sizes, **how))
            self.metrics = torchmetrics.MetricCollection(
                [torchmetrics.classification.BinaryAccuracy(), torchmetrics.classification.BinaryF1Score()]
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self.model(**batch)
            self.log("train_loss", out.loss)
            return out.loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            out = self.model(**batch)
            self.metrics.update(out.logits.argmax(-1), batch["labels"])

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.metrics.compute())
            self.metrics.reset()

        def configure_optimizers(self) -> Any:
            plain = [p for name, p in self.named_parameters() if "bias" in name or "LayerNorm" in name]
            decayed = [p for name, p in self.named_parameters() if "bias" not in name and "LayerNorm" not in name]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=5e-3)

    def rows(seed: int) -> Rows:
        ids = torch.randint(1, 20, (SAMPLES, 6), generator=generator(seed))
        return Rows([{"input_ids": row, "labels": row[0] % 2} for row in ids])

    return Program(FineTuned(), loader(rows(0)), loader(rows(1)))


@tutorial
def time_series() -> Program:
    class Forecast(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(1, 8, num_layers=2, batch_first=True)
            self.head = nn.Linear(8, 1)
            self.val_error = torchmetrics.MeanAbsoluteError()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.smooth_l1_loss(self(batch[0].unsqueeze(-1)), batch[1])
            self.log("train_loss", loss)
            return {"loss": loss}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_error(self(batch[0].unsqueeze(-1)), batch[1])
            self.log("val_error", self.val_error, on_epoch=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.RMSprop(self.parameters(), lr=1e-2)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_error"}}

    return Program(Forecast(), loader(vectors()), loader(vectors(1)), {"max_epochs": 3})


def bags(rows: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Texts end to end, where each begins, and labels."""
    texts, labels = zip(*rows, strict=True)
    begins = torch.tensor([0, *(len(text) for text in texts[:-1])]).cumsum(0)
    return torch.cat(texts), begins, torch.tensor(labels)


@tutorial
def text_classification_with_offsets() -> Program:
    class Bags(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.EmbeddingBag(20, 8), nn.Linear(8, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            texts, begins, labels = batch
            loss = F.cross_entropy(self.head(self.embed(texts, begins)), labels)
            self.log("train_loss", loss, batch_size=len(labels))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)]

    rows = Rows([(text, int(text[0]) % 2) for text in sentences().rows])
    return Program(Bags(), loader(rows, collate_fn=bags))


@tutorial
def tied_language_model() -> Program:
    class Tied(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.gru = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            tokens = batch["source"]
            logits = self.head(self.gru(self.embed(tokens[:, :-1]))[0])
            loss = F.nll_loss(logits.log_softmax(-1).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
            self.log("perplexity", loss.exp(), batch_size=len(tokens))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters(), lr=0.1)

    return Program(Tied(), loader(sentences(), collate_fn=padded))
