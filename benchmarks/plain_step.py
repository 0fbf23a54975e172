"""Cost of a step of a plain module under the strategy, against stock Lightning: Python calls, and CPU time.

    python benchmarks/plain_step.py --precision bf16-mixed --rounds 5

A tiny MLP that knows nothing of this package trains in one process, so that nearly all of its time is Python's. The two
take turns, each in several fits, since other work on the machine changes the times; calls are the same in every fit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

FIRST = 20


class MLP(LightningModule):
    """Two linear layers, a logged loss, and AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of a batch."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as torch chooses its kernel."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Meter(Callback):
    """Measures the steps after the first ones: calls of Python, or milliseconds of CPU time."""

    def __init__(self, steps: int, counts: bool) -> None:
        self._last, self._counts, self._calls, self._begun = FIRST + steps, counts, 0, 0.0
        self.of_a_step = 0.0

    def _count(self, frame: FrameType, event: str, arg: Any) -> None:
        self._calls += event == "call"

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Begin after the first steps, and end at the last one."""
        if trainer.global_step == FIRST:
            self._begun = time.process_time()
            sys.setprofile(self._count if self._counts else None)
        elif trainer.global_step == self._last:
            sys.setprofile(None)
            spent = 1e3 * (time.process_time() - self._begun)
            self.of_a_step = (self._calls if self._counts else spent) / (self._last - FIRST)


def measure(strategy: Any, precision: Any, steps: int, counts: bool) -> float:
    """Calls, or milliseconds of CPU time, of a step."""
    seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(8 * 64, 32), torch.randint(10, (8 * 64,)))
    meter = Meter(steps, counts)
    trainer = quiet_trainer(strategy, max_steps=FIRST + steps + 1, precision=precision, callbacks=[meter])
    trainer.fit(MLP(), DataLoader(data, batch_size=8))
    return meter.of_a_step


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], Any]] = {"stock": lambda: "auto", "ours": MegatronStrategy}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, strategy in kinds.items():
            times[name].append(measure(strategy(), args.precision, args.steps, counts=False))
    print("| | calls of a step | CPU ms, median | CPU ms, least |")
    print("|---|---|---|---|")
    for name, strategy in kinds.items():
        calls = measure(strategy(), args.precision, args.steps, counts=True)
        print(f"| {name} | {calls:.0f} | {statistics.median(times[name]):.2f} | {min(times[name]):.2f} |")


if __name__ == "__main__":
    main()
