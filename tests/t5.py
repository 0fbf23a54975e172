"""Tiny random T5s, by transformers and by us."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.encoders.t5.config import T5Config
from lightning_megatron.encoders.t5.model import T5Inputs, T5Model
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.parameter_specs import parameter_shapes
from lightning_megatron.params import ShardRanks
from tests.foreign import to_native, weight_map
from tests.whole_weights import load_full

VOCABULARY = 61
_SIZES: dict[str, Any] = {"model_type": "t5", "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 6, "d_ff": 48}
_SIZES |= {"num_layers": 3, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
_SIZES |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
TINY: dict[str, dict[str, Any]] = {
    "1.0": _SIZES,
    "1.1": _SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2},
}
"""Contents of ``config.json``: tied with ReLU, and gated with an output layer of its own."""


def hf_model(entries: dict[str, Any], seed: int = 0) -> Any:
    """transformers' model; norms are random too. Its output layer is its own where the entries say so."""
    from transformers import T5Config as HFConfig
    from transformers import T5ForConditionalGeneration

    torch.manual_seed(seed)
    known = {name: value for name, value in entries.items() if name != "model_type"}
    model = T5ForConditionalGeneration._from_config(HFConfig(**known), attn_implementation="eager").eval()
    if entries.get("tie_word_embeddings") is False:  # transformers ties them until files say otherwise
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        model.all_tied_weights_keys.pop("lm_head.weight", None)
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, mean=float("norm" in name), std=0.2)
    return model


def hf_files(model: Any) -> dict[str, Tensor]:
    """Tensors under the names of files."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def our_config(entries: dict[str, Any], **changes: Any) -> T5Config:
    """Our configuration of a ``config.json``."""
    return T5Config(**FAMILIES["t5"].config_from_hf(entries) | {"vocab_multiple": 4} | changes)


def our_tensors(entries: dict[str, Any], files: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of files by our names."""
    config = our_config(entries)
    return to_native(weight_map(FAMILIES["t5"], config), files, parameter_shapes(config))


def our_model(entries: dict[str, Any], files: dict[str, Tensor]) -> T5Model:
    """Our model with the weights of files."""
    model = T5Model(our_config(entries)).eval()
    load_full(model, our_tensors(entries, files), ShardRanks())
    return model


def inputs_of(batch: int, length: int, decoder_length: int, *, padded: bool = False, seed: int = 1) -> T5Inputs:
    """Random tokens for both stacks; padded ones are of other lengths in each sample."""
    generator = torch.Generator().manual_seed(seed)
    tokens, decoder = (
        torch.randint(2, VOCABULARY, (batch, size), generator=generator) for size in (length, decoder_length)
    )
    if not padded:
        return T5Inputs(tokens, decoder)
    lengths = torch.arange(batch).unsqueeze(1) * 3 % length
    mask = (torch.arange(length) < length - lengths).long()
    return T5Inputs(tokens * mask, decoder, mask)


def labels_of(inputs: T5Inputs, seed: int = 2) -> Tensor:
    """Random labels, some of which have no loss."""
    generator = torch.Generator().manual_seed(seed)
    shape = inputs.decoder_tokens.shape
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    labels[:, 0] = 7
    return labels
