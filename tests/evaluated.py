"""Small models of transformers with a tokenizer and texts, and what they give by transformers' own forward."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.lightning.pretrained.convert import hf_to_checkpoint
from tests.families import TINY, hf_model

VOCABULARY, POSITIONS = 300, 32
END = "<|endoftext|>"
WORDS = 40


@dataclass(frozen=True)
class Home:
    """A folder with models and texts.

    Attributes:
        folder: the folder.
    """

    folder: Path

    @property
    def documents(self) -> Path:
        """JSON lines of documents, short ones and some that are longer than the model can see."""
        return self.folder / "documents.jsonl"

    @property
    def passages(self) -> Path:
        """JSON lines of passages as of LAMBADA."""
        return self.folder / "passages.jsonl"

    @property
    def wiki(self) -> Path:
        """Text with the spacing of WikiText."""
        return self.folder / "wiki.tokens"

    def hf(self, kind: str) -> Path:
        """The directory of a model and its tokenizer."""
        return self.folder / kind

    def checkpoint(self, kind: str) -> Path:
        """Our checkpoint of a model."""
        return self.folder / f"{kind}.ckpt"

    def model(self, kind: str) -> Any:
        """transformers' model."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.hf(kind), attn_implementation="eager").eval()

    def encode(self, text: str) -> list[int]:
        """Tokens by transformers' tokenizer."""
        from transformers import AutoTokenizer

        ids: list[int] = AutoTokenizer.from_pretrained(self.hf("gpt2"))(text)["input_ids"]
        return ids

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [json.loads(line)["text"] for line in self.documents.read_text().splitlines()]


def make_home(folder: Path, kinds: tuple[str, ...]) -> Home:
    """Make models of these kinds, their checkpoints, and the texts."""
    home, draw = Home(folder), random.Random(4)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(WORDS)]
    texts = [" ".join(draw.choices(words, k=length)) for length in (3, 40, 1, 17, 90, 8, 25)]
    home.documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    passages = [" ".join(draw.choices(words, k=draw.randint(2, 60))) for _ in range(11)]
    home.passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    home.wiki.write_text(f" \n = {texts[0]} = \n \n {texts[1]} , {texts[3]} @-@ {texts[2]} ( {texts[4]} ) . \n")
    tokenizer = make_tokenizer(texts)
    for kind in kinds:
        learned = {"n_positions": POSITIONS} if kind == "gpt2" else {"max_position_embeddings": POSITIONS}
        model = hf_model(TINY[kind] | {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0} | learned)
        model.save_pretrained(home.hf(kind))
        tokenizer.save_pretrained(home.hf(kind))
        hf_to_checkpoint(home.hf(kind), home.checkpoint(kind))
    return home


def make_tokenizer(texts: list[str]) -> Any:
    """A byte-level tokenizer of these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=END, eos_token=END)


def log_probabilities(model: Any, tokens: list[int]) -> Tensor:
    """Logarithms of probabilities ``[S, V]`` behind each token, by transformers."""
    with torch.no_grad():
        found: Tensor = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return found


def loss_sum(model: Any, tokens: list[int], length: int, stride: int) -> tuple[float, int]:
    """Loss of all tokens but the first, and their number, as Megatron-LM masks its overlapping windows."""
    total, count = 0.0, 0
    targets = len(tokens) - 1
    sequences = max(-(-max(targets - stride, 0) // stride) + 1, 1)
    for number in range(sequences):
        window = tokens[number * stride : number * stride + length + 1]
        if len(window) < 2:
            continue
        found = -log_probabilities(model, window[:-1]).gather(1, torch.tensor(window[1:])[:, None])[:, 0]
        mask = torch.ones(length, dtype=torch.double)
        if stride != length and number:
            mask[:-stride] = 0
        total += float((found * mask[: len(found)]).sum())
        count += int(mask[: len(found)].sum())
    return total, count
