"""Hugging Face directories as a user meets them: into and out of every layout, and what they compute there."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from parity import hf_model
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, GPTModule, LlamaModule, MegatronStrategy, MixtralModule, load_module
from lightning_megatron.checkpoint import CheckpointError, verify
from lightning_megatron.checkpoint.formats.hf.settings import with_settings
from lightning_megatron.lightning.pretrained.hugging_face import hf_config
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from lightning_megatron.tools.cli.main import main

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

BOUND = 1e-5
FAMILIES = ("llama", "llama-tied", "gpt2", "mixtral")
MODULES = {"llama": LlamaModule, "llama-tied": LlamaModule, "gpt2": GPTModule, "mixtral": MixtralModule}
LAYOUTS = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {}],
    4: [{"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 2}],
}
TOKENS = torch.randint(131, (4, 12), generator=torch.Generator().manual_seed(3))


@cache
def reference(family: str) -> Any:
    if family != "mixtral":
        return hf_model(family.partition("-")[0], tied=family != "llama").eval()
    torch.manual_seed(17)
    sizes = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **heads, max_position_embeddings=64, initializer_range=0.1)
    return transformers.MixtralForCausalLM(config).eval()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory a family, in files of at most 30 KB."""
    home = tmp_path_factory.mktemp("hf")
    for family in FAMILIES:
        reference(family).save_pretrained(home / family, max_shard_size="30KB")
        assert len(list((home / family).glob("*.safetensors"))) > 2
        beside_the_model(home / family)
    return home


def beside_the_model(path: Path) -> None:
    """Special tokens, generation settings and a tokenizer, none of them transformers' defaults."""
    config = json.loads((path / "config.json").read_text())
    ids = {"bos_token_id": 5, "eos_token_id": [7, 130], "pad_token_id": 9}
    (path / "config.json").write_text(json.dumps(config | ids | {"use_cache": False}))
    (path / "generation_config.json").write_text(json.dumps(ids | {"temperature": 0.3, "do_sample": True}))
    (path / "tokenizer.json").write_text('{"model": {}}')
    (path / "chat_template.jinja").write_text("{{ messages }}")


def settings_of(path: Path) -> dict[str, Any]:
    """Settings that transformers reads from a directory; sizes that are null there are filled in."""
    found = transformers.AutoConfig.from_pretrained(path).to_dict()
    found |= {"n_inner": found.get("n_inner") or 128, "head_dim": found.get("head_dim") or 4}
    generation = transformers.GenerationConfig.from_pretrained(path).to_dict()
    return {name: value for name, value in found.items() if name != "_name_or_path"} | {"generation": generation}


def samples() -> DataLoader[Any]:
    labels = TOKENS.roll(-1, dims=1)
    labels[:, -1] = -100
    return DataLoader([{"tokens": t, "labels": y} for t, y in zip(TOKENS, labels, strict=True)], batch_size=4)  # type: ignore[arg-type]


def trainer_of(layout: dict[str, Any], **options: Any) -> Any:
    dp = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    dp //= layout.get("tp", 1) * layout.get("pp", 1)
    strategy = MegatronStrategy(**layout, micro_batch_size=2)
    return quiet_trainer(strategy, use_distributed_sampler=False, **options), dp


def module_of(path: Path, **options: Any) -> GPTModule:
    # tp=4 pads the vocabulary of 131 by 13 rows, unevenly.
    return MODULES[path.name].from_hf(path, **{"weights": False, "vocab_multiple": 4} | options)


def predictions(folder: Path, layouts: list[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    found = []
    for layout in layouts:
        for family in FAMILIES:
            trainer, _ = trainer_of(layout)
            rows = DataLoader(TOKENS, batch_size=4)  # type: ignore[arg-type]
            (logits,) = trainer.predict(module_of(folder / family), rows, ckpt_path=folder / family)
            found.append((family, logits))
            trainer, _ = trainer_of(layout)
            (logits,) = trainer.predict(module_of(folder / family, weights=True), rows)
            found.append((family, logits))
    return found


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.slow if size > 2 else ()) for size in LAYOUTS])
def test_logits_equal_transformers_in_every_layout(
    ranks: Callable[..., list[Any]], folder: Path, size: int, record_property: Any
) -> None:
    worst = 0.0
    for found in ranks(size, predictions, folder, LAYOUTS[size]):
        assert len(found) == len(LAYOUTS[size]) * len(FAMILIES) * 2
        for family, logits in found:
            expected = logits_of(reference(family))
            worst = max(worst, float((logits - expected).abs().max() / expected.abs().max()))
    record_property("worst_relative_deviation", worst)
    print(f"{size} ranks: worst deviation of a logit {worst:.1e}")
    assert worst < BOUND


def first_losses(folder: Path, layouts: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    found = []
    for layout in layouts:
        for family in FAMILIES:
            seed_everything(1, verbose=False)
            recorder = Recorder()
            trainer, _ = trainer_of(layout, max_steps=2, logger=recorder)
            trainer.fit(
                module_of(folder / family, lr=1e-3, attention_dropout=0.0), samples(), ckpt_path=folder / family
            )
            found.append((family, recorder.series("train_loss")[0], trainer.global_step))
    return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fit_begins_with_the_loss_of_transformers(ranks: Callable[..., list[Any]], folder: Path, size: int) -> None:
    for found in ranks(size, first_losses, folder, LAYOUTS[size]):
        for family, loss, steps in found:
            with torch.no_grad():
                expected = float(reference(family)(input_ids=TOKENS, labels=TOKENS).loss)
            assert loss == pytest.approx(expected, rel=BOUND)
            assert steps == 2


def weights_after_steps_of_nothing(folder: Path, layout: dict[str, Any], late: bool) -> dict[str, Tensor]:
    """Steps with a learning rate of 0: what main parameters hold goes back into the model."""

    class Late(LlamaModule):
        def on_fit_start(self) -> None:
            self.load_hf(folder / "llama")

    module = Late.from_hf(folder / "llama", weights=False, lr=0.0, weight_decay=0.0, vocab_multiple=4)
    trainer, _ = trainer_of(layout, max_steps=2, precision="bf16-mixed")
    if late:
        trainer.fit(module, samples())
    else:
        trainer.fit(module_of(folder / "llama", lr=0.0, weight_decay=0.0), samples(), ckpt_path=folder / "llama")
    assert trainer.model is not None
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "norm" in name or "qkv" in name}


@pytest.mark.parametrize("late", [False, True])
def test_main_parameters_are_those_that_were_loaded(ranks: Callable[..., list[Any]], folder: Path, late: bool) -> None:
    expected = module_of(folder / "llama", weights=True)
    expected(TOKENS)  # builds it
    whole = dict(expected.named_parameters())
    for layout in ({}, {"pp": 2}):
        for found in ranks(2, weights_after_steps_of_nothing, folder, layout, late):
            assert found
            for name, param in found.items():
                assert torch.equal(param.cpu(), whole[name].to(param.dtype)), name


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_equal_and_transformers_loads_it(folder: Path, tmp_path: Path, family: str) -> None:
    checkpoint, back = tmp_path / "a.ckpt", tmp_path / "back"
    assert main(["convert", "hf-to-ckpt", str(folder / family), str(checkpoint)]) == 0
    assert verify(checkpoint) == []
    torch.testing.assert_close(load_module(checkpoint)(TOKENS), logits_of(reference(family)), rtol=BOUND, atol=BOUND)
    assert main(["convert", "ckpt-to-hf", str(checkpoint), str(back), "--max-shard-size", "30KB"]) == 0
    ours, theirs = tensors_of(back), tensors_of(folder / family)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(list(back.glob("*.safetensors"))) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert settings_of(back) == settings_of(folder / family)
    assert type(loaded) is type(reference(family))
    assert torch.equal(logits_of(loaded), logits_of(reference(family)))


def fit_imported(folder: Path, checkpoint: Path, layout: dict[str, Any]) -> float:
    recorder = Recorder()
    trainer, _ = trainer_of(layout, max_steps=1, logger=recorder)
    trainer.fit(module_of(folder / "llama"), samples(), ckpt_path=checkpoint)
    return recorder.series("train_loss")[0]


def test_a_converted_checkpoint_begins_a_run(ranks: Callable[..., list[Any]], folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.ckpt"
    assert main(["convert", "hf-to-ckpt", str(folder / "llama"), str(checkpoint)]) == 0
    with torch.no_grad():
        expected = float(reference("llama")(input_ids=TOKENS, labels=TOKENS).loss)
    for layout in ({"tp": 2}, {"pp": 2}):
        assert ranks(2, fit_imported, folder, checkpoint, layout) == [pytest.approx(expected, rel=BOUND)] * 2


def train_and_save(folder: Path, family: str, layout: dict[str, Any], directory: Path) -> None:
    saver = ModelCheckpoint(directory, save_last=True)
    trainer, _ = trainer_of(layout, max_steps=2, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module_of(folder / family, lr=1e-2, weights=True), samples())
    # A resumed run need not know where the run began.
    module = MODULES[family](hf_config(folder / family), lr=1e-2, vocab_multiple=4)
    saver = ModelCheckpoint(directory / "longer", save_last=True)
    trainer, _ = trainer_of(layout, max_steps=3, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, samples(), ckpt_path=directory / "last.ckpt")


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), *FAMILIES[1:]])
def test_what_was_trained_in_a_layout_loads_in_transformers(
    ranks: Callable[..., list[Any]], folder: Path, tmp_path: Path, family: str
) -> None:
    ranks(2, train_and_save, folder, family, {"pp": 2} if family == "mixtral" else {"tp": 2}, tmp_path)
    last, out = tmp_path / "longer" / "last.ckpt", tmp_path / "out"
    assert main(["convert", "ckpt-to-hf", str(last), str(out), "--tokenizer", str(folder / family)]) == 0
    assert settings_of(out) == settings_of(folder / family)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_text() == (folder / family / name).read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.generation_config.eos_token_id == [7, 130]
    expected = load_module(last)(TOKENS)
    assert (expected - logits_of(reference(family))).abs().max() > 1e-2, "training has moved it"
    torch.testing.assert_close(logits_of(loaded), expected, rtol=BOUND, atol=BOUND)


def test_export_in_another_dtype(folder: Path, tmp_path: Path) -> None:
    checkpoint, out = str(tmp_path / "a.ckpt"), tmp_path / "out"
    assert main(["convert", "hf-to-ckpt", str(folder / "gpt2"), checkpoint, "--dtype", "bf16"]) == 0
    assert main(["convert", "ckpt-to-hf", checkpoint, str(out), "--dtype", "fp16"]) == 0
    assert transformers.AutoConfig.from_pretrained(out).dtype == torch.float16
    theirs = tensors_of(folder / "gpt2")
    assert all(torch.equal(tensor, theirs[name].bfloat16().half()) for name, tensor in tensors_of(out).items())


def test_differences_of_configuration_are_all_named_before_anything_starts(folder: Path) -> None:
    path = folder / "llama"
    with pytest.raises(ConfigError) as error:
        module_of(path, weights=True, num_layers=3, rope_theta=5e5)
    assert "num_layers=3" in str(error.value)
    assert "nearest valid: 2" in str(error.value)
    assert "rope_theta=500000.0" in str(error.value)
    module_of(path, weights=True, hidden_dropout=0.1, max_position_embeddings=1024)  # of training, or without weights
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        module_of(folder / "gpt2", weights=True, max_position_embeddings=8)


def test_a_wrong_directory_is_known_before_a_process_is_spawned(folder: Path) -> None:
    strategy = quiet_trainer(MegatronStrategy()).strategy
    assert isinstance(strategy, MegatronStrategy)
    strategy.check(module_of(folder / "llama"), folder / "llama")
    with pytest.raises(ConfigError, match=r"norm='rmsnorm'.*nearest valid: layernorm"):
        strategy.check(module_of(folder / "llama"), str(folder / "gpt2"))


def test_a_directory_that_fits_no_module_is_refused(folder: Path) -> None:
    trainer, _ = trainer_of({})
    other = LlamaModule("llama-tiny", num_layers=2)
    with pytest.raises((ConfigError, CheckpointError), match="hidden_size"):
        trainer.validate(other, samples(), ckpt_path=folder / "llama", verbose=False)


def test_the_command_tells_faults_without_a_traceback(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "hf-to-ckpt", str(tmp_path), str(tmp_path / "a.ckpt")]) == 2
    assert "no Hugging Face model: it has no config.json" in capsys.readouterr().err
    assert main(["convert", "hf-to-ckpt", str(folder / "llama"), str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["convert", "ckpt-to-hf", str(folder / "llama"), str(tmp_path / "out")]) == 2
    assert "looks like a Hugging Face model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_wrote_and_what_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that began elsewhere knows no special tokens, and transformers' defaults are no guess."""
    from_hf, from_scratch = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    assert main(["convert", "hf-to-ckpt", str(folder / "llama"), str(from_hf)]) == 0
    module = LlamaModule(hf_config(folder / "llama"))
    module.configure_model()
    quiet_trainer(MegatronStrategy(), max_steps=0).fit(module, samples())
    assert module.trainer is not None
    module.trainer.save_checkpoint(from_scratch)
    known = "config.json (bos_token_id=5, eos_token_id=[7, 130], pad_token_id=9), generation_config.json"
    copies = " (--tokenizer HF_DIR copies one)"
    tokenizer = ["--tokenizer", str(folder / "llama")]
    for number, (checkpoint, options, text) in enumerate(
        [
            (from_hf, [], f"{known}; no tokenizer{copies}"),
            (from_hf, tokenizer, f"{known}, tokenizer"),
            (from_scratch, tokenizer, f"{known}, tokenizer"),
            (from_scratch, [], f"tokens: none are known); no generation_config.json, no tokenizer{copies}"),
        ]
    ):
        out = tmp_path / str(number)
        capsys.readouterr()
        assert main(["convert", "ckpt-to-hf", str(checkpoint), str(out), *options]) == 0
        assert capsys.readouterr().out.strip().endswith(text)
        assert number > 2 or settings_of(out) == settings_of(folder / "llama")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "3").eos_token_id is None
    assert main(["convert", "ckpt-to-hf", str(from_hf), str(tmp_path / "x"), "--tokenizer", str(tmp_path)]) == 2
    assert "holds no tokenizer: none of tokenizer.json" in capsys.readouterr().err


def test_ids_of_another_vocabulary_are_not_carried_over() -> None:
    source = {"config": {"model_type": "llama", "eos_token_id": [3, 50], "pad_token_id": 9, "use_cache": False}}
    written = {"model_type": "llama", "vocab_size": 20, "eos_token_id": None, "rope_theta": 1.0}
    assert with_settings(written, source) == {**written, "pad_token_id": 9, "use_cache": False}
    other = {**written, "model_type": "gpt2"}
    assert with_settings(other, source) == {**other, "pad_token_id": 9}


class Announces:
    """Class beside a module of ours that overrides what builds the model."""

    def configure_model(self) -> None:
        super().configure_model()  # type: ignore[misc]


class MixedIn(Announces, LlamaModule):
    """Module whose outermost ``configure_model`` is that of no module of ours."""


def test_weights_are_loaded_where_the_override_that_builds_comes_from_a_class_that_is_no_module(folder: Path) -> None:
    module = MixedIn.from_hf(folder / "llama")
    module.configure_model()
    torch.testing.assert_close(module(TOKENS), logits_of(reference("llama")), rtol=BOUND, atol=BOUND)
