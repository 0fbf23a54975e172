"""Multi-token prediction against the formula of DeepSeek-V3's report, in plain torch around transformers' layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.multi_token import later
from lightning_megatron.params import ShardRanks
from tests.families import TINY, our_config, random_model, tokens_of, whole_weights
from tests.foreign import to_foreign, to_native, weight_map
from tests.whole_weights import load_full

transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file

FAMILY = FAMILIES["deepseek_v3"]
WEIGHT = 0.3


def ours(depths: int) -> GPTModel:
    return random_model(our_config(TINY["deepseek_v3"], mtp_num_layers=depths, mtp_loss_scaling_factor=WEIGHT))


def theirs(files: dict[str, Tensor], folder: Path, layers: int) -> Any:
    """transformers' model with the first layers of the files, modules for further tokens among them."""
    folder.mkdir()
    save_file({name: value.clone() for name, value in files.items()}, folder / "model.safetensors", {"format": "pt"})
    shape = TINY["deepseek_v3"] | {"num_hidden_layers": layers}
    transformers.AutoConfig.for_model(**shape).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_losses_and_gradients_are_those_of_the_formula(tmp_path: Path, depths: int, masked: bool) -> None:
    model = ours(depths)
    files = to_foreign(weight_map(FAMILY, model.config), whole_weights(model))
    layers, length = model.config.num_layers, 13
    trunk = theirs(files, tmp_path / "trunk", layers)
    blocks = theirs(files, tmp_path / "blocks", layers + depths).model.layers[layers:]
    text = tokens_of(2, length + 1)
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    labels[0, 5] = -100
    mask = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)).round() if masked else None

    model.train()
    loss = model(tokens, labels, mask)
    loss.backward()

    weights = torch.ones(labels.shape) if mask is None else mask
    seen = torch.full((length, length), float("-inf")).triu(1)[None, None]
    position_ids = torch.arange(length)[None]
    hidden = trunk.model(tokens).last_hidden_state
    main = mean(trunk.lm_head(hidden), labels, weights)
    further, projections = [], []
    for depth in range(1, depths + 1):
        of = f"model.layers.{layers + depth - 1}."
        # Position i has seen tokens up to i + depth, and predicts token i + depth + 1.
        embedded = trunk.model.embed_tokens(F.pad(tokens[:, depth:], (0, depth)))
        projections.append(files[f"{of}eh_proj.weight"].clone().requires_grad_())
        both = torch.cat((rms(embedded, files[f"{of}enorm.weight"]), rms(hidden, files[f"{of}hnorm.weight"])), -1)
        angles = trunk.model.rotary_emb(both, position_ids)
        out = blocks[depth - 1](
            both @ projections[-1].T, attention_mask=seen, position_ids=position_ids, position_embeddings=angles
        )
        hidden = rms(out[0] if isinstance(out, tuple) else out, files[f"{of}shared_head.norm.weight"])
        kept = length - depth
        further.append(mean(trunk.lm_head(hidden)[:, :kept], labels[:, depth:], weights[:, depth:]))
    total = main + WEIGHT / depths * torch.stack(further).sum()
    total.backward()

    assert float(loss.detach()) == pytest.approx(float(main.detach()), rel=1e-5)
    expected = [float(each.detach()) for each in further]
    assert [float(each) for each in model.mtp_losses] == pytest.approx(expected, rel=1e-5)
    assert model.embedding is not None
    assert model.head is not None
    pairs = {
        "embedding": (model.embedding.word.weight.grad, trunk.model.embed_tokens.weight.grad),
        "output layer": (model.head.weight.grad, trunk.lm_head.weight.grad),  # type: ignore[union-attr]
        "final norm": (model.head.norm.weight.grad, trunk.model.norm.weight.grad),
        "a layer": (model.layers["2"].attention.out.weight.grad, trunk.model.layers[2].self_attn.o_proj.weight.grad),
    }
    for depth in range(depths):
        module = model.mtp[depth]
        pairs[f"projection {depth}"] = module.projection.weight.grad, projections[depth].grad
        pairs[f"block {depth}"] = module.block.attention.out.weight.grad, blocks[depth].self_attn.o_proj.weight.grad
    for name, (found, wanted) in pairs.items():
        found = found[: wanted.shape[0]]
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4, name


def mean(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens that have a label, by weight."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    kept = weights.flatten() * (labels.flatten() != -100)
    return (losses * kept).sum() / kept.sum()


@torch.no_grad()
def test_outside_of_training_the_modules_are_not_run() -> None:
    model = ours(1).eval()
    plain = GPTModel(model.config.replace(mtp_num_layers=0)).eval()
    load_full(plain, whole_weights(model), ShardRanks())
    text = tokens_of(2, 9)
    for module in model.mtp:
        module.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    assert torch.equal(model(text), plain(text))
    assert torch.equal(model(text, text), plain(text, text))
    assert model.mtp_losses == ()


def test_files_hold_the_modules_behind_the_last_layer_and_their_copies_must_be_equal() -> None:
    model = ours(1)
    rules = weight_map(FAMILY, model.config)
    files = to_foreign(rules, whole_weights(model))
    assert {name.removeprefix("model.layers.4.") for name in files if name.startswith("model.layers.4.")} >= {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "self_attn.q_a_proj.weight",
        "mlp.experts.7.down_proj.weight",
        "mlp.gate.e_score_correction_bias",
    }
    # Published files repeat the shared tensors.
    copies = {"model.layers.4.embed_tokens.weight": "model.embed_tokens.weight"}
    copies["model.layers.4.shared_head.head.weight"] = "lm_head.weight"
    published = files | {name: files[of] for name, of in copies.items()}
    back = to_native(rules, published, weight_shapes(model.config))
    assert back.keys() == whole_weights(model).keys()
    assert all(torch.equal(back[name], value) for name, value in whole_weights(model).items())
    with pytest.raises(ConfigError, match=r"model.layers.4.embed_tokens.weight"):
        to_native(rules, published | {next(iter(copies)): files["lm_head.weight"]}, weight_shapes(model.config))


def test_tokens_some_places_later() -> None:
    x = torch.arange(6).view(2, 3)
    assert later(x, 1, 9).tolist() == [[1, 2, 9], [4, 5, 9]]
    assert later(x, 5, 9).tolist() == [[9] * 3] * 2


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral"])
def test_other_families_have_no_place_for_them(family: str) -> None:
    config: TransformerConfig = our_config(TINY[family], mtp_num_layers=1)
    with pytest.raises(ConfigError, match="mtp_num_layers"):
        FAMILIES[family].config_to_hf(config)
