"""``bf16-mixed``: the user's own modules as under stock Lightning, bit for bit; layers of ours as without autocast."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch import callbacks as stock_callbacks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.testing.trainer import kind_in_tests, quiet_trainer

CLASSES, LENGTH = 5, 6
pytestmark = pytest.mark.skipif(kind_in_tests().type != "cpu", reason="stock's numbers are those of a CPU")


def images() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    pixels, labels = torch.randn(16, 3, 4, 4, generator=generator), torch.arange(16) % CLASSES
    return DataLoader(list(zip(pixels, labels, strict=True)), batch_size=4)  # type: ignore[arg-type]


def tokens() -> DataLoader[Any]:
    ids = torch.randint(2, 40, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    return DataLoader(list(zip(ids, torch.arange(16) % 3, strict=True)), batch_size=4)  # type: ignore[arg-type]


class Program(LightningModule):
    """Logs its losses, and keeps them with their dtypes."""

    data = staticmethod(images)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[tuple[torch.dtype, float]] = []

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss)
        self.losses.append((loss.dtype, loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Classifier(Program):
    """A convolution, BatchNorm, dropout, a metric, a counter, and a loss of its own."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Dropout(0.1), nn.Flatten(), nn.Linear(128, CLASSES)),
        )
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch[0])
        self.mean(logits.softmax(-1).max())
        self.log("mean", self.mean)
        self.seen += 257
        return F.cross_entropy(logits, batch[1]) + logits.softmax(-1).square().sum(-1).mean()


class Distilled(Program):
    """A teacher that no optimizer trains follows slowly: bf16 would round its steps away."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        made = self.net(batch[0])
        return F.mse_loss(made, self.teacher(batch[0] + 0.1)) + F.cross_entropy(made, batch[1])

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.lerp_(fast, 0.001)


class Recurrent(Program):
    """An embedding, an LSTM, and a parameter that the module itself multiplies with."""

    data = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(40, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def loss(self, batch: Any) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):  # some processors have no kernel of oneDNN's for bf16
            hidden = self.rnn(self.words(batch[0]))[0]
        return F.cross_entropy(self.head(hidden[:, -1] * self.scale), batch[1])


class Adversaries(Program):
    """Two optimizers by hand, which change weights in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(4, 48), nn.Sequential(nn.Linear(48, 8), nn.GELU(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> Tensor:
        made = self.judge(self.maker(torch.ones(len(batch[0]), 4)))
        return F.binary_cross_entropy_with_logits(made, torch.ones_like(made))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):  # type: ignore[arg-type]
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(sign * loss)
            optimizer.step()
            self.losses.append((loss.dtype, loss.item()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.maker.parameters(), 1e-2), torch.optim.SGD(self.judge.parameters(), 1e-2)]


class Bert(Program):
    """A classifier of transformers."""

    data = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        import transformers

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        self.model = transformers.BertForSequenceClassification(
            transformers.BertConfig(vocab_size=40, num_labels=3, **sizes)
        )

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[1]).loss
        return loss


class T5(Program):
    """A translator of transformers."""

    data = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        import transformers

        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        self.model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=40, decoder_start_token_id=0, **sizes)
        )

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss


def trained(kind: type[Program], strategy: Any, **options: Any) -> tuple[Program, Trainer]:
    module, trainer = kind(), quiet_trainer(strategy, max_epochs=2, precision="bf16-mixed", **options)
    seed_everything(5, verbose=False)
    trainer.fit(module, kind.data(), kind.data())
    return module, trainer


def assert_equal(found: Program, expected: Program) -> None:
    assert found.losses == expected.losses
    assert {dtype for dtype, _ in found.losses} == {torch.float32}
    states = found.state_dict(), expected.state_dict()
    assert {n: v.dtype for n, v in states[0].items()} == {n: v.dtype for n, v in states[1].items()}
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize(
    "kind",
    [Classifier, Distilled, Recurrent, Adversaries, *(pytest.param(k, marks=pytest.mark.slow) for k in (Bert, T5))],
)
def test_a_program_of_ones_own_has_stocks_bits(kind: type[Program]) -> None:
    """Losses, metrics, parameters, buffers and their dtypes, against stock ``bf16-mixed``."""
    (expected, stock), (found, ours) = trained(kind, "auto"), trained(kind, MegatronStrategy())
    assert_equal(found, expected)
    assert ours.callback_metrics == stock.callback_metrics


@pytest.mark.skipif(not hasattr(stock_callbacks, "EMAWeightAveraging"), reason="Lightning has it from 2.6 on")
@pytest.mark.parametrize("interval", [2, 1.0])
def test_averages_are_swapped_without_a_loss(interval: float) -> None:
    """Against stock, however often a validation swaps the average and the model."""
    options = {"val_check_interval": interval}
    made = [
        trained(Distilled, strategy, callbacks=[stock_callbacks.EMAWeightAveraging(decay=0.9999)], **options)[0]
        for strategy in ("auto", MegatronStrategy())
    ]
    assert_equal(made[1], made[0])


def test_a_checkpoint_has_stocks_tensors(tmp_path: Path) -> None:
    """State of model and optimizer in one file, against stock's file."""
    files = []
    for name, strategy in ("stock", "auto"), ("ours", MegatronStrategy(save_distributed_checkpoint=False)):
        _, trainer = trained(Distilled, strategy)
        trainer.save_checkpoint(tmp_path / name)
        files.append(torch.load(tmp_path / name, weights_only=True))
    torch.testing.assert_close(files[1]["state_dict"], files[0]["state_dict"], rtol=0, atol=0)
    states = [file["optimizer_states"][0]["state"] for file in files]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


class Half(Program):
    """A part that its user made in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(48, 8).bfloat16(), nn.Linear(8, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.body(batch[0].flatten(1))), batch[1])


def test_a_part_in_bf16_stays_so_and_trains_fp32_main_values() -> None:
    module, trainer = trained(Half, MegatronStrategy())
    assert {p.dtype for p in module.body.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in module.head.parameters()} == {torch.float32}
    (sharded,) = trainer.strategy.sharded_optimizers  # type: ignore[attr-defined]
    assert {main.dtype for main in sharded.main_params} == {torch.float32}


# Layers of ours


class Watched(ColumnParallelLinear):
    """Keeps what it computes with."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype, torch.is_autocast_enabled(x.device.type)
        self.made = super().forward(x)
        return self.made


class Between(Program):
    """A layer of ours between two of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, 8), nn.Linear(8, CLASSES)
        self.ours: Watched | None = None

    def configure_model(self) -> None:
        if self.ours is None:
            self.ours = Watched(8, 8, self.trainer.strategy.mesh)  # type: ignore[attr-defined]

    def loss(self, batch: Any) -> Tensor:
        assert self.ours is not None
        hidden = self.first(batch[0].flatten(1)).float()
        logits = self.last(self.ours(hidden))
        assert torch.equal(self.ours.made, F.linear(hidden.bfloat16(), self.ours.weight, self.ours.bias))
        assert torch.is_autocast_enabled("cpu")
        return F.cross_entropy(logits, batch[1])


def test_a_layer_of_ours_among_others_computes_in_bf16_without_autocast() -> None:
    module, trainer = trained(Between, MegatronStrategy())
    assert module.ours is not None
    assert module.ours.seen == (torch.bfloat16, False)
    assert {p.dtype for p in module.ours.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in (*module.first.parameters(), *module.last.parameters())} == {torch.float32}
    mains = trainer.strategy.main_state_dict()  # type: ignore[attr-defined]
    assert {value.dtype for value in mains.values()} == {torch.float32}
    assert {dtype for dtype, _ in module.losses} == {torch.float32}
    assert module.losses[-1] < module.losses[0]


class WithHead(LlamaModule):
    """A classifier on hidden states of ours, which are those of a call without autocast."""

    by_hand = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 1}
        super().__init__("llama-tiny", vocab_size=40, **sizes)
        self.head = nn.Linear(16, 3)
        self.automatic_optimization = not self.by_hand
        self.in_backward: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden({"tokens": batch[0]})
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(hidden, self.hidden({"tokens": batch[0]}))
        hidden.register_hook(lambda _: self.in_backward.append(torch.is_autocast_enabled("cpu")))
        loss = F.cross_entropy(self.head(hidden[:, -1]), batch[1])
        assert (hidden.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        if self.by_hand:
            self.manual_backward(loss)
            self.optimizers().step()  # type: ignore[union-attr]
        return loss


class ByHand(WithHead):
    by_hand = True


@pytest.mark.parametrize(("kind", "micro_batch_size"), [(WithHead, None), (WithHead, 2), (ByHand, None)])
def test_a_head_on_a_model_of_ours(kind: type[WithHead], micro_batch_size: int | None) -> None:
    """The backward runs without autocast in each case, so ours computes what it would alone."""
    module = kind()
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=micro_batch_size), max_steps=2, precision="bf16-mixed")
    trainer.fit(module, tokens())
    assert module.in_backward
    assert not any(module.in_backward)
    assert {p.dtype for p in module.head.parameters()} == {torch.float32}
    assert module.model is not None
    assert {p.dtype for p in module.model.parameters()} == {torch.bfloat16}
