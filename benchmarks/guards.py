"""Cost of the record of actions, StragglerMonitor and SpikeGuard together in a step of llama-tiny on two ranks.

    python benchmarks/guards.py --steps 60

One job of two processes (tp=2), sequences of 128. First by counting: the number of actions of a step times the cost of
one in a loop, plus the guard's computation on the host. Then by timing: every other step runs with all three, the
others with none, so that a busy machine slows both alike; 0.5 % is visible on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy, SpikeGuard, StragglerMonitor
from lightning_megatron.lightning.callbacks.recent import Recent
from lightning_megatron.lightning.monitoring.step_clock import HostClock
from lightning_megatron.recorder.call import Call
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import ActionLog, Recorder
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.testing.workers import WorkerPool

BATCH, LENGTH, WARM_UP = 1, 128, 4
REAL = {name: getattr(ActionLog, name) for name in ("begin", "wait", "end")}


def nothing(*_: Any, **__: Any) -> int:
    return 0


def cost_of(call: Callable[[], Any], count: int = 5000) -> float:
    """CPU seconds of a call; the best of five loops."""
    found = []
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(count):
            call()
        found.append((time.thread_time() - begin) / count)
    return min(found)


def costs() -> tuple[float, float]:
    """CPU seconds of one recorded and timed collective, and of one judgement of a step."""
    action_log, value = Recorder().main, torch.zeros(4)
    action_log.clock = HostClock()
    losses, norms = Recent(128, 0.02), Recent(128, 0.2)
    dice = random.Random(0)

    def judge() -> None:
        numbers = torch.stack((value[0] / 2, value[1])).tolist()
        for recent in (losses, norms):
            if len(recent) > 64:
                recent.is_near(numbers[0] + dice.random(), 6.0)
            recent.add(dice.random())

    return cost_of(lambda: Call(action_log, Kind.ALL_REDUCE, "tp", 1, value).run(nothing)), cost_of(judge)


class Switch(Callback):
    """Turns everything on for one step and off for the next; the last callback, so that it times the others."""

    def __init__(self, monitor: StragglerMonitor, guard: SpikeGuard) -> None:
        self.monitor, self.guard = monitor, guard
        self.times: list[tuple[float, float]] = []
        self.actions: list[int] = []
        self._clock: Any = None
        self._begin = 0.0, 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        now = time.perf_counter(), time.process_time()
        if trainer.global_step > 1:
            self.times.append((now[0] - self._begin[0], now[1] - self._begin[1]))
        on = trainer.global_step % 2 == 0
        for name, method in REAL.items():
            setattr(ActionLog, name, method if on else nothing)
        action_log = trainer.strategy.mesh.recorder.main
        self.actions.append(action_log.count)
        action_log._depth = 0
        self._clock = action_log.clock or self._clock
        action_log.clock = self._clock if on else None
        trainer.strategy.precision_plugin.step_gate = self.guard if on else None
        self._begin = time.perf_counter(), time.process_time()

    def on_train_start(self, *_: Any) -> None:
        self._begin = time.perf_counter(), time.process_time()


def train(steps: int) -> tuple[list[tuple[float, float]], int]:
    """Wall and CPU seconds of each step on this rank, every other one with all three; and actions of a step."""
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    tokens = torch.randint(32_000, (steps * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    rows: list[dict[str, Tensor]] = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    monitor, guard = StragglerMonitor(), SpikeGuard()
    switch = Switch(monitor, guard)
    trainer = quiet_trainer(
        MegatronStrategy(tp=2), max_steps=steps, gradient_clip_val=1.0, callbacks=[monitor, guard, switch]
    )
    trainer.fit(LlamaModule("llama-tiny"), DataLoader(rows, batch_size=BATCH))  # type: ignore[arg-type]
    for name, method in REAL.items():
        setattr(ActionLog, name, method)
    return switch.times[WARM_UP:], max(b - a for a, b in pairwise(switch.actions[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    with WorkerPool(2, timeout=1800) as pool:
        results = pool.run(2, train, args.steps)
    action, judgement = costs()
    print("| rank | actions of a step | us each | judgement us | together ms | CPU of a step ms | share |")
    print("|---|---|---|---|---|---|---|")
    for rank, (times, actions) in enumerate(results):
        whole, step = actions * action + judgement, statistics.median(t[1] for t in times)
        print(
            f"| {rank} | {actions} | {1e6 * action:.2f} | {1e6 * judgement:.1f} | {1e3 * whole:.2f} | {1e3 * step:.0f}"
            f" | {whole / step:.2%} |"
        )
    print("\n| rank | | without ms | with ms | more (median of pairs) |")
    print("|---|---|---|---|---|")
    for rank, (times, _) in enumerate(results):
        for i, what in enumerate(("wall", "CPU")):
            off, on = [t[i] * 1e3 for t in times[1::2]], [t[i] * 1e3 for t in times[0::2]]
            pairs = statistics.median(a - b for a, b in zip(on, off, strict=False))
            first, second = statistics.median(off), statistics.median(on)
            print(f"| {rank} | {what} | {first:.1f} | {second:.1f} | {pairs:+.2f} ms, {pairs / first:+.2%} |")


if __name__ == "__main__":
    main()
