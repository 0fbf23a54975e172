"""Checkpoints of adapters: what they hold, resumption in another layout, their base, several adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import (
    ConfigError,
    GPTModule,
    LlamaModule,
    LoRA,
    MegatronStrategy,
    TransformerConfig,
    load_module,
    read_checkpoint,
)
from lightning_megatron.checkpoint import CheckpointError
from lightning_megatron.lightning.pretrained.adapter_base import ADAPTER_OF, base_of
from lightning_megatron.lightning.pretrained.convert import checkpoint_to_hf
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from lightning_megatron.tools.cli.inference import report
from lightning_megatron.tools.cli.main import main as command_line
from lightning_megatron.tools.evaluation.ranks import check_decoder
from tests.families import TINY, VOCABULARY, hf_model
from tests.tiny import tiny_llama

pytest.importorskip("transformers")

ADAPTER = LoRA(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    hf_model(TINY["llama"]).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def samples(count: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(2))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def fit(module: Any, steps: int, path: Path | None = None, *, go_on: Path | None = None, **options: Any) -> list[float]:
    recorder = Recorder()
    strategy = MegatronStrategy(**options.pop("layout", {}), micro_batch_size=2)
    trainer = quiet_trainer(strategy, max_steps=steps, max_epochs=-1, logger=recorder, **options)
    trainer.fit(module, DataLoader(samples(4), batch_size=4), ckpt_path=go_on)  # type: ignore[arg-type]
    if path is not None:
        trainer.save_checkpoint(path)
    return recorder.series("train_loss")


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def trained(module: Any) -> dict[str, Tensor]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def first_adapter(hf: Path, **options: Any) -> LlamaModule:
    seed_everything(7, verbose=False)
    return LlamaModule.from_hf(hf, lora=ADAPTER, lr=1e-2, **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_only_the_adapter_has_gradients_main_values_and_moments_and_is_saved(hf, tmp_path, precision):
    module = first_adapter(hf)
    fit(module, 2, tmp_path / "a.ckpt", precision=precision)
    ours = trained(module)
    assert {name.split(".lora.")[1].split(".")[1] for name in ours} == {"q_proj", "down_proj"}
    assert all(param.grad is None for name, param in module.named_parameters() if name not in ours)
    optimizer = module.optimizers().optimizer
    held = [value for state in optimizer.state.values() for value in state.values() if getattr(value, "ndim", 0)]
    assert sum(value.numel() for value in held) < 2.2 * sum(param.numel() for param in ours.values())
    if precision == "bf16-mixed":
        assert {param.dtype for param in module.parameters()} == {torch.bfloat16}
    saved = read_checkpoint(tmp_path / "a.ckpt")
    assert saved["state_dict"].keys() == ours.keys()
    assert saved[ADAPTER_OF]["path"] == str(hf)
    assert len(saved[ADAPTER_OF]["hash"]) == 64


def resume(hf: Path, folder: Path) -> list[float]:
    return fit(first_adapter(hf), 6, go_on=folder / "half.ckpt", layout={"tp": 2, "pp": 2})


def logits_of(module, tokens):
    """Logits of a trained module, which stays on its device."""
    with torch.no_grad():
        return module.eval()(tokens.to(module.device)).cpu()


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout_and_a_module_is_loaded_without_a_trainer(ranks, hf, tmp_path):
    module = first_adapter(hf)
    saves = ModelCheckpoint(tmp_path, "half", every_n_train_steps=4, save_top_k=1)
    whole = fit(module, 6, tmp_path / "whole.ckpt", callbacks=[saves], enable_checkpointing=True)
    for losses in ranks(4, resume, hf, tmp_path):
        assert losses == pytest.approx(whole[4:], rel=1e-5)
    loaded = LlamaModule.load_from_checkpoint(tmp_path / "whole.ckpt")
    tokens = torch.stack([sample["tokens"] for sample in samples(4)])
    torch.testing.assert_close(loaded.eval()(tokens), logits_of(module, tokens))
    with loaded.adapter_off():
        torch.testing.assert_close(loaded(tokens), LlamaModule.from_hf(hf).eval()(tokens))


def test_an_adapter_of_other_weights_is_refused_by_name(hf, tmp_path):
    fit(first_adapter(hf), 1, tmp_path / "a.ckpt")
    hf_model(TINY["llama"], seed=1).save_pretrained(tmp_path / "other")
    other = LlamaModule.from_hf(tmp_path / "other", lora=ADAPTER)
    with pytest.raises(CheckpointError, match=rf"holds adapters of {hf} \(weights [0-9a-f]{{12}}\).*{tmp_path}/other"):
        fit(other, 2, go_on=tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="which differ"):
        LlamaModule.load_from_checkpoint(tmp_path / "a.ckpt", base=tmp_path / "other").configure_model()
    hf.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="and there is nothing there: give base=, the path of these weights"):
        LlamaModule.load_from_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"nothing at base='.*nowhere'"):
        LlamaModule.load_from_checkpoint(tmp_path / "a.ckpt", base=tmp_path / "nowhere")
    LlamaModule.load_from_checkpoint(tmp_path / "a.ckpt", base=tmp_path / "moved").configure_model()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"alpha": 64.0}, "lora.default.alpha=64.0: .* was trained with 8.0"),
        ({"rslora": True}, "lora.default.rslora=True: .* was trained with False"),
        ({"alpha": 32.0, "rank": 8}, r"2 problems(.|\n)*alpha=32.0(.|\n)*rank=8"),
    ],
    ids=str,
)
def test_an_adapter_goes_on_with_the_factor_that_it_was_trained_with(tmp_path, other, told):
    config = tiny_llama(vocab_size=VOCABULARY)
    fit(GPTModule(config, lora=ADAPTER, lr=1e-2), 1, tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match=told):
        fit(GPTModule(config, lora=replace(ADAPTER, **other)), 2, go_on=tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match=told):
        load_module(tmp_path / "a.ckpt", GPTModule, lora=replace(ADAPTER, **other))
    fit(GPTModule(config, lora=replace(ADAPTER, dropout=0.5)), 2, go_on=tmp_path / "a.ckpt")  # of training alone


def test_a_module_without_adapters_or_without_a_base_is_told(hf, tmp_path):
    fit(first_adapter(hf), 1, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="the module has none: give it lora=, or merge them first"):
        fit(LlamaModule.from_hf(hf), 2, go_on=tmp_path / "a.ckpt")
    module = GPTModule(LlamaModule.from_hf(hf, weights=False).config, lora=ADAPTER)
    with pytest.raises(CheckpointError, match=f"load the weights that they were trained on first, those of {hf}"):
        fit(module, 2, go_on=tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"convert merge.* puts one into its weights"):
        checkpoint_to_hf(tmp_path / "a.ckpt", tmp_path / "out")


@pytest.mark.parametrize("form", [{}, {"save_distributed_checkpoint": False}], ids=["directory", "file"])
def test_an_evaluation_of_adapters_alone_is_refused_before_a_process_starts(hf, tmp_path, form, monkeypatch, capfd):
    monkeypatch.setattr(report, "on_ranks", lambda *_: pytest.fail("processes are started"))
    fit(first_adapter(hf), 1, tmp_path / "a.ckpt", layout=form)
    with pytest.raises(CheckpointError, match=r"a\.ckpt holds adapters alone: merge them first with .*convert merge"):
        check_decoder(tmp_path / "a.ckpt")
    assert evaluated(tmp_path / "a.ckpt", tmp_path, "--tp", "2") == 2
    said = capfd.readouterr().err
    assert "a.ckpt holds adapters alone: merge them first with `lightning-megatron convert merge`" in said
    assert "Traceback" not in said
    assert check_decoder(hf) is not None


def evaluated(checkpoint: Path, folder: Path, *words: str) -> int:
    """Exit status of the command, on a file of token ids as texts."""
    texts = [" ".join(map(str, sample["tokens"].tolist())) for sample in samples(4)]
    (folder / "ids.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    line = [
        "evaluate",
        "--checkpoint",
        str(checkpoint),
        "--input",
        str(folder / "ids.jsonl"),
        "--device",
        "cpu",
        "--json",
    ]
    line += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY - 1)]
    return command_line([*line, *words])


@pytest.mark.slow
def test_a_merged_adapter_has_the_loss_of_pefts_merged_model(hf, tmp_path, capsys):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    module = first_adapter(hf)
    fit(module, 3, tmp_path / "a.ckpt")
    for words in (["ckpt-to-peft", "a.ckpt", "peft"], ["merge", "a.ckpt", "merged.ckpt"]):
        assert command_line(["convert", words[0], *(str(tmp_path / word) for word in words[1:])]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(hf)
    peft.PeftModel.from_pretrained(base, tmp_path / "peft").merge_and_unload().save_pretrained(tmp_path / "theirs")
    capsys.readouterr()
    found = []
    for path in ("merged.ckpt", "theirs", "hf"):
        assert evaluated(tmp_path / path, tmp_path) == 0
        out = capsys.readouterr().out
        found.append(json.loads(out[out.index("{") :])["files"])
    ours, theirs, without = ([number for each in file.values() for number in each.values()] for file in found)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours != pytest.approx(without, rel=1e-3)


@pytest.mark.parametrize("name", ["training_args.bin", "pytorch_model.bin", "consolidated.safetensors"])
def test_files_beside_the_weights_that_nothing_reads_do_not_make_them_others(hf, tmp_path, name):
    before = base_of(hf, ParallelMesh.single())
    (hf / name).write_bytes(b"other")
    assert base_of(hf, ParallelMesh.single()) == before
    weights = hf / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert base_of(hf, ParallelMesh.single()) != before


def test_without_files_of_the_frozen_weights_a_checkpoint_holds_them(tmp_path):
    config: TransformerConfig = tiny_llama(vocab_size=VOCABULARY)
    module = GPTModule(config, lora=ADAPTER, lr=1e-2)
    whole = fit(module, 1, tmp_path / "a.ckpt")
    assert ADAPTER_OF not in read_checkpoint(tmp_path / "a.ckpt")
    assert fit(GPTModule(config, lora=ADAPTER, lr=1e-2), 2, go_on=tmp_path / "a.ckpt") != whole
    tokens = torch.stack([sample["tokens"] for sample in samples(4)])
    loaded = GPTModule.load_from_checkpoint(tmp_path / "a.ckpt").eval()
    torch.testing.assert_close(loaded(tokens), logits_of(module, tokens))


def test_one_of_several_adapters_is_trained(hf, tmp_path):
    module = LlamaModule.from_hf(hf, lora={"first": ADAPTER, "second": LoRA(rank=2, targets="o_proj")}, lr=1e-2)
    module.use_adapter("second")
    fit(module, 1, tmp_path / "a.ckpt")
    names = trained(module)
    assert names
    assert all(".lora.second." in name for name in names)
    loaded = LlamaModule.load_from_checkpoint(tmp_path / "a.ckpt").eval()
    tokens = torch.stack([sample["tokens"] for sample in samples(4)])
    assert loaded.active_adapter == "second"
    without = LlamaModule.from_hf(hf).eval()(tokens)
    assert not torch.equal(loaded(tokens), without)
    torch.testing.assert_close(loaded(tokens), logits_of(module, tokens))
    loaded.use_adapter("first")
    torch.testing.assert_close(loaded(tokens), without)  # it has not been trained: its B is zero


@pytest.mark.parametrize("form", [{}, {"save_distributed_checkpoint": False}], ids=["directory", "file"])
def test_a_run_goes_on_with_the_adapter_that_was_trained(tmp_path, form):
    """Against a module whose code names the adapter again; one that names another is told."""

    def module(*chosen: str) -> GPTModule:
        seed_everything(7, verbose=False)
        lora = {"first": ADAPTER, "second": LoRA(rank=2, targets="o_proj")}
        made = GPTModule(tiny_llama(vocab_size=VOCABULARY), lora=lora, lr=1e-2)
        for name in chosen:
            made.use_adapter(name)
        return made

    path, how = tmp_path / "a.ckpt", {"layout": form}
    fit(module("second"), 2, path, **how)
    silent = module()
    assert fit(silent, 4, go_on=path, **how) == fit(module("second"), 4, go_on=path, **how)
    assert silent.active_adapter == "second"
    assert all(".lora.second." in name for name in trained(silent))
    with pytest.raises(ConfigError, match=r"use_adapter='first': .*a\.ckpt has the state of training 'second'"):
        fit(module("second", "first"), 4, go_on=path, **how)
    batches, other = DataLoader(samples(4), batch_size=4), module("first")  # type: ignore[arg-type]
    found = [quiet_trainer(MegatronStrategy()).validate(m, batches, path, verbose=False) for m in (module(), other)]
    assert found[0] != found[1]
    assert other.active_adapter == "first"


@pytest.mark.slow
@pytest.mark.parametrize(("hidden_size", "precision"), [(640, "32-true"), (1280, "bf16-mixed")])
@pytest.mark.parametrize("dora", [False, True])
def test_files_of_an_adapter_are_little_more_than_its_bytes(tmp_path, hidden_size, precision, dora):
    from lightning_megatron.lightning.pretrained.convert_adapter import checkpoint_to_peft

    sizes = {"hidden_size": hidden_size, "intermediate_size": hidden_size * 11 // 4, "num_hidden_layers": 4}
    hf_model(TINY["llama"] | sizes).save_pretrained(tmp_path / "hf")
    module = LlamaModule.from_hf(tmp_path / "hf", lora=LoRA(rank=16, dora=dora))
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1, precision=precision)
    trainer.fit(module, DataLoader(samples(4), batch_size=4))  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    checkpoint_to_peft(tmp_path / "a.ckpt", tmp_path / "peft")
    own = sum(param.nbytes for param in trained(module).values())
    assert size_of(tmp_path / "peft") <= 1.05 * own
    assert size_of(tmp_path / "a.ckpt") <= 1.05 * own, size_of(tmp_path / "a.ckpt") / own
