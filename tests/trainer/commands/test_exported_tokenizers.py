"""Exports write and end text as their models were tuned: held against AutoTokenizer of transformers on the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import chat, make_tokenizer, write_lines

from lightning_megatron import ChatDataModule, LlamaModule, LoRA, MegatronStrategy
from lightning_megatron.checkpoint.formats.hf.settings import tokenizer_files
from lightning_megatron.device import CPU
from lightning_megatron.lightning.pretrained.convert import checkpoint_to_hf, hf_to_checkpoint
from lightning_megatron.lightning.pretrained.convert_adapter import merge_adapter
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer
from tests.families import TINY, hf_model

transformers = pytest.importorskip("transformers")

ON_CPU = pytest.mark.skipif(kind_in_tests() is not CPU, reason="chats are packed, which is refused on a Gaudi")
OWN = "{% for m in messages %}Q: {{ m.content }}{% endfor %}"
GREETING = "{{ greeting }}{% for m in messages %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% endfor %}"
ASKED = [{"role": "user", "content": "Hi"}]


def make_base(folder: Path, template: str | None) -> Path:
    """A model of transformers whose texts end with ``</s>``, with a chat template or none."""
    model = hf_model(TINY["llama"] | {"vocab_size": 400, "eos_token_id": 2, "max_position_embeddings": 64})
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    make_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def tune(base: Path, out: Path, lora: LoRA | None, **options: Any) -> Path:
    file = write_lines(base / "chats.jsonl", [chat("Hi", "Ho")] * 3)
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1)
    data = ChatDataModule(file, base, 48, **options)
    trainer.fit(LlamaModule.from_hf(base, lora=lora), data)
    trainer.save_checkpoint(out)
    return out


@ON_CPU
@pytest.mark.parametrize("own", [OWN, None], ids=["own template", "none"])
@pytest.mark.parametrize(
    ("template", "options", "end", "right"),
    [
        ("chatml", {}, "<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (GREETING, {"template_variables": {"greeting": "Ho 'ü'\n"}}, "<|end|>", "Ho 'ü'\nHi<|end|>"),
        ("zephyr", {}, "</s>", "<|user|>\nHi</s>\n<|assistant|>\n"),
    ],
    ids=["chatml", "variables", "zephyr"],
)
@pytest.mark.parametrize("merged", [False, True])
def test_an_export_has_the_template_of_the_tuning_and_stops_where_its_answers_ended(
    tmp_path: Path, own: str | None, template: str, options: dict[str, Any], end: str, right: str, merged: bool
) -> None:
    base = make_base(tmp_path / "base", own)
    lora = LoRA(rank=2, targets="q_proj") if merged else None
    checkpoint = tune(base, tmp_path / "a.ckpt", lora, chat_template=template, **options)
    if merged:
        merge_adapter(checkpoint, checkpoint := tmp_path / "merged.ckpt")
    checkpoint_to_hf(checkpoint, tmp_path / "out", tokenizer=base)
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert made.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) == right
    for kind in (transformers.AutoConfig, transformers.GenerationConfig):
        ids = kind.from_pretrained(tmp_path / "out").eos_token_id
        assert set(ids if isinstance(ids, list) else [ids]) == {2, made.convert_tokens_to_ids(end)}


def test_a_model_that_was_not_tuned_on_chats_keeps_the_template_of_its_tokenizer(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", OWN)
    hf_to_checkpoint(base, tmp_path / "a.ckpt")
    checkpoint_to_hf(tmp_path / "a.ckpt", tmp_path / "out", tokenizer=base)
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert made.apply_chat_template(ASKED, tokenize=False) == "Q: Hi"
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2


@pytest.mark.parametrize("configured", [False, True])
def test_an_export_encodes_as_its_source_where_the_tokenizer_is_a_list_of_words(
    tmp_path: Path, configured: bool
) -> None:
    base = tmp_path / "base"
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=16, **shape)).save_pretrained(base)
    (base / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n")
    if configured:
        (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    hf_to_checkpoint(base, tmp_path / "a.ckpt")
    checkpoint_to_hf(tmp_path / "a.ckpt", tmp_path / "out", tokenizer=base)
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("hello world")["input_ids"]
    assert ids == [2, 5, 6, 3]


def test_templates_beside_the_default_one_come_along(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", OWN)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("T {{ messages[0].content }}")
    hf_to_checkpoint(base, tmp_path / "a.ckpt")
    checkpoint_to_hf(tmp_path / "a.ckpt", tmp_path / "out", tokenizer=base)
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert made.apply_chat_template(ASKED, chat_template="tool_use", tokenize=False) == "T Hi"
    assert made.apply_chat_template(ASKED, tokenize=False) == "Q: Hi"


@pytest.mark.parametrize("name", ["sentencepiece.bpe.model", "source.spm", "qwen.tiktoken", "tokenization_own.py"])
def test_files_of_every_kind_of_tokenizer_are_found(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "model.safetensors").touch()
    assert tokenizer_files(tmp_path) == {name: tmp_path / name}
