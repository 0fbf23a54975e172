"""One process of a calibration: it acquires its device, measures at the same time as the others, writes its results.

python -m lightning_megatron.tools.calibration.worker RANK SIZE KIND FOLDER LIMIT
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.device import device_name, kind_of, own_device, take_card
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.tools.calibration.kernels import (
    DTYPES,
    attention_rate,
    copy_rate,
    elementwise_rate,
    kernel_seconds,
    matmul_seconds,
)
from lightning_megatron.tools.calibration.links import link

TIMEOUT = timedelta(seconds=120)


def measure_and_write(words: Sequence[str]) -> None:
    """Measure, and write the results as JSON.

    Args:
        words: rank, number of processes, kind of device, folder for the results, and seconds of one measurement.
    """
    rank, size, kind, folder = int(words[0]), int(words[1]), words[2], Path(words[3])
    device = own_device(kind, rank)
    take_card(device, world_size=size, rank=rank, local_rank=rank)
    if size > 1:
        where = (folder / "store").as_uri()
        dist.init_process_group(kind_of(device).backend, where, TIMEOUT, size, rank)
    try:
        found = _measure(device, size, float(words[4]))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at the end of Python, Gaudi's software would wait for the others, and they wait for this process
    if size > 1:
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _measure(device: torch.device, size: int, limit: float) -> dict[str, Any]:
    """Measure everything, each kernel on all processes at the same time."""

    def together(measure: Callable[..., Any], *args: Any) -> Any:
        if size > 1:
            dist.barrier()
        return measure(*args)

    found: dict[str, Any] = {"name": device_name(device), "copy": together(copy_rate, device, limit)}
    found["kernel"] = together(kernel_seconds, device, limit)
    for name, dtype in DTYPES.items():
        found[name] = {
            "matmul": together(matmul_seconds, device, limit, dtype),
            "attention": together(attention_rate, device, limit, dtype),
            "elementwise": together(elementwise_rate, device, limit, dtype),
        }
    if size > 1:
        mesh = ParallelMesh.create(ParallelLayout(), device, TIMEOUT)
        found["link"] = together(link, mesh.world, device)
    return found


if __name__ == "__main__":
    measure_and_write(sys.argv[1:])
