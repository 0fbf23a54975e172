"""Cost of the strategy besides the model: a step of the Trainer against a hand-written loop, and the sharing of logs.

    python benchmarks/overhead.py --rounds 12

One process, one micro-batch: the Trainer with our strategy and a plain loop train the same model with the same fused
AdamW and the same clipping, one step each in turn, so that a busy machine slows both alike. Four processes: the share
of a pipeline's step that is spent on sending logs and loss from the last stage to the others.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, LlamaModule, MegatronStrategy
from lightning_megatron.lightning.step.log_capture import LogSync
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.testing.workers import WorkerPool

BATCH, LENGTH, WARM_UP = 4, 256, 2
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "head_dim": 32,
}
SIZES |= {"ffn_hidden_size": 688, "vocab_size": 4096, "max_position_embeddings": LENGTH}


def module() -> GPTModule:
    seed_everything(1, verbose=False)
    return LlamaModule("llama-tiny", **SIZES)


def samples(count: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(4096, (count, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


class Times:
    """Seconds of wall clock and of this process's CPU, step by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def begin(self) -> None:
        self._begin = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self.steps.append((time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]))


class Turns:
    """Lets two threads take one step each in turn; a step runs alone."""

    def __init__(self) -> None:
        self._locks = [threading.Semaphore(1), threading.Semaphore(0)]

    def take(self, who: int) -> None:
        self._locks[who].acquire()

    def give(self, who: int) -> None:
        self._locks[1 - who].release()


class StepByStep(Callback):
    """Takes a turn for everything that the Trainer does between the ends of two batches."""

    def __init__(self, turns: Turns, times: Times) -> None:
        self.turns, self.times = turns, times

    def on_train_start(self, *_: Any) -> None:
        self.turns.take(0)
        self.times.begin()

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.end()
        self.turns.give(0)
        self.turns.take(0)
        self.times.begin()

    def on_train_end(self, *_: Any) -> None:
        self.turns.give(0)


def train_with_trainer(steps: int, turns: Turns, times: Times) -> None:
    trainer = quiet_trainer(
        MegatronStrategy(), max_steps=steps, gradient_clip_val=1.0, callbacks=[StepByStep(turns, times)], max_epochs=1
    )
    trainer.fit(module(), DataLoader(samples(steps * BATCH), batch_size=BATCH))  # type: ignore[arg-type]


def train_by_hand(steps: int, turns: Turns, times: Times) -> None:
    model = module()
    model.configure_model()
    optimizer: Any = model.configure_optimizers()
    batches = iter(DataLoader(samples(steps * BATCH), batch_size=BATCH, shuffle=True))  # type: ignore[arg-type]
    for _ in range(steps):
        turns.take(1)
        times.begin()
        loss = model.loss(next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.end()
        turns.give(1)


def compare(steps: int) -> None:
    turns, ours, plain = Turns(), Times(), Times()
    # Both off the main thread, whose heap the C library treats in another way.
    both = [
        threading.Thread(target=train_with_trainer, args=(steps, turns, ours)),
        threading.Thread(target=train_by_hand, args=(steps, turns, plain)),
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    pairs = list(zip(ours.steps, plain.steps, strict=True))[WARM_UP:]
    print(f"| {len(pairs)} steps in turns | strategy ms | by hand ms | ratio of medians | median of ratios |")
    print("|---|---|---|---|---|")
    for i, what in enumerate(("wall", "CPU")):
        mine, its = (statistics.median(pair[side][i] for pair in pairs) * 1e3 for side in (0, 1))
        ratio = statistics.median(a[i] / b[i] for a, b in pairs)
        print(f"| {what} | {mine:.1f} | {its:.1f} | {mine / its:.4f} | {ratio:.4f} |")


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        result = function(*args, **kwargs)
        spent.append(time.process_time() - begin)
        return result

    return call


class Whole(Callback):
    def __init__(self) -> None:
        self.cpu: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.cpu.append(time.process_time() - self._begin)


def share_logs(steps: int) -> tuple[float, float]:
    """CPU seconds of a step of a pipeline of four on this rank, and of the sharing of its logs; medians."""
    spent: list[float] = []
    LogSync.finish = timed(LogSync.finish, spent)  # type: ignore[method-assign]
    whole = Whole()
    trainer = quiet_trainer(
        MegatronStrategy(pp=4, micro_batch_size=1), max_steps=steps, gradient_clip_val=1.0, callbacks=[whole]
    )
    trainer.fit(module(), DataLoader(samples(steps * 8), batch_size=8))  # type: ignore[arg-type]
    return statistics.median(whole.cpu[WARM_UP:]), statistics.median(spent[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="counted steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    compare(args.rounds + WARM_UP)
    print("\n| rank | CPU of a step ms | CPU of sharing logs ms | share |")
    print("|---|---|---|---|")
    with WorkerPool(4, timeout=600) as pool:
        for rank, (step, logs) in enumerate(pool.run(4, share_logs, args.rounds + WARM_UP)):
            print(f"| {rank} | {step * 1e3:.1f} | {logs * 1e3:.2f} | {logs / step:.2%} |")


if __name__ == "__main__":
    main()
