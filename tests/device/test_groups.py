"""Groups connect before training, in one order; late, uneven and polled ones are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simulated_gaudi as hpu
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from simulated_hpu.native_extension import native
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronHPUStrategy
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]
LATE = "LIGHTNING_MEGATRON_HPU_SIM_LATE_GROUPS"
BOXES = "LIGHTNING_MEGATRON_HPU_SIM_BOX_RANKS"


def connected(sizes: dict[str, int]) -> tuple[list[str], list[str], dict[str, float]]:
    """Names of the axes whose groups a mesh connects, and of the groups in the order of their first collectives."""
    mesh = ParallelMesh.create(ParallelLayout(**sizes), torch.device("hpu", 0))
    hpu.reset_calls()
    mesh.connect()
    return [axis.name for axis in mesh.device_axes], native().first_uses(), mesh.connect_seconds


def test_every_group_connects_in_the_order_of_creation(ranks: Ranks) -> None:
    for axes, used, seconds in ranks(8, connected, {"tp": 2, "pp": 2}):
        assert axes == list(seconds) == ["world", "tp", "dp", "pp"]  # other axes share one of these groups
        assert len(used) == len(axes)
        numbers = [int(name) for name in used if name.isdigit()]
        assert numbers == sorted(numbers)


def late() -> tuple[str, int]:
    import os

    os.environ[LATE] = "refuse"
    group = dist.new_group([0, 1])
    early = dist.new_group([0, 1])
    one = torch.ones(2, device="hpu", requires_grad=True)
    dist.all_reduce(one.detach(), group=early)
    hpu.reset_calls()
    one.sum().backward()
    torch.optim.SGD([one], 0.1).step()
    dist.all_reduce(one.detach(), group=early)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(one.detach(), group=group)
    return str(caught.value), hpu.calls()["hccl late group"]


def test_a_group_that_connects_after_a_step_is_refused_on_request(ranks: Ranks) -> None:
    for text, count in ranks(2, late):
        assert "comes after a step" in text
        assert count == 1


def uneven() -> list[str]:
    import os

    os.environ[BOXES] = "2"
    said = []
    for members in ([0, 1], [0, 2], [0, 1, 2], [0, 1, 2, 3]):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            try:
                dist.all_reduce(torch.ones(1, device="hpu"), group=group)
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
        dist.barrier()
    return said


def test_a_group_with_unequal_shares_of_boxes_is_refused(ranks: Ranks) -> None:
    said = ranks(4, uneven)[0]
    assert [bool(text) for text in said] == [False, False, True, False]
    assert "use same amount of devices from each box" in said[2]


def dropped() -> tuple[list[float], int]:
    """A send that nothing waits for arrives."""
    hpu.reset_calls()
    peer = 1 - dist.get_rank()
    received = torch.empty(4, device="hpu")
    for number in range(3):
        if dist.get_rank() == 0:
            dist.isend(torch.full((4,), float(number), device="hpu"), peer)
        else:
            dist.irecv(received, peer).wait()
    dist.barrier()
    return received.tolist(), hpu.calls()["Work.is_completed"]


def test_a_send_that_is_dropped_arrives(ranks: Ranks) -> None:
    assert ranks(2, dropped)[1] == ([2.0] * 4, 0)


def asked() -> tuple[int, int]:
    """Questions for the end of works that were only waited for, and of works that were asked."""
    hpu.reset_calls()
    peer, one = 1 - dist.get_rank(), torch.ones(1, device="hpu")
    message = dist.isend if dist.get_rank() == 0 else dist.irecv
    for start in (lambda: dist.all_reduce(one, async_op=True), lambda: message(one, peer)):
        start().wait()
    waited = hpu.calls()["Work.is_completed"]
    for start in (lambda: dist.all_reduce(one, async_op=True), lambda: message(one, peer)):
        assert start().is_completed()
    return waited, hpu.calls()["Work.is_completed"]


def test_questions_for_the_end_of_works_are_counted(ranks: Ranks) -> None:
    assert ranks(2, asked) == [(0, 2)] * 2


def trained(accelerator: str, options: dict[str, Any]) -> tuple[list[float], int]:
    """Losses of a pipeline, and how often its messages were asked for their end."""
    import os

    os.environ[LATE] = "refuse"
    seed_everything(5, verbose=False)
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    sizes |= {"vocab_size": 61, "ffn_hidden_size": 64, "init_std": 0.1, "vocab_multiple": 4}
    module = LlamaModule("llama-tiny", lr=1e-3, eps=1e-20, **sizes)
    tokens = torch.randint(61, (64, 17), generator=torch.Generator().manual_seed(3))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    recorder = Recorder()
    strategy = MegatronHPUStrategy(micro_batch_size=2, **options)
    world = dist.get_world_size()
    trainer = quiet_trainer(strategy, accelerator=accelerator, devices=world, max_epochs=1, logger=recorder)
    hpu.reset_calls()
    trainer.fit(module, DataLoader(rows, batch_size=16))
    return recorder.series("train_loss"), hpu.calls()["Work.is_completed"]


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"pp": 2, "pipeline_schedule": "gpipe"},
    "1f1b": {"pp": 2},
    "interleaved": {"pp": 2, "vpp": 2},
    "zero-bubble": {"pp": 2, "pipeline_schedule": "zero-bubble"},
}


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_pipeline_does_not_ask_for_the_end_of_its_messages(ranks: Ranks, schedule: str) -> None:
    right = ranks(2, trained, "cpu", SCHEDULES[schedule])
    for (losses, asked), (expected, _) in zip(ranks(2, trained, "hpu", SCHEDULES[schedule]), right, strict=True):
        assert asked == 0
        assert losses == pytest.approx(expected, rel=1e-5)
