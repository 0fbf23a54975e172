"""Files such as Megatron's GPT-345M, from before megatron-core: logits are those of transformers' GPT-2."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import TransformerConfig
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.formats.megatron import open_megatron
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.modules.load_module import load_module
from lightning_megatron.lightning.pretrained.convert import megatron_to_checkpoint
from lightning_megatron.tools.cli.convert import convert_command

transformers = pytest.importorskip("transformers")

HEADS, HIDDEN, LAYERS, VOCAB, PADDED, POSITIONS = 4, 24, 4, 29, 32, 16
CONFIG = TransformerConfig(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    vocab_size=VOCAB,
    vocab_multiple=8,
    max_position_embeddings=POSITIONS,
    activation="gelu_tanh",
)
ARGUMENTS = Namespace(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    padded_vocab_size=PADDED,
    max_position_embeddings=POSITIONS,
    bias_gelu_fusion=True,
    apply_query_key_layer_scaling=True,
)


@pytest.fixture(scope="module")
def gpt2() -> Any:
    torch.manual_seed(5)
    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": POSITIONS}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.3 * torch.randn_like(param))
    return model


def in_order(kinds: Tensor, version: float, tp: int, rank: int) -> Tensor:
    """Rows ``[q; k; v]`` as a rank of this version stores them."""
    by_head = kinds.unflatten(0, (3, HEADS, -1)).chunk(tp, dim=1)[rank]  # [3, N/tp, D, ...]
    if version == 0:
        return by_head.flatten(0, 2)
    if version == 1:
        return by_head.movedim(0, 2).flatten(0, 2)
    return by_head.transpose(0, 1).flatten(0, 2)


def layer_of(model: Any, number: int, version: float, tp: int, rank: int) -> dict[str, Tensor]:
    """A layer as ``transformer.layers.N`` held it; transformers keeps matrices as ``[in, out]``."""
    block = model.transformer.h[number]

    def columns(x: Tensor) -> Tensor:
        return x.t().chunk(tp, 1)[rank]

    def rows(x: Tensor) -> Tensor:
        return (x.t() if x.ndim == 2 else x).chunk(tp)[rank]

    return {
        "input_layernorm.weight": block.ln_1.weight,
        "input_layernorm.bias": block.ln_1.bias,
        "attention.query_key_value.weight": in_order(block.attn.c_attn.weight.t(), version, tp, rank),
        "attention.query_key_value.bias": in_order(block.attn.c_attn.bias, version, tp, rank),
        "attention.dense.weight": columns(block.attn.c_proj.weight),
        "attention.dense.bias": block.attn.c_proj.bias,
        "post_attention_layernorm.weight": block.ln_2.weight,
        "post_attention_layernorm.bias": block.ln_2.bias,
        "mlp.dense_h_to_4h.weight": rows(block.mlp.c_fc.weight),
        "mlp.dense_h_to_4h.bias": rows(block.mlp.c_fc.bias),
        "mlp.dense_4h_to_h.weight": columns(block.mlp.c_proj.weight),
        "mlp.dense_4h_to_h.bias": block.mlp.c_proj.bias,
    }


def write(folder: Path, model: Any, version: float | None, *, tp: int = 1, pp: int = 1, newer: bool = False) -> None:
    """Files as they were written then.

    Args:
        newer: True for the last spelling before megatron-core: ``encoder`` with ``self_attention``.
    """
    vocabulary = torch.cat([model.transformer.wte.weight, torch.full((PADDED - VOCAB, HIDDEN), 7.0)])
    per_stage = LAYERS // pp
    for t in range(tp):
        for p in range(pp):
            stack: dict[str, Tensor] = {}
            for local in range(per_stage):
                layer = layer_of(model, p * per_stage + local, version or 0, tp, t)
                stack |= {f"layers.{local}.{name}": x for name, x in layer.items()}
            if version == 0:
                stack["layers.0.attention.masked_bias"] = torch.tensor(-1e4)
            embedding = {"word_embeddings": {"weight": vocabulary.chunk(tp)[t]}}
            language_model: dict[str, Any] = {}
            whole: dict[str, Any] = {"language_model": language_model}
            if p == 0:
                position = {"position_embeddings": {"weight": model.transformer.wpe.weight}}
                language_model["embedding"] = {**embedding, **position}
            if p == pp - 1:
                norm = model.transformer.ln_f
                stack |= {"final_layernorm.weight": norm.weight, "final_layernorm.bias": norm.bias}
                if pp > 1:
                    whole["word_embeddings_for_head"] = embedding["word_embeddings"]
            if newer:
                stack = {name.replace(".attention.", ".self_attention."): x for name, x in stack.items()}
            language_model["encoder" if newer else "transformer"] = {name: x.clone() for name, x in stack.items()}
            content = {"model": whole, "iteration": 7, "optimizer": {"state": {}}}
            if version is not None:
                content["checkpoint_version"] = version
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            (folder / name).mkdir(parents=True)
            torch.save(content, folder / name / "model_optim_rng.pt", _use_new_zipfile_serialization=newer)


def assert_logits_agree(checkpoint: Path, model: Any) -> None:
    tokens = torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = model(tokens).logits
        found = load_module(checkpoint)(tokens)
    assert right.std() > 1, "a wrong row would show"
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("version", "layout"),
    [
        (None, {}),
        (0, {}),
        (0, {"tp": 2, "pp": 2}),
        (1.0, {}),
        (1.0, {"tp": 4}),
        (2.0, {"tp": 2}),
        (3.0, {"tp": 2, "pp": 2, "newer": True}),
        (3.0, {"newer": True}),
    ],
    ids=str,
)
def test_logits_are_those_of_gpt2(tmp_path, gpt2, version, layout):
    source = tmp_path / "megatron"
    write(source / "release", gpt2, version, **layout)
    (source / "latest_checkpointed_iteration.txt").write_text("release")
    megatron_to_checkpoint(source, tmp_path / "a.ckpt", config=CONFIG)
    assert_logits_agree(tmp_path / "a.ckpt", gpt2)


def test_a_file_without_its_command_line_needs_no_pickle(tmp_path, gpt2, capsys):
    write(tmp_path / "release", gpt2, 0)
    (tmp_path / "gpt.json").write_text(
        f'{{"num_layers": {LAYERS}, "hidden_size": {HIDDEN}, "num_attention_heads": {HEADS}, "vocab_size": {VOCAB},'
        f' "max_position_embeddings": {POSITIONS}, "activation": "gelu_tanh"}}'
    )
    words = ["megatron-to-ckpt", str(tmp_path / "release"), str(tmp_path / "a.ckpt")]
    assert convert_command(words) == 2
    assert "name a preset or a file" in capsys.readouterr().err
    assert convert_command([*words, "--config", str(tmp_path / "gpt.json")]) == 0
    assert_logits_agree(tmp_path / "a.ckpt", gpt2)


def with_content(folder: Path, **changes: Any) -> None:
    file = folder / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({**torch.load(file, weights_only=False), **changes}, file)


def test_a_command_line_is_read_where_it_says_enough(tmp_path, gpt2):
    write(tmp_path / "a", gpt2, 2.0)
    with_content(tmp_path / "a", args=ARGUMENTS)
    megatron_to_checkpoint(tmp_path / "a", tmp_path / "a.ckpt", allow_pickle=True)
    module = load_module(tmp_path / "a.ckpt")
    assert module.config.vocab_size == PADDED, "the files do not say how much of it is padding"
    assert module.config.activation == "gelu_tanh"
    older = Namespace(**{name: value for name, value in vars(ARGUMENTS).items() if name != "bias_gelu_fusion"})
    with_content(tmp_path / "a", args=older)
    with pytest.raises(ConfigError, match="does not say which GELU"):
        megatron_to_checkpoint(tmp_path / "a", tmp_path / "b.ckpt", allow_pickle=True)


def test_orders_are_never_guessed(tmp_path, gpt2):
    write(tmp_path / "a", gpt2, 1.0)
    for version in (0.5, -1, "2", True, float("nan")):
        with_content(tmp_path / "a", checkpoint_version=version)
        with pytest.raises(CheckpointError, match=r"checkpoint_version is .*; Megatron's are 0, 1, and 2 or more"):
            open_megatron(tmp_path / "a")
    with_content(tmp_path / "a", checkpoint_version=1)
    with pytest.raises(ConfigError, match=r"num_query_groups=2: .*keys and values of its own; nearest valid: 4"):
        megatron_to_checkpoint(tmp_path / "a", tmp_path / "a.ckpt", config=CONFIG.replace(num_query_groups=2))


def test_other_models_of_that_time_are_refused_by_name(tmp_path, gpt2):
    write(tmp_path / "a", gpt2, 2.0)
    content = torch.load(tmp_path / "a" / "mp_rank_00" / "model_optim_rng.pt", weights_only=True)["model"]
    content["language_model"]["pooler"] = {"dense": {"weight": torch.zeros(HIDDEN, HIDDEN)}}
    with_content(tmp_path / "a", model=content)
    with pytest.raises(ConfigError, match=r"pooler\.dense\.weight.*unknown"):
        megatron_to_checkpoint(tmp_path / "a", tmp_path / "a.ckpt", config=CONFIG)
