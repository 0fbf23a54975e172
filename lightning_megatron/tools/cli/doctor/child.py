"""A process of ``doctor --device``: ``python -m lightning_megatron.tools.cli.doctor.child RESULTS --device TYPE ...``.

It writes a line of JSON for each started trial and each finding, so that its parent knows where it died or hung.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_megatron.errors import described
from lightning_megatron.machine.finding import Finding

if TYPE_CHECKING:
    import torch

    from lightning_megatron.mesh import ParallelMesh

_Outcome = tuple[str, str, bool]
"""Value, fault, and True if the fault is harmful."""
_CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send and receive")


def run_trials() -> None:
    """Run the trials that the command line names, or the collectives of one of two ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--store")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--names", nargs="*", default=[])
    args = parser.parse_args()
    if not _trial(args.results, "import", lambda: _import(args.device), told=False):
        return
    if args.store is None:
        for name in args.names:
            _trial(args.results, name, partial(_make, name, args.device, args.tokens))
    else:
        _collectives(args.results, args.device, args.store, args.rank)


def _trial(results: Path, name: str, make: Callable[[], _Outcome], *, told: bool = True) -> bool:
    """Run a trial, and write its start and its finding; True if nothing is wrong.

    Args:
        results: file for start and finding.
        name: name of the trial.
        make: function that runs the trial.
        told: True to write a finding without a fault too.
    """
    start = time.monotonic()
    _write(results, {"begin": name})
    try:
        value, fault, harmful = make()
    except Exception as error:  # whatever it is, it is the finding
        value, fault, harmful = "failed", described(error), True
    finding = Finding(name, f"{value} ({time.monotonic() - start:.1f} s)", fault, harmful)
    if told or fault:
        _write(results, {"finding": asdict(finding)})
    return finding.verdict != "wrong"


def _write(results: Path, line: dict[str, object]) -> None:
    with open(results, "a") as file:
        file.write(json.dumps(line) + "\n")


def _import(kind: str) -> _Outcome:
    """Import torch as training does, with the bridge if it is an extension of torch, and find the device."""
    import torch  # noqa: F401

    from lightning_megatron import device as devices

    found = devices.best_available().type
    return found, "" if found == kind else f"the device is {found} here, and was {kind} in the parent process", True


def _make(name: str, kind: str, tokens: int) -> _Outcome:
    from lightning_megatron import device as devices
    from lightning_megatron.tools.cli.doctor.op_trials import try_op

    device = devices.own_device(kind, 0)
    return _product(device) if name == "product" else try_op(name, device, tokens)


def _product(device: torch.device) -> _Outcome:
    """Matrix products in fp32 and bf16, compared with the host's."""
    import torch

    from lightning_megatron import device as devices

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    right = float((x @ x).square().mean())
    for dtype in (torch.float32, torch.bfloat16):
        y = x.to(device, dtype)
        found = float((y @ y).float().square().mean())
        if not abs(found / right - 1) < 0.02:
            return f"{found}", f"a product in {dtype} is wrong: {found} where the host has {right}", True
    return f"{devices.device_name(device)}, peak {devices.peak_memory_bytes(device) / 2**20:.0f} MiB", "", True


def _collectives(results: Path, kind: str, store: str, rank: int) -> None:
    """Collectives of two ranks, as layers call them."""
    import torch
    import torch.distributed as dist

    from lightning_megatron import device as devices
    from lightning_megatron.config.layout import ParallelLayout
    from lightning_megatron.mesh import ParallelMesh

    device = devices.own_device(kind, rank)
    made: list[ParallelMesh] = []

    def join() -> _Outcome:
        devices.take_card(device, world_size=2, rank=rank, local_rank=rank)
        dist.init_process_group(
            devices.kind_of(device).backend,
            store=dist.FileStore(store, 2),  # type: ignore[attr-defined]
            rank=rank,
            world_size=2,
        )
        made.append(ParallelMesh.create(ParallelLayout(tp=2), device, timedelta(minutes=30)))
        return f"2 ranks by {devices.kind_of(device).backend}", "", True

    if not _trial(results, "groups of 2 devices", join):
        raise SystemExit(1)
    for dtype in (torch.float32, torch.bfloat16):
        for name in _CALLS:
            make = partial(_compare, made[0], device, name, dtype)
            _trial(results, f"{name} {dtype}".replace("torch.", ""), make)
    dist.destroy_process_group()


def _call(name: str, mesh: ParallelMesh, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of one of ``_CALLS`` on this rank, and the right one."""
    import torch

    from lightning_megatron.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
    from lightning_megatron.comm.p2p import receive, send

    axis, of_ranks = mesh.tp, (_of(mine, 0), _of(mine, 1))
    if name == "all_reduce":
        return all_reduce(mine, axis), of_ranks[0] + of_ranks[1]
    if name == "all_gather":
        return all_gather(mine, axis), torch.cat(of_ranks)
    if name == "reduce_scatter":
        return reduce_scatter(mine, axis), (of_ranks[0] + of_ranks[1]).chunk(2)[axis.rank]
    if name == "all_to_all":
        half = [len(mine) // 2] * 2
        return all_to_all(mine, axis, half, half), torch.cat([each.chunk(2)[axis.rank] for each in of_ranks])
    peer, found = 1 - axis.rank, torch.empty_like(mine)
    if axis.rank == 0:
        send(mine, axis, peer)
        receive(found, axis, peer)
    else:
        receive(found, axis, peer)
        send(mine, axis, peer)
    return found, of_ranks[peer]


def _of(like: torch.Tensor, rank: int) -> torch.Tensor:
    """Values of a rank: whole numbers, so that sums are exact in every dtype."""
    import torch

    return torch.arange(len(like)).remainder(100).add(rank * 10).to(like.dtype)


def _compare(mesh: ParallelMesh, device: torch.device, name: str, dtype: torch.dtype) -> _Outcome:
    """The outcome of one collective."""
    import torch

    mine = _of(torch.empty(1 << 16, dtype=dtype), mesh.tp.rank).to(device)
    found, right = _call(name, mesh, mine)
    is_right = torch.equal(found.detach().cpu(), right)
    return f"{len(mine)} numbers", "" if is_right else f"wrong numbers on rank {mesh.tp.rank}", True


if __name__ == "__main__":
    run_trials()
