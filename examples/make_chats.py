"""Make a tiny model with its tokenizer, as transformers writes them, and chats to try fine-tuning on.

    python examples/make_chats.py [FOLDER]

writes ``FOLDER/chat-base`` and ``FOLDER/chats.jsonl`` (default: ``.demo``), which
``examples/configs/llama-finetune-tiny.yaml`` reads, and ``FOLDER/pairs.jsonl`` of better and worse answers for
``examples/dpo.py``. Needs the extra ``hf``.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLACES = ["first", "second", "third"]
COLOURS = ["red", "green", "blue", "white", "black", "brown", "pink", "grey"]


def chats() -> list[dict[str, str]]:
    """Questions for one of three colours, with their answers."""
    return [
        {
            "prompt": f"Of {', '.join(three)}: which is the {place}?",
            "completion": f"The {place} one is {three[number]}.",
        }
        for three in itertools.permutations(COLOURS, 3)
        for number, place in enumerate(PLACES)
    ]


def pairs() -> list[dict[str, str]]:
    """The same questions, with their answer and a colour that was not asked for."""
    others = itertools.cycle(COLOURS)
    found = []
    for chat in chats():
        wrong = next(colour for colour in others if f"is {colour}." not in chat["completion"])
        rejected = f"{chat['completion'].rsplit(' ', 1)[0]} {wrong}."
        found.append({"prompt": chat["prompt"], "chosen": chat["completion"], "rejected": rejected})
    return found


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of few words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False),
    )
    names = {"pad_token": "<pad>", "eos_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, **names)


def main(folder: Path) -> None:
    """Write all files into a folder."""
    made = chats()
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("chats", made), ("pairs", pairs())):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    words = tokenizer([text for chat in made for text in (*chat.values(), "user\n", "assistant\n")])
    words.save_pretrained(folder / "chat-base")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "chat-base")
    print(f"{folder}: {len(made)} chats, and a model with {len(words)} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo"))
