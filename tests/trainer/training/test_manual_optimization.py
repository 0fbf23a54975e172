"""Several optimizers, toggled and alternating, gradients thrown away: the numbers of stock Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import ColumnParallelLinear, ConfigError, MegatronStrategy, RowParallelLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import named_specs
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]
ROWS, BATCH = 40, 8


class Pair(nn.Sequential):
    """Two layers that can be cut over tp."""

    def __init__(self, sizes: tuple[int, int, int], mesh: ParallelMesh) -> None:
        first = ColumnParallelLinear(sizes[0], sizes[1], mesh, bias=True)
        super().__init__(first, nn.Tanh(), RowParallelLinear(sizes[1], sizes[2], mesh, bias=True))


class Adversaries(LightningModule):
    """A generator and a discriminator, of one size and one start in all layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator: nn.Module | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.generator is not None:
            return
        strategy = self.trainer.strategy
        mesh = strategy.mesh if isinstance(strategy, MegatronStrategy) else ParallelMesh.single()
        self.generator = Pair((4, 8, 6), mesh)
        self.discriminator = Pair((6, 8, 1), mesh)
        numbers = torch.Generator().manual_seed(3)
        for _, param, spec in named_specs(self):
            whole = torch.randn(spec.global_shape, generator=numbers, device="cpu") / 2
            dim = spec.tp_dim
            nn.init.zeros_(param).data.copy_(whole if dim is None else whole.chunk(mesh.tp.size, dim)[mesh.tp.rank])

    def configure_optimizers(self) -> Any:
        assert self.generator is not None
        generator = torch.optim.AdamW(self.generator.parameters(), lr=0.02, weight_decay=0.1)
        return generator, torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)

    def judged(self, real: float, images: Tensor) -> Tensor:
        scores = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(scores.float(), torch.full_like(scores, real).float())

    def made(self, z: Tensor) -> Tensor:
        assert self.generator is not None
        return self.generator(z)

    def note(self, *losses: Tensor) -> None:
        self.losses += [float(loss.detach()) for loss in losses]


class Toggled(Adversaries):
    """The GAN of Lightning's examples."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        z, real = batch[:, :4], batch[:, 4:]
        generator, discriminator = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(generator)
        g_loss = self.judged(1, self.made(z))
        self.manual_backward(g_loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(discriminator)
        d_loss = (self.judged(1, real) + self.judged(0, self.made(z).detach())) / 2
        self.manual_backward(d_loss)
        discriminator.step()
        discriminator.zero_grad()
        self.untoggle_optimizer(discriminator)
        self.note(g_loss, d_loss)


class Untoggled(Adversaries):
    """The generator's loss leaves gradients in the discriminator, which are cleared before its own; clipped by hand."""

    set_to_none = True

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        z, real = batch[:, :4], batch[:, 4:]
        generator, discriminator = self.optimizers()  # type: ignore[misc]
        g_loss = self.judged(1, self.made(z))
        generator.zero_grad(set_to_none=self.set_to_none)
        self.manual_backward(g_loss)
        self.clip_gradients(generator, 0.1, "norm")
        generator.step()
        d_loss = (self.judged(1, real) + self.judged(0, self.made(z))) / 2
        discriminator.zero_grad(set_to_none=self.set_to_none)
        self.manual_backward(d_loss)
        discriminator.step()
        self.note(g_loss, d_loss)


class Zeroing(Untoggled):
    set_to_none = False


class ThrownAway(Adversaries):
    """Gradients of another loss, dropped before those of the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        z, real = batch[:, :4], batch[:, 4:]
        generator, discriminator = self.optimizers()  # type: ignore[misc]
        self.manual_backward(100 * (self.judged(1, self.made(z)) + self.judged(0, real)))
        generator.zero_grad()
        discriminator.zero_grad(set_to_none=False)
        loss = self.judged(0, self.made(z)) + self.judged(1, real)
        self.manual_backward(loss)
        generator.step()
        discriminator.step()
        discriminator.zero_grad()
        self.note(loss)


class Alternating(Adversaries):
    """One optimizer a batch, through closures, the other model's gradients blocked."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]  # type: ignore[index]

        def closure() -> Tensor:
            loss = self.judged(1 - batch_idx % 2, self.made(batch[:, :4])) + self.judged(1, batch[:, 4:])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.note(loss)
            return loss

        with optimizer.toggle_model(sync_grad=batch_idx % 3 > 0):
            assert torch.is_tensor(optimizer.step(closure=closure))


class Lasting(Adversaries):
    """Nobody clears gradients but every third batch: they outlive steps."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx % 3 == 0:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
        loss = self.judged(batch_idx % 2, self.made(batch[:, :4]))
        self.manual_backward(loss / 2)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        self.note(loss)


class PastTheTrainer(Adversaries):
    """Optimizers as they are, without Lightning's wrapper."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizers, list)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = self.judged(0, self.made(batch[:, :4]))
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.note(loss)


KINDS = [Toggled, Untoggled, Zeroing, ThrownAway, Alternating, Lasting, PastTheTrainer]
Weights = dict[str, Tensor]


def rows() -> Tensor:
    return torch.randn(ROWS, 10, generator=torch.Generator().manual_seed(1))


def train(kind: type[Adversaries], strategy: Any, replicas: int = 1, **options: Any) -> tuple[list[float], Weights]:
    module = kind()
    mine = rows()[dist.get_rank() if replicas > 1 else 0 :: replicas]
    loader = DataLoader(mine, batch_size=BATCH // replicas)  # type: ignore[arg-type]
    trainer = quiet_trainer(strategy, max_epochs=2, use_distributed_sampler=False, **options)
    trainer.fit(module, loader)
    return module.losses, {name: p.detach().float().cpu().clone() for name, p in module.named_parameters()}


@cache
def stock(kind: type[Adversaries], precision: Any = "32-true") -> tuple[list[float], Weights]:
    return train(kind, SingleDeviceStrategy("cpu"), precision=precision)


def assert_close(ours: Any, theirs: Any, kind: Any, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 10, msg=lambda text: f"{kind.__name__}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_on_one_rank(kind: type[Adversaries]) -> None:
    losses, weights = train(kind, MegatronStrategy())
    assert_close(losses, stock(kind)[0], kind)
    assert_close(weights, stock(kind)[1], kind)


@pytest.mark.parametrize("can_alias", [True, False])
def test_bf16_mixed_is_close(monkeypatch: pytest.MonkeyPatch, can_alias: bool) -> None:
    if not can_alias:  # a torch in which a gradient has the dtype of its parameter
        monkeypatch.setattr("lightning_megatron.optim.buffers.buffer.supports_grad_dtype", lambda *_: False)
    for kind in KINDS:
        losses, weights = train(kind, MegatronStrategy(), precision="bf16-mixed")
        torch.testing.assert_close(losses, stock(kind)[0], rtol=0.02, atol=0.01)
        assert_close(weights, stock(kind)[1], kind, rtol=0.05)


def on_ranks(options: dict[str, Any]) -> list[Weights]:
    return [train(kind, MegatronStrategy(**options), 2 // options.get("tp", 1))[1] for kind in KINDS]


@pytest.mark.parametrize(
    "options", [{}, {"distributed_optimizer": False}, {"tp": 2}], ids=["dp", "dp, not sharded", "tp"]
)
def test_on_two_ranks(ranks: Ranks, options: dict[str, Any]) -> None:
    for rank, found in enumerate(ranks(2, on_ranks, options)):
        for kind, weights in zip(KINDS, found, strict=True):
            for name, whole in stock(kind)[1].items():
                mine = weights[name]
                dim = next((i for i, size in enumerate(whole.shape) if size != mine.shape[i]), None)
                expected = whole if dim is None else whole.chunk(2, dim)[rank]
                assert_close(mine, expected, kind, rtol=1e-4)


class Shared(Toggled):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.discriminator.parameters(), lr=0.1)]


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"discriminator\.0\.weight.*optimizer 1 holds a parameter that optimizer 0"):
        train(Shared, MegatronStrategy())
