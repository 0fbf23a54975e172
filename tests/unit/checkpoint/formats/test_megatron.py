"""Megatron's formats in the layouts and spellings that ``golden`` does not have."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_writer import write_legacy, write_torch_dist

from lightning_megatron import TransformerConfig
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.checkpoint.formats.megatron import config_from_arguments, is_megatron_directory, open_megatron
from lightning_megatron.checkpoint.formats.megatron.unpickle import StandIn, load_file
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.modules.load_module import load_module
from lightning_megatron.lightning.pretrained.convert import megatron_to_checkpoint
from lightning_megatron.models.gpt import GPTModel

SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 29}
SIZES |= {"max_position_embeddings": 8, "ffn_hidden_size": 24, "vocab_multiple": 4, "init_std": 0.3}
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "position_embedding": "rope"}
LLAMA |= {"add_bias_linear": False, "tie_embeddings": False, "num_query_groups": 2}
CONFIGS = {
    "gpt": TransformerConfig(**SIZES),
    "llama": TransformerConfig(**SIZES, **LLAMA),
    "mixtral": TransformerConfig(**SIZES, **LLAMA, num_experts=4),
}


def whole(kind: str) -> GPTModel:
    torch.manual_seed(3)
    model = GPTModel(CONFIGS[kind])
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim <= 2:
                param.add_(0.2 * torch.randn_like(param))
    return model


def tensors_of(model: GPTModel) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for name in ("embedding.word.weight", "head.weight"):
        if name in found:
            found[name] = found[name][: model.config.vocab_size]
    return found


def check(source: Path, target: Path, model: GPTModel) -> None:
    megatron_to_checkpoint(source, target, config=model.config, allow_pickle=True)
    module = load_module(target)
    for name, tensor in tensors_of(model).items():
        read = module.state_dict()[f"model.{name}"]
        assert torch.equal(read[: len(tensor)], tensor), name
    tokens = torch.arange(8)[None] * 3 % 29
    with torch.no_grad():
        torch.testing.assert_close(module(tokens), model.eval()(tokens)[..., :29], rtol=0, atol=0)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "single"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_torch_dist(tmp_path, kind, stacked, prefix):
    model = whole(kind)
    write_torch_dist(tmp_path / "release", tensors_of(model), model.config, stacked=stacked, prefix=prefix)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    check(tmp_path, tmp_path / "a.ckpt", model)


LEGACY = [
    ("gpt", {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "experts": "te"}),
    ("gpt", {"tp": 4, "pp": 2, "vpp": 2, "ep": 1, "experts": "te"}),
    ("llama", {"tp": 2, "pp": 4, "vpp": 1, "ep": 1, "experts": "sequential"}),
    ("llama", {"tp": 2, "pp": 1, "vpp": 1, "ep": 1, "experts": "te"}),
    *(
        ("mixtral", {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "experts": experts})
        for experts in ("sequential", "grouped", "te", "gaudi")
        for tp, pp, vpp, ep in ((2, 2, 2, 2), (2, 1, 1, 4))
    ),
]


@pytest.mark.parametrize(("kind", "layout"), LEGACY, ids=str)
def test_legacy_shards_are_merged(tmp_path, kind, layout):
    model = whole(kind)
    write_legacy(tmp_path / "iter_0000007", tensors_of(model), model.config, **layout)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert is_megatron_directory(tmp_path)
    check(tmp_path, tmp_path / "a.ckpt", model)


def test_what_is_missing_is_named(tmp_path):
    model = whole("mixtral")
    layout = {"tp": 2, "pp": 2, "vpp": 1, "ep": 2, "experts": "sequential"}
    write_legacy(tmp_path / "a", tensors_of(model), model.config, **layout)
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        open_megatron(tmp_path / "a")
    (tmp_path / "a" / "mp_rank_01_000_001" / "model_optim_rng.pt").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"mp_rank_01_000_001.*missing"):
        open_megatron(tmp_path / "a", allow_pickle=True)
    (tmp_path / "a" / "mp_rank_01_000_001").rmdir()
    with pytest.raises(CheckpointError, match=r"files of 1 ranks are missing: \(tp 1, pp 0, ep 1\)"):
        open_megatron(tmp_path / "a", allow_pickle=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(CheckpointError, match="iter_0000012, which is not there"):
        open_megatron(tmp_path)
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="'zarr'; torch_dist and torch can be read"):
        open_megatron(tmp_path / "zarr")
    dense = whole("llama")
    write_torch_dist(tmp_path / "dense", tensors_of(dense), dense.config, stacked=True, prefix="")
    with pytest.raises(ConfigError, match=r"Megatron tensors.*layernorm\.bias"):
        megatron_to_checkpoint(tmp_path / "dense", tmp_path / "x.ckpt", config=dense.config.replace(norm="layernorm"))
    wrong = model.config.replace(num_layers=8, hidden_size=64, vocab_size=4096)
    with pytest.raises(ConfigError) as raised:
        megatron_to_checkpoint(tmp_path / "dense", tmp_path / "x.ckpt", config=wrong)
    reasons = {problem.argument: problem.reason for problem in raised.value.problems}
    assert reasons.keys() == {"num_layers", "num_experts", "hidden_size", "vocab_size"}
    assert reasons["num_layers"] == f"the checkpoint has {dense.config.num_layers}"
    assert "rows, padding included" in reasons["vocab_size"]


RAN: list[str] = []


def run(word: str) -> None:
    RAN.append(word)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return run, ("ran",)


class EvilMethod:
    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, ("ran",)


class Scripted(torch.nn.Module):
    """Code of TorchScript, which torch runs when it loads an archive of that kind."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.ones(1)

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return self.x, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        self.x, self.training = state
        raise RuntimeError("scripted code ran")

    def forward(self) -> torch.Tensor:
        return self.x


@pytest.mark.parametrize("archive", [True, False])
def test_nothing_that_a_pickle_names_is_run(tmp_path, archive):
    torch.save({"args": Evil(), "x": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=archive)
    found = load_file(tmp_path / "a.pt", allow_pickle=True)
    assert isinstance(found["args"], StandIn)
    assert found["args"].given == ("ran",)
    assert torch.equal(found["x"], torch.ones(2))
    torch.save({"args": EvilMethod()}, tmp_path / "m.pt", _use_new_zipfile_serialization=archive)
    with (tmp_path / "b.pt").open("wb") as file:
        pickle.dump(Evil(), file)
    for name in ("m.pt", "b.pt"):
        with pytest.raises(CheckpointError):
            load_file(tmp_path / name, allow_pickle=True)
    assert RAN == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_no_code_of_torchscript_is_run(tmp_path):
    torch.jit.script(Scripted()).save(tmp_path / "a.pt")
    with pytest.raises(torch.jit.Error, match="scripted code ran"):
        torch.jit.load(tmp_path / "a.pt")
    for allow in (False, True):
        with pytest.raises(CheckpointError) as raised:
            load_file(tmp_path / "a.pt", allow_pickle=allow)
        assert "scripted code ran" not in str(raised.value)


def test_arguments_that_ours_cannot_reproduce_are_all_named():
    given = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "padded_vocab_size": 32}
    given |= {"max_position_embeddings": 8, "bias_gelu_fusion": True}
    found = TransformerConfig(**config_from_arguments(given))
    assert (found.activation, found.norm, found.vocab_size, found.tie_embeddings) == (
        "gelu_tanh",
        "layernorm",
        32,
        True,
    )
    with pytest.raises(ConfigError) as raised:
        config_from_arguments(given | {"qk_l2_norm": True, "rotary_percent": 0.5, "normalization": "Other"})
    assert {p.argument for p in raised.value.problems} == {"qk_l2_norm", "rotary_percent", "normalization"}
    others = {
        "rotary_seq_len_interpolation_factor": 4,
        "no_rope_freq": 4,
        "softmax_type": "off-by-one",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "qk_l2_norm": True,
        "moe_apply_probs_on_input": True,
        "layernorm_zero_centered_gamma": True,
        "moe_mlp_glu_interleave_size": 32,
        "label_smoothing": 0.1,
        "use_mup": True,
        "spec": ["my_specs", "my_layer"],
    }
    with pytest.raises(ConfigError) as raised:
        config_from_arguments(given | others)
    assert {p.argument for p in raised.value.problems} == others.keys()
    off = {"rotary_seq_len_interpolation_factor": 1, "no_rope_freq": None, "softmax_type": "vanilla", "spec": None}
    off |= {"glu_linear_offset": 0.0, "moe_router_topk_scaling_factor": None, "label_smoothing": 0.0}
    assert config_from_arguments(given | off) == config_from_arguments(given)
    experts = {"num_experts": 4, "moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "position"}
    dropping = config_from_arguments(given | experts | {"moe_pad_expert_input_to_capacity": True})
    kept = ("moe_capacity_factor", "moe_token_drop_policy", "moe_pad_to_capacity")
    assert [dropping[name] for name in kept] == [1.5, "position", True]
    # The parser of today is made of TransformerConfig, and has its names.
    assert config_from_arguments(given | {"layernorm_epsilon": 1e-6})["norm_epsilon"] == 1e-6
    rope = config_from_arguments(given | {"use_rope_scaling": True, "num_experts": 4, "moe_layer_freq": [0, 1]})
    assert rope["rope_scaling"] == {"factor": 8.0}
    assert rope["moe_layers"] == (1,)
