"""Speed of writing and reading checkpoints, and the cost of a save for the training step it happens in.

    python benchmarks/checkpoint_io.py [--megabytes 256] [--rounds 7]

One process. Bandwidth: the same tensors through us, ``torch.save`` and ``torch.load``, and plain
``torch.distributed.checkpoint``, one round of each in turn, so that a busy machine slows all alike. A writer is done
when the bytes are on the disk; ours has hashed them, too. Files are read from the page cache, just written.

Memory: by how much resident memory grows at most in a save of tensors that are views of one flat buffer, as those of an
optimizer are, and what of that stays. Linux.

Stall: the Trainer trains one model without checkpoints, with saves at once, and with saves in the background, in turn,
on one thread: as with an accelerator, the host has something left for the disk.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.checkpoint import BackgroundWriter, PendingSave, State, load, model_state, save
from lightning_megatron.checkpoint.directory.atomic_dir import remove, sync_file
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.testing.trainer import quiet_trainer

MESH = ParallelMesh.single()
TENSOR = 1 << 22  # elements of a tensor: 16 MiB, a matrix of 2048 x 2048
BATCH, LENGTH, STEPS, EVERY, WARM_UP = 4, 64, 24, 8, 2


def state_of(tensors: dict[str, Tensor]) -> State:
    return model_state(tensors, {}, MESH)


def torch_save(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path)
    sync_file(path)


def dcp_save(tensors: dict[str, Tensor], path: Path) -> None:
    state_dict_saver.save(tensors, checkpoint_id=path, no_dist=True)


def dcp_load(tensors: dict[str, Tensor], path: Path) -> None:
    state_dict_loader.load(tensors, checkpoint_id=path, no_dist=True)


def torch_load(tensors: dict[str, Tensor], path: Path) -> None:
    for name, tensor in torch.load(path, weights_only=True).items():
        tensors[name].copy_(tensor)


def ours_save(tensors: dict[str, Tensor], path: Path) -> None:
    save(path, state_of(tensors), {}, MESH)


def ours_load(tensors: dict[str, Tensor], path: Path, check: Any = "sizes") -> None:
    load(path, state_of(tensors), MESH, check=check)


WRITERS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "ours": ours_save,
    "torch.save": torch_save,
    "dcp.save": dcp_save,
}
READERS: dict[str, tuple[str, Callable[[dict[str, Tensor], Path], None]]] = {
    "ours": ("ours", ours_load),
    "ours, hashes compared": ("ours", partial(ours_load, check="hashes")),
    "torch.load": ("torch.save", torch_load),
    "dcp.load": ("dcp.save", dcp_load),
}


def seconds(act: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def bandwidth(folder: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """MB/s of each round."""
    tensors = {f"t{i}": torch.randn(TENSOR) for i in range(max(1, megabytes * 1_000_000 // (4 * TENSOR)))}
    found: dict[str, list[float]] = {}
    total = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    for number in range(rounds + 1):
        for name, write in WRITERS.items():
            path = folder / f"{name}.ckpt"
            remove(path)
            os.sync()
            taken = seconds(partial(write, tensors, path))
            if number:  # the first is for warming up
                found.setdefault(f"save: {name}", []).append(total / taken)
        for name, (written_by, read) in READERS.items():
            blank = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
            taken = seconds(partial(read, blank, folder / f"{written_by}.ckpt"))
            assert all(blank[key].equal(tensor) for key, tensor in tensors.items())
            if number:
                found.setdefault(f"load: {name}", []).append(total / taken)
    return found


def kilobytes(name: str) -> int:
    found = re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def growth(act: Callable[[], Any]) -> tuple[float, float]:
    """MB of resident memory at most, and afterwards, over what there was before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark begins anew
    before = kilobytes("VmRSS")
    act()
    peak = kilobytes("VmHWM")
    gc.collect()
    return (peak - before) * 1.024e-3, (kilobytes("VmRSS") - before) * 1.024e-3


def memory(folder: Path, megabytes: int) -> dict[str, tuple[float, float]]:
    """Growth by a save at once, and by the first and the second one in the background."""
    flat = torch.ones(megabytes * 1_000_000 // 4)
    state = state_of({f"t{i}": piece for i, piece in enumerate(flat.split(TENSOR))})
    writer = BackgroundWriter(MESH)

    def in_background(name: str) -> None:
        writer.begin(PendingSave.of(folder / name, state, {}, MESH))
        writer.wait()

    save(folder / "warm.ckpt", state_of({"t": flat[:TENSOR]}), {}, MESH)
    return {
        "at once": growth(lambda: save(folder / "0.ckpt", state, {}, MESH)),
        "in the background": growth(lambda: in_background("1.ckpt")),
        "and once more": growth(lambda: in_background("2.ckpt")),
    }


class StepTimes(Callback):
    """Seconds from the beginning of each step to that of the next, so with the save that may lie between them."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())


def steps(folder: Path, saves: str) -> tuple[list[float], list[float]]:
    """Seconds of the steps that end with a save (or would), and of all others."""
    seed_everything(1, verbose=False)
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 4}
    sizes |= {"head_dim": 32, "ffn_hidden_size": 688, "vocab_size": 8192, "max_position_embeddings": LENGTH}
    times = StepTimes()
    saver = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_top_k=1)
    trainer = quiet_trainer(
        MegatronStrategy(async_save=saves == "async"),
        max_steps=STEPS + 1,
        callbacks=[times, *([] if saves == "none" else [saver])],
        enable_checkpointing=saves != "none",
    )
    tokens = torch.randint(sizes["vocab_size"], ((STEPS + 1) * BATCH, LENGTH + 1))
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    module = LlamaModule("llama-tiny", **sizes)
    loader: Any = DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    taken = [b - a for a, b in zip(times.marks, times.marks[1:], strict=False)]
    with_save = [t for i, t in enumerate(taken) if (i + 1) % EVERY == 0]
    return with_save, [t for i, t in enumerate(taken) if (i + 1) % EVERY and i >= WARM_UP]


def stalls(folder: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of steps with a save, and of those without, for each way to save."""
    pooled: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(rounds):
        for saves in ("none", "sync", "async"):
            with_save, others = steps(folder / saves, saves)
            known = pooled.setdefault(saves, ([], []))
            known[0].extend(with_save)
            known[1].extend(others)
    return {saves: (statistics.median(a), statistics.median(b)) for saves, (a, b) in pooled.items()}


def size_of(folder: Path) -> float:
    """MB of a checkpoint's files."""
    return sum(file.stat().st_size for file in next(folder.glob("*.ckpt")).iterdir()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        print(f"{'save of ' + str(options.megabytes) + ' MB':20}   at most, MB   stays, MB")
        for name, (peak, stays) in memory(folder, options.megabytes).items():
            print(f"{name:20} {peak:13.0f} {stays:11.0f}")
        print(f"{'':28}   median MB/s   lowest   highest")
        for name, speeds in bandwidth(folder, options.megabytes, options.rounds).items():
            print(f"{name:28} {statistics.median(speeds):13.0f} {min(speeds):8.0f} {max(speeds):9.0f}")
        torch.set_num_threads(1)
        print(f"{'saves':10} step with a save, ms   other steps, ms")
        for saves, (with_save, others) in stalls(folder, max(1, options.rounds // 2)).items():
            print(f"{saves:10} {1e3 * with_save:20.0f} {1e3 * others:17.0f}")
        print(f"a checkpoint has {size_of(folder / 'sync'):.0f} MB")


if __name__ == "__main__":
    main()
