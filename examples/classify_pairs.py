r"""Fine-tune BERT to classify sentences or pairs of sentences, in any layout, and measure its accuracy.

    python examples/classify_pairs.py --devices 2 --tp 2

Without files it makes pairs of an opinion and a reply, and a small model learns who is pleased: both, neither, or one.
With files, lines are a label (0, 1, ...), a sentence, and if there are pairs a second one, separated by tabs:

    lightning-megatron convert megatron-to-ckpt bert345m bert.ckpt --config megatron-bert-uncased --allow-pickle
    python examples/classify_pairs.py --weights bert.ckpt --vocab-file vocab.txt --train train.tsv \
        --test test.tsv --classes 2 --seq-length 128 --lr 2e-5
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron import BertModule, MegatronStrategy
from lightning_megatron.data.tokenizers import build_tokenizer

Pair = tuple[int, list[str]]

THINGS = ("soup", "film", "book", "train", "room", "song")
OPINIONS = (("bad", "awful", "boring", "poor"), ("good", "great", "lovely", "superb"))
NAMES = ("ann", "ben", "eva", "tom")
REPLIES = (("hated", "disliked", "regretted", "avoided"), ("liked", "loved", "enjoyed", "praised"))


class Classifier(BertModule):
    """BERT with a linear layer on its pooled output.

    A batch has ``tokens``, ``token_types`` and ``padding_mask`` ``[B, S]``, and ``label`` ``[B]``.

    Args:
        classes: number of classes.
        *args: arguments of :class:`BertModule`.
        **kwargs: arguments of :class:`BertModule`.
    """

    def __init__(self, *args: Any, classes: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_hyperparameters({"classes": classes})
        self.classes = classes
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(classes, average="micro")

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "classifier"):  # every rank holds all of it
            self.classifier = nn.Linear(self.config.hidden_size, self.classes)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """``[B, classes]``, equal on all ranks of a replica."""
        found: Tensor = self.classifier(self.pooled(batch))
        return found

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.logits(batch), batch["label"])
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("val", self.val_accuracy, batch)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("test", self.test_accuracy, batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.logits(batch).softmax(dim=-1)

    def _evaluate(self, name: str, accuracy: MulticlassAccuracy, batch: Mapping[str, Tensor]) -> None:
        logits, label = self.logits(batch), batch["label"]
        accuracy(logits, label)
        self.log(f"{name}_accuracy", accuracy, prog_bar=True)
        self.log(f"{name}_loss", F.cross_entropy(logits, label), sync_dist=True, batch_size=len(label))


class Words:
    """Ids of the words of the made pairs, in place of a vocabulary file."""

    pad, bos, eos = 0, 1, 2

    def __init__(self) -> None:
        words = sorted({word for _, texts in made_pairs() for text in texts for word in text.split()})
        self.ids = {word: number for number, word in enumerate(words, 3)}
        self.vocab_size = len(words) + 3

    def encode(self, text: str) -> list[int]:
        return [self.ids[word] for word in text.split()]


def made_pairs() -> list[Pair]:
    """Every opinion with every reply, in a fixed random order: 0 if one is pleased, 1 if both are, 2 if neither is."""
    found = [
        ((0 if one != other else 2 - one), [f"the {thing} was {opinion}", f"{name} {reply} it"])
        for one, other in product((0, 1), repeat=2)
        for thing, opinion, name, reply in product(THINGS, OPINIONS[one], NAMES, REPLIES[other])
    ]
    random.Random(1).shuffle(found)
    return found


def read_pairs(path: str | Path) -> list[Pair]:
    """Labels and texts of a file."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line.strip()]
    return [(int(label), texts) for label, *texts in rows]


def sample(pair: Pair, tokenizer: Any, length: int) -> dict[str, Tensor]:
    """A pair as the model reads it: ``[CLS] first [SEP] second [SEP]``, cut or padded to a length."""
    label, texts = pair
    ids, types = [tokenizer.bos], [0]
    for segment, text in enumerate(texts):
        piece = [*tokenizer.encode(text), tokenizer.eos]
        ids, types = ids + piece, types + [segment] * len(piece)
    ids, types = ids[:length], types[:length]
    more = [0] * (length - len(ids))
    return {
        "tokens": torch.tensor(ids + [tokenizer.pad] * len(more)),
        "token_types": torch.tensor(types + more),
        "padding_mask": torch.tensor([1] * len(ids) + more),
        "label": torch.tensor(label),
    }


def loader(
    pairs: Sequence[Pair], tokenizer: Any, options: argparse.Namespace, *, shuffle: bool = False
) -> DataLoader[Any]:
    samples: Any = [sample(pair, tokenizer, options.seq_length) for pair in pairs]
    return DataLoader(samples, batch_size=options.batch_size, shuffle=shuffle)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="checkpoint of a BERT (default: a small model that knows nothing)")
    parser.add_argument("--vocab-file", help="its vocab.txt")
    parser.add_argument("--tokenizer-type", default="BertWordPieceLowerCase", help="or BertWordPieceCase")
    parser.add_argument("--train", help="file of labels and sentences (default: made pairs)")
    parser.add_argument("--test", help="another such file")
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--out", default="out/classify-pairs")
    parser.add_argument("--seq-length", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one data-parallel replica")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    options = parser.parse_args(arguments)
    if (options.weights is None) != (options.vocab_file is None):
        parser.error("--weights and --vocab-file belong together")
    if (options.train is None) != (options.test is None):
        parser.error("--train and --test belong together")
    if options.train and not options.weights:
        parser.error("--train needs --weights: the small model knows only the words of the made pairs")
    return options


def main(arguments: Sequence[str] | None = None) -> float:
    options = parsed(arguments)
    L.seed_everything(1234)
    made: dict[str, Any] = {"classes": options.classes, "lr": options.lr, "weight_decay": 0.01}
    tokenizer: Any
    if options.weights:  # a checkpoint of the pretrained model has no layer for the classes
        tokenizer = build_tokenizer(options.tokenizer_type, vocab_file=options.vocab_file)
        module = Classifier.load_from_checkpoint(options.weights, strict=False, **made)
    else:
        tokenizer = Words()
        module = Classifier("bert-tiny", vocab_size=tokenizer.vocab_size, **made)
    pairs = made_pairs()
    train, test = (read_pairs(options.train), read_pairs(options.test)) if options.train else (pairs[384:], pairs[:384])
    held_out = max(1, len(train) // 10)
    trainer = L.Trainer(
        devices=options.devices,
        strategy=MegatronStrategy(tp=options.tp, pp=options.pp, micro_batch_size=max(1, options.batch_size // 4)),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir="out",
        callbacks=[ModelCheckpoint(options.out, monitor="val_accuracy", mode="max"), EarlyStopping("val_loss")],
    )
    trainer.fit(
        module,
        loader(train[held_out:], tokenizer, options, shuffle=True),
        loader(train[:held_out], tokenizer, options),
    )
    (found,) = trainer.test(module, loader(test, tokenizer, options), ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        print(f"accuracy on {len(test)} held-out samples: {found['test_accuracy']:.1%}")
    return found["test_accuracy"]


if __name__ == "__main__":
    main()
