"""BERT's Hugging Face directories: in, through a layout, and out again, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_megatron import BertModule, ConfigError, GPTModule, MegatronModule
from lightning_megatron.encoders.bert.model import BertInputs
from lightning_megatron.errors import DataError
from lightning_megatron.lightning.pretrained.convert import checkpoint_to_hf, hf_to_checkpoint

VOCAB = 61


def write(folder: Path, kind: str = "BertForPreTraining") -> Any:
    import transformers

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=16, initializer_range=0.3)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(torch.randn_like(param), alpha=0.2)
    model.save_pretrained(folder)
    return model


def assert_same_files(one: Path, other: Path) -> None:
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["BertForPreTraining", "BertForMaskedLM"])
def test_a_directory_becomes_a_checkpoint_and_the_same_directory(tmp_path: Path, kind: str) -> None:
    import transformers

    model = write(tmp_path / "hf", kind)
    hf_to_checkpoint(tmp_path / "hf", tmp_path / "ckpt")
    checkpoint_to_hf(tmp_path / "ckpt", tmp_path / "back")
    assert_same_files(tmp_path / "hf", tmp_path / "back")
    again = getattr(transformers, kind).from_pretrained(tmp_path / "back").eval()
    tokens = torch.randint(VOCAB, (2, 9))
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    module = BertModule.from_hf(tmp_path / "hf")
    module.eval()
    torch.testing.assert_close(module(tokens).tokens, model(tokens)[0], rtol=1e-5, atol=1e-5)
    loaded = BertModule.load_from_checkpoint(tmp_path / "ckpt").eval()
    assert torch.equal(loaded(tokens).tokens, module(tokens).tokens)


def test_the_class_follows_from_the_directory(tmp_path: Path) -> None:
    write(tmp_path / "hf")
    assert type(MegatronModule.from_hf(tmp_path / "hf")) is BertModule
    with pytest.raises(ConfigError, match="BertConfig"):
        GPTModule.from_hf(tmp_path / "hf")
    with pytest.raises(ConfigError, match="takes"):
        BertModule("gpt2")
    with pytest.raises(ConfigError, match="takes"):
        GPTModule("bert-base")


def test_keys_of_other_programs_are_refused_with_ours() -> None:
    module = BertModule("bert-tiny", num_layers=1, hidden_size=16, vocab_size=VOCAB, max_position_embeddings=16)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    batch = {"tokens": tokens, "labels": tokens, "attention_mask": tokens, "token_type_ids": tokens, "more": tokens}
    with pytest.raises(ConfigError, match=r"3 problems(.|\n)*'padding_mask'(.|\n)*more(.|\n)*'token_types'"):
        module.loss(batch)
    with pytest.raises(DataError, match=r"token_types.*is 7"):
        module(tokens, token_types=tokens + 7)
    assert module(tokens).tokens.shape == (1, 4, VOCAB)
    assert isinstance(BertInputs(tokens).padding_mask, type(None))
