"""Cost of the action record that every rank keeps: per action, and as a share of a step of llama-tiny.

Run: ``python benchmarks/recorder.py [--steps 40]``; two processes over gloo, tp=2. The share is counted, not timed: the
difference of two runs is far below the noise of a machine. It is the number of actions in a step, times their cost.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.reading import FailureProbe
from lightning_megatron.recorder.recorder import Recorder
from lightning_megatron.testing.workers import WorkerPool

BATCH, SEQUENCE = 4, 128


def cost_of_an_action(number: int = 20000) -> dict[str, float]:
    """Seconds of CPU for a phase, a blocking collective, and an asynchronous one."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder()
        recorder.open(folder, 0, 2)
        action_log, group = recorder.main, recorder.group("tp", [0, 1])

        def phase() -> None:
            with action_log.during(Kind.FORWARD):
                pass

        def collective() -> None:
            action_log.end(action_log.begin(Kind.ALL_REDUCE, group, 4096))

        def started_first() -> None:
            action_log.end(action_log.wait(action_log.begin(Kind.ALL_REDUCE, group, 4096, waits=False)))

        found = {}
        for function in (phase, collective, started_first):
            rounds = []
            for _ in range(7):
                begun = time.process_time()
                for _ in range(number):
                    function()
                rounds.append((time.process_time() - begun) / number)
            found[function.__name__] = min(rounds)
        recorder.close(remove=True)
    return found


def cost_of_a_look(folder: Path, others: int = 7, number: int = 50) -> float:
    """Seconds of CPU for one check of the other ranks of a node, which the watch makes once a second."""
    probe = FailureProbe(folder, 0)
    begun = time.process_time()
    for _ in range(number):
        for _ in range(others):
            probe.has_failed()
    return (time.process_time() - begun) / number


def steps_of_tiny(steps: int) -> tuple[float, float, float]:
    """Seconds of a step, actions of a step, and seconds of a check of the other ranks, on one of two ranks."""
    import torch
    from lightning.pytorch import Callback
    from torch.utils.data import DataLoader

    from lightning_megatron import GPTModule, MegatronStrategy
    from lightning_megatron.testing.trainer import quiet_trainer

    class Count(Callback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.actions: list[int] = []
            self.look = 0.0

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            recorder = trainer.strategy.mesh.recorder
            self.times.append(time.perf_counter())
            self.actions.append(recorder.main.count)
            if len(self.times) == steps:
                self.look = cost_of_a_look(recorder.folder)

    count = Count()
    trainer = quiet_trainer(MegatronStrategy(tp=2), max_steps=steps, callbacks=[count])
    tokens = torch.randint(256, (steps * BATCH, SEQUENCE + 1))
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    trainer.fit(GPTModule("llama-tiny"), DataLoader(rows, BATCH))
    spent = sorted(b - a for a, b in zip(count.times[5:], count.times[6:], strict=False))
    actions = (count.actions[-1] - count.actions[5]) / (len(count.actions) - 6)
    return spent[len(spent) // 2], actions, count.look


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    costs = cost_of_an_action()
    with WorkerPool(2) as pool:
        second, actions, look = pool.run(2, steps_of_tiny, steps)[0]
    for name, cost in costs.items():
        print(f"{name:15} {cost * 1e6:6.2f} us")
    most = max(costs.values())
    print(f"a step of llama-tiny (tp=2, {BATCH} x {SEQUENCE} tokens): {second * 1e3:.1f} ms, {actions:.0f} actions")
    print(f"share of the record: at most {most * actions / second:.3%}")
    print(f"share of the watch: {look:.3%} ({look * 1e3:.2f} ms each second)")


if __name__ == "__main__":
    main()
