"""Checkpoints as one file: from any layout what stock Lightning writes, and goes on from; and stock's in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch import callbacks as stock_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, GPTModule, LlamaModule, LoRA, MegatronStrategy, MixtralModule, load_module
from lightning_megatron.checkpoint import CheckpointError, Progress, open_checkpoint, verify
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from lightning_megatron.testing.workers import WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint", "ignore:Found keys that are")
Ranks = Callable[..., list[Any]]
BATCH, STEPS, MORE = 4, 3, 5
EPS = 1e-4  # of AdamW: with less, it makes a step of the last bit of a gradient that is nearly zero
VOCABULARY = 60  # padded to 64 on one rank, and to 128 on two
TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "vocab_multiple": 64,
}
ROWS = torch.randint(0, VOCABULARY, (BATCH, 9), generator=torch.Generator().manual_seed(3))
TOKENS = [{"tokens": row[:-1], "labels": row[1:]} for row in ROWS] * STEPS  # each batch the same


class Plain(LightningModule):
    """A user's module with tied weights, buffers and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCABULARY, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, VOCABULARY, bias=False)
        self.frozen.requires_grad_(False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        hidden = self.frozen(self.body(self.embed(batch["tokens"])))
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return loss


def module(kind: str) -> LightningModule:
    if kind in ("plain", "by hand"):
        return Plain() if kind == "plain" else ByHand()
    if kind == "lora":
        return LlamaModule("llama-tiny", **TINY, lora=LoRA(rank=2))
    if kind == "gpt":
        return GPTModule("gpt-tiny", **{**TINY, "num_query_groups": 4})
    if kind == "mixtral":
        return MixtralModule("mixtral-tiny", **TINY, num_experts=4, moe_aux_loss_coeff=0.0)
    return LlamaModule("llama-tiny", **TINY, tie_embeddings=kind == "tied")


def groups_of(model: LightningModule) -> list[dict[str, Any]]:
    matrices = [param for param in model.parameters() if param.dim() > 1 and param.requires_grad]
    others = [param for param in model.parameters() if param.dim() <= 1 and param.requires_grad]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]


def scheduled(model: LightningModule) -> Any:
    optimizer = AdamW(model.parameters(), lr=0.01, eps=EPS)
    return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}]


OPTIMIZERS: dict[str, Callable[[LightningModule], Any]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01, eps=EPS),
    "momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
    "two groups": lambda model: AdamW(groups_of(model), lr=0.01, eps=EPS),
    "schedule": scheduled,
}


def adafactor(model: LightningModule) -> Any:
    return torch.optim.Adafactor([param for param in model.parameters() if param.requires_grad], lr=0.01)


class ByHand(Plain):
    """Two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()


def by_hand(model: Any) -> Any:
    return [AdamW(model.body.parameters(), lr=0.01), SGD(model.embed.parameters(), lr=0.1)]


def backwards(model: LightningModule) -> Any:
    return AdamW(list(model.parameters())[::-1], lr=0.01)


OTHERS = {"adafactor": adafactor, "by hand": by_hand, "backwards": backwards}


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss"]))


def fit(
    layout: dict[str, Any] | None,
    kind: str,
    optimizer: str,
    steps: int,
    save: str | None = None,
    resume: str | None = None,
    save_weights_only: bool = False,
    **arguments: Any,
) -> list[float]:
    """Train, in a layout or in stock Lightning, and return the loss of each step."""
    seed_everything(5, verbose=False)
    model = module(kind)
    model.configure_optimizers = lambda: (OPTIMIZERS | OTHERS)[optimizer](model)  # type: ignore[method-assign]
    losses, replicas = Losses(), 1 if layout is None else layout.get("dp", 1)
    own = {"save_distributed_checkpoint": False, **(layout or {})}
    own.pop("dp", None)
    strategy: Any = "auto" if layout is None else MegatronStrategy(**own)
    alike = {"max_steps": steps, "limit_val_batches": 0, "use_distributed_sampler": False}
    arguments["callbacks"] = [losses, *arguments.get("callbacks", ())]
    trainer = quiet_trainer(strategy, **{**alike, **arguments})
    own_rows = (lambda: TOKENS[trainer.strategy.data_parallel_rank :: replicas]) if replicas > 1 else lambda: TOKENS  # type: ignore[attr-defined]
    model.train_dataloader = lambda: DataLoader(own_rows(), batch_size=BATCH // replicas)  # type: ignore[arg-type, method-assign]
    trainer.fit(model, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save, weights_only=save_weights_only)
    return losses.seen


def content(path: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def assert_same_file(ours: dict[str, Any], stock: dict[str, Any], rtol: float) -> None:
    assert list(ours["state_dict"]) == list(stock["state_dict"])
    torch.testing.assert_close(dict(ours["state_dict"]), dict(stock["state_dict"]), rtol=rtol, atol=rtol)
    assert len(ours["optimizer_states"]) == len(stock["optimizer_states"])
    for own, others in zip(ours["optimizer_states"], stock["optimizer_states"], strict=True):
        assert own["param_groups"] == others["param_groups"]
        torch.testing.assert_close(own["state"], others["state"], rtol=rtol, atol=rtol)
    assert ours["lr_schedulers"] == stock["lr_schedulers"]
    for name in ("epoch", "global_step", "pytorch-lightning_version"):
        assert ours[name] == stock[name]
    assert stock.keys() <= ours.keys() | {"MixedPrecision"}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2, "micro_batch_size": 2}),
    "dp2": (2, {"dp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2 without ZeRO": (2, {"tp": 2, "distributed_optimizer": False}),
    "vpp2": (2, {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
    "ep2": (2, {"ep": 2, "dp": 2}),
    "tp2 dp2": (4, {"tp": 2, "dp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "micro_batch_size": 2}),
    "pp2 dp2": (4, {"pp": 2, "dp": 2, "micro_batch_size": 1}),
    "tp2 ep2 etp1": (4, {"tp": 2, "dp": 2, "ep": 2, "etp": 1}),
}
# Ranks hold parts of a model there, which a plain module does not have.
WITH_PARTS = {name for name, (_, layout) in LAYOUTS.items() if layout.keys() & {"tp", "pp", "cp", "ep"}}


def works(layout: str, kind: str) -> bool:
    sizes = LAYOUTS[layout][1]
    if kind == "plain":
        return layout not in WITH_PARTS
    return kind == "mixtral" or "ep" not in sizes


QUICK = [
    ("one", "plain", "adamw"),
    ("dp2", "plain", "two groups"),
    ("one", "tied", "schedule"),
    ("tp2", "llama", "adamw"),
    ("vpp2", "gpt", "momentum"),
    ("ep2", "mixtral", "two groups"),
]
KINDS = ("plain", "gpt", "llama", "mixtral")
ALL = [(name, kind, made) for name in LAYOUTS for kind in KINDS for made in OPTIMIZERS if works(name, kind)]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ALL if case not in QUICK)]


@pytest.mark.parametrize(("layout", "kind", "optimizer"), CASES)
def test_stock_goes_on_from_a_file_of_any_layout_and_any_layout_from_stocks(
    ranks: Ranks, tmp_path: Path, layout: str, kind: str, optimizer: str
) -> None:
    size, sizes = LAYOUTS[layout]
    ours, stock = str(tmp_path / "ours.ckpt"), str(tmp_path / "stock.ckpt")
    before = ranks(size, fit, sizes, kind, optimizer, STEPS, ours)
    fit(None, kind, optimizer, STEPS, stock)
    rtol = 0.0 if layout == "one" and kind == "plain" else 1e-5
    assert_same_file(content(ours), content(stock), rtol)
    straight = fit(None, kind, optimizer, STEPS + MORE)
    assert before[0] + fit(None, kind, optimizer, STEPS + MORE, resume=ours) == pytest.approx(straight, rel=1e-5)
    own = ranks(size, fit, sizes, kind, optimizer, STEPS + MORE)
    assert ranks(size, fit, sizes, kind, optimizer, STEPS + MORE, None, ours) == [one[STEPS:] for one in own]
    resumed = ranks(size, fit, sizes, kind, optimizer, STEPS + MORE, None, stock)
    assert resumed[0] == pytest.approx(straight[STEPS:], rel=1e-5)


@pytest.mark.parametrize(("kind", "optimizer"), [("plain", "adafactor"), ("by hand", "by hand")])
def test_other_optimizers_go_on_in_both(tmp_path: Path, kind: str, optimizer: str) -> None:
    """One that is not element-wise, and two at once."""
    files = {"ours": str(tmp_path / "ours.ckpt"), "stock": str(tmp_path / "stock.ckpt")}
    steps = STEPS * (2 if kind == "by hand" else 1)
    fit({}, kind, optimizer, steps, files["ours"])
    fit(None, kind, optimizer, steps, files["stock"])
    assert_same_file(content(files["ours"]), content(files["stock"]), 0.0)
    runs = [fit(layout, kind, optimizer, 2 * steps, resume=file) for layout in ({}, None) for file in files.values()]
    assert len(runs[0]) == STEPS
    assert all(run == runs[0] for run in runs)


@pytest.mark.skipif(not hasattr(stock_callbacks, "WeightAveraging"), reason="Lightning has it from 2.6 on")
def test_averaged_weights_and_those_of_training_are_both_in_it(tmp_path: Path) -> None:
    def averaged(
        layout: dict[str, Any] | None, steps: int, folder: str = "", resume: Path | None = None
    ) -> list[float]:
        saver = ModelCheckpoint(tmp_path / folder, filename="a", every_n_train_steps=2)
        callbacks = [stock_callbacks.WeightAveraging(), *([saver] if folder else [])]
        arguments: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": bool(folder)}
        return fit(layout, "plain", "adamw", steps, resume=resume and str(resume), **arguments)

    averaged({}, STEPS, "ours")
    averaged(None, STEPS, "stock")
    files = [tmp_path / "ours" / "a.ckpt", tmp_path / "stock" / "a.ckpt"]
    ours, stock = map(content, files)
    for version in ("state_dict", "current_model_state"):
        torch.testing.assert_close(dict(ours[version]), dict(stock[version]), rtol=0, atol=0)
    assert not ours["state_dict"]["embed.weight"].equal(ours["current_model_state"]["embed.weight"])
    runs = [averaged(layout, STEPS + MORE, resume=file) for layout in ({}, None) for file in files]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize(("kind", "precision"), [("llama", "bf16-mixed"), ("lora", "32-true"), ("llama", "bf16-true")])
def test_a_file_leads_to_the_bits_that_a_directory_leads_to(tmp_path: Path, kind: str, precision: str) -> None:
    one, many = str(tmp_path / "file.ckpt"), str(tmp_path / "directory.ckpt")
    fit({}, kind, "adamw", STEPS, one, precision=precision)
    fit({"save_distributed_checkpoint": True}, kind, "adamw", STEPS, many, precision=precision)
    assert Path(one).is_file()
    assert Path(many).is_dir()
    found = [fit({}, kind, "adamw", STEPS + MORE, resume=path, precision=precision) for path in (one, many)]
    assert found[0] == found[1]
    if precision == "bf16-mixed":  # fp32, as stock writes them, and stock goes on
        assert all(value.dtype == torch.float32 for value in content(one)["state_dict"].values())
        stock = fit(None, kind, "adamw", STEPS + MORE, resume=one, precision=precision)
        assert stock == pytest.approx(found[0], rel=2e-3)


@pytest.mark.parametrize("background", [False, True])
def test_model_checkpoint_keeps_links_and_the_best_and_last_is_found(tmp_path: Path, background: bool) -> None:
    saver = {"save_last": "link", "save_top_k": 2, "monitor": "train_loss", "every_n_train_steps": 1}
    for steps in (5, 8):
        callbacks = [ModelCheckpoint(tmp_path, filename="{step}", **saver)]  # type: ignore[arg-type]
        last = "last" if steps == 8 else None
        arguments = {"callbacks": callbacks, "enable_checkpointing": True, "resume": last}
        seen = fit({"async_save": background}, "llama", "adamw", steps, **arguments)
        assert len(seen) == (5 if steps == 5 else 3)
        assert {path.name for path in tmp_path.iterdir()} == {
            f"step={steps - 1}.ckpt",
            f"step={steps}.ckpt",
            "last.ckpt",
        }
        assert (tmp_path / "last.ckpt").is_symlink()
        assert (tmp_path / f"step={steps}.ckpt").is_file()
    newer = [(path.name, open_checkpoint(path).progress) for path in tmp_path.iterdir()]
    assert max(newer, key=lambda pair: pair[1])[1] == Progress(1, 8)  # type: ignore[arg-type, return-value]


def test_stock_users_load_it(tmp_path: Path) -> None:
    whole, weights = str(tmp_path / "whole.ckpt"), str(tmp_path / "weights.ckpt")
    fit({}, "plain", "adamw", STEPS, whole)
    plain = Plain.load_from_checkpoint(whole)
    assert plain.embed.weight.equal(content(whole)["state_dict"]["embed.weight"])
    fit({}, "llama", "adamw", STEPS, weights, save_weights_only=True)
    assert "optimizer_states" not in content(weights)
    llama = LlamaModule.load_from_checkpoint(weights)
    torch.testing.assert_close(dict(llama.state_dict()), dict(content(weights)["state_dict"]), rtol=0, atol=0)
    torch.testing.assert_close(dict(load_module(weights).state_dict()), dict(llama.state_dict()), rtol=0, atol=0)


def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fit({}, "plain", "adamw", STEPS, str(path))
    assert not verify(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert "cannot be read" in str(verify(path)[0])
    with pytest.raises(CheckpointError, match="cannot be read"):
        fit({}, "plain", "adamw", STEPS + MORE, resume=str(path))
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(CheckpointError, match="the check sum is wrong"):
        fit({}, "plain", "adamw", STEPS + MORE, resume=str(path))


@pytest.mark.parametrize(
    "note", [["a list"], {"versions": ["gone"]}, {"main": "gone"}, {"progress": 3}, {"per_rank": 1}]
)
def test_a_file_that_lies_of_itself_is_told(tmp_path: Path, note: Any) -> None:
    torch.save({"state_dict": {}, "lightning_megatron": note}, tmp_path / "a.ckpt")
    assert "the file's metadata is damaged" in str(verify(tmp_path / "a.ckpt")[0])
    with pytest.raises(CheckpointError, match="the file's metadata is damaged"):
        open_checkpoint(tmp_path / "a.ckpt")


def test_a_directory_and_a_file_take_each_others_place(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for directory in (True, False, False, True):
        fit({"save_distributed_checkpoint": directory}, "plain", "adamw", STEPS, str(path))
        assert path.is_dir() == directory
        assert path.is_file() != directory
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def test_an_order_that_no_stage_knows_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="of which each pipeline stage knows only a part"):
        ranks(2, fit, LAYOUTS["pp2"][1], "llama", "backwards", STEPS, str(tmp_path / "a.ckpt"))


def test_loggers_that_upload_files_are_not_refused(tmp_path: Path) -> None:
    class Uploads(Recorder):
        _log_model = "all"

    def problems(**arguments: Any) -> list[str]:
        saver, strategy = ModelCheckpoint(tmp_path), MegatronStrategy(**arguments)
        arguments = {"logger": Uploads(), "enable_checkpointing": True, "max_steps": 1, "callbacks": [saver]}
        trainer = quiet_trainer(strategy, **arguments)
        try:
            model = Plain()
            model.configure_optimizers = lambda: AdamW(model.parameters(), lr=0.01)  # type: ignore[method-assign]
            trainer.fit(model, DataLoader(TOKENS, batch_size=BATCH))  # type: ignore[arg-type]
        except ConfigError as error:
            return str(error).splitlines()
        return []

    assert any("log_model" in line and "save_distributed_checkpoint=False" in line for line in problems())
    assert not problems(save_distributed_checkpoint=False)
