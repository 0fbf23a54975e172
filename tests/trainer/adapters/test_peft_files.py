"""Adapters of every family through PEFT's files and into the weights: the same logits everywhere, one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("peft")
pytest.importorskip("transformers")

from lightning_megatron import ConfigError, GPTModule, LoRA, MegatronStrategy
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.lightning.pretrained.convert import hf_to_checkpoint
from lightning_megatron.lightning.pretrained.convert_adapter import merge_adapter, peft_to_checkpoint
from lightning_megatron.lightning.pretrained.peft import read_peft_settings
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.cli.convert import convert_command
from lightning_megatron.tools.evaluation.ranks import check_decoder
from tests.families import TINY, VOCABULARY, hf_model
from tests.lora import DORA, LLAMA, MIXTRAL, Case, Kind, make, peft_model

ATTENTION = Kind("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), dora=True)
KINDS = {
    "llama": LLAMA,
    "llama-dora": DORA,
    "mixtral": MIXTRAL,
    "gpt2": Kind("gpt2", ("all-linear",), dora=True),
    "deepseek": ATTENTION,
    "gemma2": Kind("gemma2", ("all-linear",), dora=True),
    "bloom": Kind("bloom", ("all-linear", "word_embeddings")),
    "qwen2": Kind("qwen2", ("q_proj", "v_proj", "embed_tokens", "lm_head"), dora=True),
    "qwen3": Kind("qwen3", ("all-linear",)),
    "gpt_oss": Kind("gpt_oss", ("all-linear",), dora=True),
}
OFTEN = {"llama-dora", "mixtral", "gpt2", "deepseek"}


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(path: Any, **options: Any) -> torch.Tensor:
    return GPTModule.load_from_checkpoint(path, **options).eval()(tokens())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.exhaustive) for name in KINDS]
)
def test_peft_computes_what_we_compute_and_what_the_merged_weights_compute(tmp_path, name):
    from transformers import AutoModelForCausalLM

    case = make(KINDS[name], tmp_path)
    with torch.no_grad():
        theirs = peft_model(case, case.peft).eval()(tokens()).logits
        without = AutoModelForCausalLM.from_pretrained(case.hf).eval()(tokens()).logits
    assert float((theirs - without).abs().max()) > 0.05
    torch.testing.assert_close(logits(case.first), theirs, atol=2e-5, rtol=1e-4)
    assert convert_command(["ckpt-to-peft", str(case.first), str(tmp_path / "again")]) == 0
    first, again = (tmp_path / each / "adapter_model.safetensors" for each in ("peft", "again"))
    assert first.read_bytes() == again.read_bytes()
    tied = TINY[KINDS[name].family].get("tie_word_embeddings", KINDS[name].family in ("bloom", "gpt2", "gemma2"))
    if tied and {"embed_tokens", "word_embeddings"} & set(KINDS[name].targets):
        with pytest.raises(ConfigError, match="embedding and output layer are one matrix in this model"):
            merge_adapter(case.first, tmp_path / "merged.ckpt")
        return
    assert convert_command(["merge", str(case.first), str(tmp_path / "merged.ckpt")]) == 0
    assert convert_command(["ckpt-to-hf", str(tmp_path / "merged.ckpt"), str(tmp_path / "whole")]) == 0
    torch.testing.assert_close(logits(tmp_path / "merged.ckpt"), theirs, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()(tokens()).logits
    torch.testing.assert_close(whole, theirs, atol=2e-5, rtol=1e-4)


def test_a_new_adapter_changes_nothing_and_has_pefts_spread(tmp_path):
    case = make(LLAMA, tmp_path)
    module = GPTModule.from_hf(case.hf, lora=replace(LLAMA.lora, dora=True)).eval()
    with torch.no_grad():
        found = module(tokens())
        with module.adapter_off():
            torch.testing.assert_close(found, module(tokens()))
    a = module.get_parameter("model.layers.0.mlp.fc1.lora.default.gate_proj.lora_A")
    assert float(a.abs().max()) <= 32**-0.5
    assert float(a.std()) == pytest.approx(32**-0.5 / 3**0.5, rel=0.15)


@pytest.mark.parametrize("kind", [DORA, MIXTRAL], ids=["dora", "experts"])
def test_the_owner_of_every_matrix_is_called_where_a_hook_waits_for_its_values(kind):
    """After a step parameters are gathered while the next forward runs, and hooks before calls wait for them."""
    from lightning_megatron import TransformerConfig
    from lightning_megatron.families import FAMILIES

    config = TransformerConfig(**FAMILIES[kind.family].config_from_hf(kind.config))
    module, called = GPTModule(config, lora=kind.lora), set()
    module.configure_model()
    owners = {name: part for name, part in module.named_modules() if list(part.parameters(recurse=False))}
    for name, part in owners.items():
        part.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    module.loss({"tokens": tokens(), "labels": tokens()})
    assert {name for name in owners if ".lora." in name} <= called


@pytest.mark.slow
def test_latents_are_decoded_with_their_adapter(tmp_path):
    """Decoding multiplies by the matrix of keys and values itself, past the layer's forward."""
    case = make(ATTENTION, tmp_path)
    module = GPTModule.load_from_checkpoint(case.first).eval()
    generated = module.generate(tokens(), 6, temperature=0.0)
    for place in range(10, 16):
        torch.testing.assert_close(module(generated[:, :place])[:, -1].argmax(-1), generated[:, place])


def test_a_file_with_other_tensors_is_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file

    case: Case = make(Kind("llama", ("q_proj",)), tmp_path)
    file = Path(case.peft) / "adapter_model.safetensors"
    held = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    held["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = held.pop(name)
    save_file(held, file)
    with pytest.raises(ConfigError, match=r"(?s)layers\.9.*: unknown.*layers\.0.*: missing"):
        peft_to_checkpoint(case.peft, tmp_path / "x.ckpt", base=case.hf)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model with an adapter in its own folder, as ``save_pretrained`` of both writes them."""
    case = make(Kind("llama", ("q_proj", "down_proj")), tmp_path_factory.mktemp("beside"))
    for file in case.peft.iterdir():
        (case.hf / file.name).write_bytes(file.read_bytes())
    return case


def further(held: dict[str, torch.Tensor]) -> None:
    held["base_model.model.lm_head.weight"] = torch.zeros(VOCABULARY, 32)  # of modules_to_save


def of_a_vector(held: dict[str, torch.Tensor]) -> None:
    held["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"] = torch.ones(32)


def of_a_bias(held: dict[str, torch.Tensor]) -> None:
    held["base_model.model.model.layers.1.self_attn.q_proj.lora_B.bias"] = torch.ones(32)


def of_another_layer(held: dict[str, torch.Tensor]) -> None:
    held["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 32)


def of_another_rank(held: dict[str, torch.Tensor]) -> None:
    held["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"] = torch.zeros(3, 32)


WRONG = {
    further: r"lm_head\.weight",
    of_a_vector: r"layers\.0\.self_attn\.q_proj\.lora_magnitude_vector",
    of_a_bias: r"layers\.1\.self_attn\.q_proj\.lora_B\.bias",
    of_another_layer: r"layers\.0\.mlp\.up_proj\.lora_A\.weight",
    of_another_rank: r"(?s)layers\.1\.self_attn\.q_proj\.lora_A\.weight.*3, 32",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_tensor_that_nothing_reads_is_refused_by_name_and_nothing_is_written(beside, tmp_path, change):
    from safetensors.torch import load_file, save_file

    shutil.copytree(beside.peft, tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_model.safetensors"
    held = load_file(file)
    change(held)
    save_file(held, file)
    with pytest.raises((ConfigError, CheckpointError), match=WRONG[change]):
        peft_to_checkpoint(tmp_path / "peft", tmp_path / "x.ckpt", base=beside.hf)
    assert [path.name for path in tmp_path.iterdir()] == ["peft"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_frozen_weights_are_those_of_the_base(beside, tmp_path, dtype):
    """PEFT writes them beside adapters of embeddings, in the dtype that the base was loaded in."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(beside.peft, tmp_path / "peft")
    file, whole = tmp_path / "peft" / "adapter_model.safetensors", load_file(beside.hf / "model.safetensors")
    copies = {
        f"base_model.model.{name}": whole[name].to(dtype) for name in ("lm_head.weight", "model.embed_tokens.weight")
    }
    save_file(load_file(file) | copies, file)
    peft_to_checkpoint(tmp_path / "peft", tmp_path / "a.ckpt", base=beside.hf)
    peft_to_checkpoint(beside.peft, tmp_path / "b.ckpt", base=beside.hf)
    assert torch.equal(logits(tmp_path / "a.ckpt"), logits(tmp_path / "b.ckpt"))


@pytest.mark.parametrize("begun", ["corda", "loftq", "lora_ga", "mica"])
def test_a_beginning_that_changes_the_base_or_is_unknown_is_refused_by_name(beside, tmp_path, begun):
    """CorDA, LoftQ and LoRA-GA replace base weights by what is left of them, which no file of the base has."""
    shutil.copytree(beside.peft, tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"init_lora_weights": begun, f"{begun}_config": {"x": 1}}
    file.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=f"init_lora_weights='{begun}': .*adapter_config.json: adapters here do not"):
        peft_to_checkpoint(tmp_path / "peft", tmp_path / "x.ckpt", base=beside.hf)
    assert [path.name for path in tmp_path.iterdir()] == ["peft"]


def test_an_adapter_that_began_with_eva_computes_what_peft_computes(beside, tmp_path):
    """EVA only chooses the first values of A: the base weights stay, and PEFT loads the file as any other."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shutil.copytree(beside.peft, tmp_path / "peft")
    shutil.copytree(beside.hf, tmp_path / "hf")
    (tmp_path / "hf" / "adapter_config.json").unlink()
    file = tmp_path / "peft" / "adapter_config.json"
    eva = {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}}
    file.write_text(json.dumps(json.loads(file.read_text()) | eva))
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        theirs = PeftModel.from_pretrained(base, tmp_path / "peft").eval()(tokens()).logits
    peft_to_checkpoint(tmp_path / "peft", tmp_path / "a.ckpt", base=tmp_path / "hf")
    torch.testing.assert_close(logits(tmp_path / "a.ckpt"), theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("begun", [True, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", "rslora"])
def test_an_adapter_computes_what_peft_computes_however_it_began_or_is_refused_by_name(tmp_path, begun):
    """PiSSA and OLoRA change the base weights whenever PEFT loads them."""
    peft, base = pytest.importorskip("peft"), hf_model(TINY["llama"])
    base.save_pretrained(tmp_path / "hf")
    options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    options |= {"use_rslora": True} if begun == "rslora" else {"init_lora_weights": begun}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data += torch.randn(param.shape, generator=torch.Generator().manual_seed(3)) * 0.05
    model.save_pretrained(tmp_path / "peft")
    if isinstance(begun, str) and begun.startswith(("pissa", "olora")):
        with pytest.raises(
            ConfigError, match=f"init_lora_weights='{begun}': .*adapter_config.json: adapters here do not"
        ):
            peft_to_checkpoint(tmp_path / "peft", tmp_path / "a.ckpt", base=tmp_path / "hf")
        return
    peft_to_checkpoint(tmp_path / "peft", tmp_path / "a.ckpt", base=tmp_path / "hf")
    torch.testing.assert_close(logits(tmp_path / "a.ckpt"), model.eval()(tokens()).logits.detach())


READERS: dict[str, Callable[[Path], object]] = {
    "from_hf": GPTModule.from_hf,
    "from_hf, adapted": lambda folder: GPTModule.from_hf(folder, lora=LLAMA.lora),
    "load_hf": lambda folder: GPTModule.from_hf(folder, weights=False).load_hf(folder),
    "load_weights": lambda folder: GPTModule.from_hf(folder, weights=False).load_weights(folder),
    "ckpt_path": lambda folder: quiet_trainer(MegatronStrategy(), max_steps=1).fit(
        GPTModule.from_hf(folder, weights=False),
        DataLoader([{"tokens": row, "labels": row} for row in tokens()]),
        ckpt_path=str(folder),
    ),
    "hf-to-ckpt": lambda folder: hf_to_checkpoint(folder, folder.with_name("whole.ckpt")),
    "evaluate": check_decoder,
}


@pytest.mark.parametrize("reader", READERS)
def test_an_adapter_beside_the_weights_of_a_model_is_refused_by_every_reader(beside, reader):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: transformers adds .*convert merge ADAPTER"):
        READERS[reader](beside.hf)
    assert not (beside.folder / "whole.ckpt").exists()


def test_the_commands_that_the_refusal_names_make_what_transformers_loads(beside, tmp_path):
    """Transformers loads a folder of both with the adapter; without the file it loads the weights alone."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(beside.hf).eval()(tokens()).logits
    adapter, whole = str(tmp_path / "a.ckpt"), str(tmp_path / "whole.ckpt")
    assert convert_command(["peft-to-ckpt", str(beside.hf), adapter, "--base", str(beside.hf)]) == 0
    torch.testing.assert_close(logits(adapter), theirs, atol=2e-5, rtol=1e-4)
    assert convert_command(["merge", adapter, whole]) == 0
    torch.testing.assert_close(logits(whole), theirs, atol=2e-5, rtol=1e-4)
    alone = shutil.copytree(beside.hf, tmp_path / "alone")
    (alone / "adapter_config.json").unlink()
    with torch.no_grad():
        without = AutoModelForCausalLM.from_pretrained(alone).eval()(tokens()).logits
        torch.testing.assert_close(GPTModule.from_hf(alone).eval()(tokens()), without, atol=2e-5, rtol=1e-4)
    assert float((theirs - without).abs().max()) > 0.01


@pytest.mark.parametrize("entry", ["kasa_config", "arrow_config", "use_bdlora", "of_tomorrow"])
def test_an_entry_that_is_not_read_is_refused_by_name(tmp_path, entry):
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "peft_version": "0.21", entry: {"rank": 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"{entry}={{'rank': 2}}: .*nothing here reads it, and it may change"):
        read_peft_settings(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {entry: None}))
    assert read_peft_settings(tmp_path).rank == 4


@pytest.mark.parametrize("way", ["ckpt-to-peft", "peft-to-ckpt", "merge", "merge into fp16"])
def test_values_that_the_dtype_cannot_hold_are_refused_by_name_and_nothing_is_left(way, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    case: Case = make(Kind("llama", ("q_proj",)), tmp_path)
    weights, adapter = case.hf / "model.safetensors", case.peft / "adapter_model.safetensors"
    dtype = torch.float16 if way == "merge into fp16" else torch.float32
    save_file({name: value.to(dtype) for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    save_file({name: value * 1e7 for name, value in load_file(adapter).items()}, adapter, {"format": "pt"})
    large = tmp_path / "large.ckpt"
    peft_to_checkpoint(case.peft, large, base=case.hf)
    before = sorted(tmp_path.iterdir())
    source = [case.peft, "--base", case.hf] if way == "peft-to-ckpt" else [large]
    words = [way.split()[0], *source, tmp_path / "out", *([] if " " in way else ["--dtype", "fp16"])]
    assert convert_command(list(map(str, words))) == 2
    error = capsys.readouterr().err
    names = [f"layers.{n}.attention.qkv" for n in range(2)] if "merge" in way else ["q_proj.lora_A", "q_proj.lora_B"]
    assert "float16 ends at 65504, and values are beyond it in" in error
    assert all(name in error for name in names)
    assert sorted(tmp_path.iterdir()) == before


def test_a_merge_into_a_wider_dtype_rounds_once(tmp_path):
    from safetensors.torch import load_file, save_file

    case: Case = make(Kind("llama", ("q_proj",)), tmp_path)
    weights = case.hf / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    peft_to_checkpoint(case.peft, tmp_path / "adapter.ckpt", base=case.hf)
    merge_adapter(tmp_path / "adapter.ckpt", tmp_path / "merged.ckpt", dtype=torch.float32)
    with torch.no_grad():
        theirs = peft_model(case, case.peft).float().merge_and_unload().eval()(tokens()).logits
    torch.testing.assert_close(logits(tmp_path / "merged.ckpt"), theirs, atol=2e-5, rtol=1e-4)


def test_a_note_says_what_peft_passes_over(tmp_path, capsys):
    case = make(Kind("qwen3_moe", ("gate_proj", "up_proj", "down_proj")), tmp_path)
    assert convert_command(["ckpt-to-peft", str(case.first), str(tmp_path / "again")]) == 0
    assert "PEFT takes down_proj, gate_proj, up_proj for layers of experts, and passes over" in capsys.readouterr().out


def test_rank_and_scale_of_rslora():
    assert LoRA(rank=16, alpha=8.0, rslora=True).scale == 2.0
    assert LoRA(rank=16, alpha=8.0).scale == 0.5
