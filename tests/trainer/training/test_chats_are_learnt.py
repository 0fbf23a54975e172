"""A model of transformers' learns chats in two ranks, goes back to transformers, and answers there as it does here."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import SPECIAL, make_tokenizer, write_lines
from lightning.pytorch import seed_everything
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_megatron import ChatDataModule, LlamaModule, LoRA, MegatronStrategy, load_module
from lightning_megatron.data.chat.builtin import BUILTIN_TEMPLATES
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer
from lightning_megatron.tools.cli.main import main

pytestmark = pytest.mark.skipif(
    kind_in_tests() is not CPU, reason="chats are packed, and documents in a batch are refused on a Gaudi"
)

WORDS = list("abcdefghijkl")
PLACES = ("first", "middle", "last")
STEPS, PRETRAINING = 300, 300


def questions(*places: str) -> list[dict[str, Any]]:
    """Questions for one of three letters, with their answers."""
    return [
        {"prompt": f"{place} {' '.join(three)}", "completion": three[PLACES.index(place)]}
        for place, three in itertools.product(places, itertools.permutations(WORDS, 3))
    ]


def examples() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Questions for the first or the last of three letters; and some that are held out."""
    found = questions("first", "last")
    order = np.random.default_rng(5).permutation(len(found)).tolist()
    return [found[i] for i in order[:-64]], [found[i] for i in order[-64:]]


def pretrain(model: LlamaForCausalLM, tokenizer: Any) -> None:
    """Teach a model to answer with the letter in the middle, whatever it is asked."""
    asked = questions("middle")
    prompts = prompts_of(tokenizer, asked)
    answers = [[tokenizer.convert_tokens_to_ids(each["completion"]), model.config.eos_token_id] for each in asked]
    rows = torch.cat((prompts, torch.tensor(answers)), dim=1)
    labels = torch.cat((torch.full_like(prompts, -100), rows[:, prompts.shape[1] :]), dim=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for chosen in torch.randint(len(rows), (PRETRAINING, 32)):
        optimizer.zero_grad()
        model(input_ids=rows[chosen], labels=labels[chosen]).loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer as transformers writes them, and chats."""
    folder = tmp_path_factory.mktemp("made")
    words = ["user", "assistant", *PLACES, *WORDS]
    make_tokenizer(folder / "base", "words", [*SPECIAL, *words])
    torch.manual_seed(3)
    size = AutoTokenizer.from_pretrained(folder / "base").vocab_size
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=5,  # <|im_end|>
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    pretrain(model, AutoTokenizer.from_pretrained(folder / "base"))
    model.save_pretrained(folder / "base")
    write_lines(folder / "chats.jsonl", examples()[0])
    return folder


def train(folder: str, layout: dict[str, Any], lora: LoRA | None = None) -> list[float]:
    """Fine-tune, and save; the validation losses before and after."""
    seed_everything(1, verbose=False)
    data = ChatDataModule(
        f"{folder}/chats.jsonl", f"{folder}/base", 128, batch_size=8, chat_template="chatml", val_share=0.05
    )
    how: dict[str, Any] = {"lr_schedule": "cosine", "warmup_steps": 10, "weight_decay": 0.0}
    module = LlamaModule.from_hf(f"{folder}/base", lora=lora, lr=3e-3, **how)
    trainer = quiet_trainer(MegatronStrategy(**layout), max_steps=STEPS)
    before = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    trainer.save_checkpoint(f"{folder}/tuned.ckpt")
    return [before, after]


def their_answers(model: Any, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """Answers of transformers, greedy, until all have ended."""
    mask = torch.ones_like(prompts)
    found = model.generate(prompts, attention_mask=mask, max_new_tokens=length, do_sample=False)
    return found[:, prompts.shape[1] :]


def accuracy(tokenizer: Any, answers: torch.Tensor) -> float:
    texts = [tokenizer.decode(ids).split("<|im_end|>")[0].strip() for ids in answers]
    return float(np.mean([text == example["completion"] for text, example in zip(texts, examples()[1], strict=True)]))


def prompts_of(tokenizer: Any, asked: list[dict[str, Any]]) -> torch.Tensor:
    """The questions, up to where the assistant begins."""
    how = {"chat_template": BUILTIN_TEMPLATES["chatml"].text, "add_generation_prompt": True, "return_dict": True}
    chats = [[{"role": "user", "content": each["prompt"]}] for each in asked]
    return torch.tensor([tokenizer.apply_chat_template(each, **how)["input_ids"] for each in chats])


def check_answers(base: Any, tuned: Any, checkpoint: Path, tokenizer: Any) -> None:
    """transformers answers right, not so before, and as we do."""
    prompts = prompts_of(tokenizer, examples()[1])
    theirs = their_answers(tuned, prompts, 2)
    assert accuracy(tokenizer, their_answers(base, prompts, 2)) < 0.1
    assert accuracy(tokenizer, theirs) > 0.95
    module = load_module(checkpoint).eval()
    with torch.no_grad():
        ours = module.generate(prompts, 2, temperature=0.0)[:, prompts.shape[1] :]
        assert (module(prompts) - tuned(prompts).logits).abs().max() < 1e-4
    assert torch.equal(ours, theirs)


@pytest.mark.exhaustive
def test_held_out_answers_become_right_and_are_the_same_in_transformers(ranks: Any, made: Path):
    before, after = ranks(2, train, str(made), {"tp": 2, "micro_batch_size": 4})[0]
    assert before > 3.0
    assert after < 0.1
    tuned = made / "tuned.ckpt"
    assert main(["convert", "ckpt-to-hf", str(tuned), str(made / "tuned"), "--tokenizer", str(made / "base")]) == 0
    base, model = (AutoModelForCausalLM.from_pretrained(made / name).eval() for name in ("base", "tuned"))
    check_answers(base, model, tuned, AutoTokenizer.from_pretrained(made / "tuned"))


@pytest.mark.slow
def test_an_adapter_learns_them_too_and_answers_alike_merged_and_in_peft(ranks: Any, made: Path, tmp_path: Path):
    peft = pytest.importorskip("peft")
    adapter = LoRA(rank=16, alpha=32.0, targets=("all-linear", "embed_tokens", "lm_head"))
    before, after = ranks(2, train, str(made), {"tp": 2, "micro_batch_size": 4}, adapter)[0]
    assert before > 3.0
    assert after < 0.1
    tuned, merged = made / "tuned.ckpt", tmp_path / "merged.ckpt"
    tokenizer = AutoTokenizer.from_pretrained(made / "base")
    assert main(["convert", "ckpt-to-peft", str(tuned), str(tmp_path / "adapter")]) == 0
    assert main(["convert", "merge", str(tuned), str(merged)]) == 0
    assert main(["convert", "ckpt-to-hf", str(merged), str(tmp_path / "merged")]) == 0
    base, beside = (AutoModelForCausalLM.from_pretrained(made / "base").eval() for _ in range(2))
    check_answers(base, peft.PeftModel.from_pretrained(beside, tmp_path / "adapter").eval(), tuned, tokenizer)
    check_answers(base, AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), merged, tokenizer)
