"""Processes end together where the backend asks for it: here gloo is said to, with NCCL's behaviour.

Held against the rule for Gaudi (``tests/device/test_process_end.py``). This file is also the script that the ranks run.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_megatron.machine.job_environment import own_environment


def job(victim: int, folder: str) -> None:
    """Train on two ranks; one of them may fail after training."""
    import lightning.pytorch as L
    import torch.distributed as dist
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_megatron import MegatronStrategy
    from lightning_megatron.device import collectives

    own = collectives.collective_traits(torch.device("cuda"))
    collectives._GLOO = collectives.CollectiveTraits(exit_waits=own.exit_waits, wait_blocks=True, copies_pieces=True)
    destroyed = mock.patch.object(dist, "destroy_process_group", wraps=dist.destroy_process_group).start()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(),
        default_root_dir=folder,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Hooks run in reverse order: this one after that of the strategy, which registers it when groups exist.
    atexit.register(lambda: print(f"rank {trainer.global_rank} has groups: {dist.is_initialized()}"))
    trainer.fit(BoringModel())
    assert not destroyed.called
    if trainer.global_rank == victim:
        raise ArithmeticError("no luck")


def outcome(victim: int, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, __file__, str(victim), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        env=own_environment(OMP_NUM_THREADS="1"),
        cwd=folder,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_groups_are_destroyed_at_the_end_where_all_ranks_are_well(tmp_path: Path) -> None:
    code, output = outcome(-1, tmp_path)
    assert code == 0, output
    assert sorted(line for line in output.splitlines() if "has groups" in line) == [
        f"rank {rank} has groups: False" for rank in range(2)
    ], output
    assert "ends at once" not in output


@pytest.mark.slow
def test_all_ranks_end_with_a_status_where_one_has_failed(tmp_path: Path) -> None:
    code, output = outcome(1, tmp_path)
    assert code != 0, output
    assert "ArithmeticError: no luck" in output
    assert "this process ends at once" in output, output


if __name__ == "__main__":
    job(int(sys.argv[1]), sys.argv[2])
