"""Release of everything that a Trainer built: one process may train many models, one after another."""

from __future__ import annotations

import gc
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from patience import PATIENCE
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]


def watched(strategy: MegatronStrategy, module: GPTModule) -> Iterator[tuple[str, Any]]:
    yield "strategy", strategy
    yield "module", module
    yield "mesh", strategy.mesh
    for sharded in strategy.sharded_optimizers:
        yield "sharded optimizer", sharded
        for buffer in sharded.buffers:
            yield "gradients", buffer.grads
    yield from module.named_parameters()


def trained_and_forgotten(options: dict[str, Any], folder: Path | None) -> list[str]:
    """Names of what is still there after a run that nobody has anything of."""

    def train() -> list[tuple[str, weakref.ref[Any]]]:
        seed_everything(3, verbose=False)
        strategy = MegatronStrategy(**options)
        module = GPTModule("mixtral-tiny", vocab_size=32, vocab_multiple=1)
        tokens = torch.arange(8 * 9).reshape(8, 9) % 32
        batches = DataLoader([{"tokens": t[:-1], "labels": t[1:]} for t in tokens], batch_size=4)  # type: ignore[arg-type]
        trainer = quiet_trainer(strategy, max_steps=2, gradient_clip_val=0.5)
        trainer.fit(module, batches, batches)
        if folder is not None:
            trainer.save_checkpoint(folder / "a.ckpt")
        return [(name, weakref.ref(thing)) for name, thing in watched(strategy, module)]

    references = train()
    end = time.monotonic() + PATIENCE  # for threads of gloo, or of the writer, that are just ending
    while True:
        gc.collect()
        left = [name for name, reference in references if reference() is not None]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (1, {"distributed_optimizer": False, "recompute": "full"}),
        (2, {"tp": 2, "recompute": "selective"}),
        (2, {"pp": 2, "micro_batch_size": 2}),
        (2, {"cp": 2, "overlap_param_gather": True}),
        (2, {"ep": 2, "overlap_grad_reduce": True}),
    ],
    ids=str,
)
def test_nothing_is_left_of_a_run(ranks: Ranks, world_size: int, options: dict[str, Any]) -> None:
    assert ranks(world_size, trained_and_forgotten, options, None) == [[]] * world_size


@pytest.mark.parametrize("async_save", [False, True])
def test_nothing_is_left_of_a_run_that_was_saved(ranks: Ranks, tmp_path: Path, async_save: bool) -> None:
    assert ranks(2, trained_and_forgotten, {"tp": 2, "async_save": async_save}, tmp_path) == [[], []]


def test_a_trainer_can_be_pickled_after_a_run_and_goes_on() -> None:
    """One process: groups of several are no thing to pickle."""
    tokens = torch.arange(8 * 9).reshape(8, 9) % 32
    batches = DataLoader([{"tokens": t[:-1], "labels": t[1:]} for t in tokens], batch_size=4)  # type: ignore[arg-type]
    trainer = quiet_trainer(MegatronStrategy(), max_epochs=1)
    module = GPTModule("gpt-tiny", num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32)
    trainer.fit(module, batches)
    copied = pickle.loads(pickle.dumps(trainer))
    for one in (trainer, copied):
        one.fit_loop.max_epochs = 2
        one.fit(one.lightning_module, batches)
        assert one.global_step == 4
    theirs = copied.lightning_module.parameters()
    assert all(torch.equal(mine, other) for mine, other in zip(module.parameters(), theirs, strict=True))


def groups_alive() -> int:
    """Gloo groups of this process; each has a thread of this name."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by Linux")
def test_process_groups_do_not_pile_up(ranks: Ranks) -> None:
    before = max(ranks(4, groups_alive))
    for _ in range(3):
        ranks(4, trained_and_forgotten, {"tp": 2, "pp": 2, "micro_batch_size": 2}, None)
    assert max(ranks(4, groups_alive)) <= before
