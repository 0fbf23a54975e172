"""Speed of writing and reading checkpoints, and the cost of a save for the training step it happens in.

    python benchmarks/checkpoint_io.py [--megabytes 256] [--rounds 7] [--only bandwidth memory stall]

One process. Bandwidth: the same tensors through us, ``torch.save`` and ``torch.load`` (mapped, and copied to where they
belong), and plain ``torch.distributed.checkpoint``, one round of each in turn, so that a busy machine slows all alike;
once in tensors of 16 MiB, once in tensors of 4 MiB, once in a single one. The ratios are medians over the rounds, each
against torch, or against our plain load, in the same round. A writer is done when the bytes are on the disk; ours has
hashed them, too. Files are read from the page cache, just written. "Views" are tensors that are parts of one flat
buffer, as those of an optimizer are; "from halves" loads whole tensors of which two boxes were saved, as two ranks of
tensor parallelism do.

Memory: by how much resident memory grows at most in a save of tensors that are views of one flat buffer, as those of an
optimizer are, and what of that stays. Linux.

Stall: a Trainer saves one model at once and in the background, in turn, every few steps. Stall of a save at once: the
seconds of ``save_checkpoint``. Of one in the background: those, and those that the next optimizer step waits until its
memory is copied. One training thread: as with an accelerator, the host has something left for the disk.
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
from dataclasses import replace
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
from lightning_megatron.checkpoint import (
    BackgroundWriter,
    Fragment,
    PendingFile,
    PendingSave,
    SavedName,
    State,
    load,
    model_state,
    save,
)
from lightning_megatron.checkpoint.directory.atomic_dir import remove
from lightning_megatron.checkpoint.tensors.fragment import Chunk
from lightning_megatron.checkpoint.tensors.keys import model_key
from lightning_megatron.files.durable import sync_file
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import Box
from lightning_megatron.testing.trainer import quiet_trainer

MESH = ParallelMesh.single()
TENSOR = 1 << 22  # elements of a matrix of 16 MiB
Tensors = dict[str, Tensor]
BATCH, LENGTH = 2, 64
EVERY = 12
"""Steps between saves: the disk is done with one before the next, which would wait for it."""


def state_of(tensors: Tensors) -> State:
    return model_state(tensors, {}, MESH)


def torch_save(tensors: Tensors, path: Path) -> None:
    torch.save(tensors, path)
    sync_file(path)


def dcp_save(tensors: Tensors, path: Path) -> None:
    state_dict_saver.save(tensors, checkpoint_id=path, no_dist=True)


def torch_load(tensors: Tensors, folder: Path) -> None:
    for name, tensor in torch.load(folder / "torch.ckpt", weights_only=True, mmap=True).items():
        tensors[name].copy_(tensor)


def ours_save(tensors: Tensors, path: Path) -> None:
    save(path, state_of(tensors), {}, MESH)


def file_save(tensors: Tensors, path: Path) -> None:
    names = {"state_dict": [SavedName(name, model_key(name), tuple(value.shape)) for name, value in tensors.items()]}
    replace(PendingFile.of(path, state_of(tensors), {}, MESH), names=names).write(MESH)


def halves_save(tensors: Tensors, path: Path, dim: int) -> None:
    """Each tensor as two boxes."""
    state: State = {}
    for key, value in state_of(tensors).items():
        (chunk,) = value.chunks
        half = value.shape[dim] // 2
        chunks = []
        for first in (0, half):
            sizes = tuple(half if each == dim else size for each, size in enumerate(value.shape))
            box = Box(tuple(first if each == dim else 0 for each in range(2)), sizes)
            chunks.append(Chunk(box, chunk.data.narrow(dim, first, half), write=True))
        state[key] = Fragment(value.shape, value.dtype, tuple(chunks))
    save(path, state, {}, MESH)


def ours_load(tensors: Tensors, folder: Path, name: str = "ours", check: Any = "sizes") -> None:
    load(folder / f"{name}.ckpt", state_of(tensors), MESH, check=check)


def dcp_load(tensors: Tensors, folder: Path) -> None:
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    state_dict_loader.load(named, checkpoint_id=folder / "ours.ckpt", no_dist=True)


WRITERS: dict[str, Callable[[Tensors, Path], None]] = {
    "torch": torch_save,
    "ours": ours_save,
    "ours, one file": file_save,
    "dcp": dcp_save,
}
CUT: dict[str, Callable[[Tensors, Path], None]] = {
    "rows": partial(halves_save, dim=0),
    "columns": partial(halves_save, dim=1),
}
READERS: dict[str, Callable[[Tensors, Path], None]] = {
    "torch": torch_load,
    "ours": ours_load,
    "ours, hashes compared": partial(ours_load, check="hashes"),
    "ours, from halves of rows": partial(ours_load, name="rows"),
    "ours, from halves of columns": partial(ours_load, name="columns"),
    "dcp": dcp_load,
}


def seconds(act: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def bandwidth(folder: Path, megabytes: int, rounds: int, elements: int) -> dict[str, list[float]]:
    """Seconds of each round, by what was done.

    Args:
        folder: place for the files.
        megabytes: size of all tensors.
        rounds: number of rounds that count.
        elements: size of one tensor; a power of two.
    """
    side = 1 << (elements.bit_length() // 2)
    tensors = {
        f"t{i}": torch.randn(elements // side, side) for i in range(max(1, megabytes * 1_000_000 // (4 * elements)))
    }
    blank = {key: torch.ones_like(tensor) for key, tensor in tensors.items()}
    found: dict[str, list[float]] = {}
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    views = {key: part.view(-1, side) for key, part in zip(tensors, flat.split(elements), strict=True)}
    writers = {**WRITERS, "views": lambda _, path: ours_save(views, path)}
    for name, write in CUT.items():
        write(tensors, folder / f"{name}.ckpt")
    for number in range(rounds + 1):
        for name, write in writers.items():
            path = folder / f"{name}.ckpt"
            remove(path)
            os.sync()
            taken = seconds(partial(write, tensors, path))
            if number:  # the first is for warming up
                found.setdefault(f"save: {name}", []).append(taken)
        for name, read in READERS.items():
            for tensor in blank.values():
                tensor.zero_()
            taken = seconds(partial(read, blank, folder))
            assert all(blank[key].equal(tensor) for key, tensor in tensors.items()), name
            if number:
                found.setdefault(f"load: {name}", []).append(taken)
    return found


def print_bandwidth(folder: Path, megabytes: int, rounds: int) -> None:
    """Tables for tensors of several sizes."""
    for elements in (TENSOR, TENSOR // 4, 1 << (megabytes * 250_000).bit_length() - 1):
        found = bandwidth(folder, megabytes, rounds, elements)
        total = 4e-6 * elements * max(1, megabytes * 1_000_000 // (4 * elements))
        head = f"{total:.0f} MB in tensors of {4e-6 * elements:.0f} MB"
        print(f"{head:34} median MB/s   speed against torch's   against our plain load")
        for name, taken in found.items():
            columns = [f"{ratio(found[f'{name[:4]}: torch'], taken):23.2f}"]
            if name.startswith("load: ours"):
                columns.append(f"{ratio(found['load: ours'], taken):23.2f}")
            print(f"{name:34} {total / statistics.median(taken):11.0f}", *columns, flush=True)


def ratio(theirs: list[float], ours: list[float]) -> float:
    """Median of the quotients of rounds."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def kilobytes(name: str) -> int:
    found = re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def growth(act: Callable[[], Any]) -> tuple[float, float]:
    """Growth of resident memory in MB: at its peak, and afterwards."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark
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
        "one file": growth(
            lambda: file_save({f"t{i}": x for i, x in enumerate(flat.split(TENSOR))}, folder / "3.ckpt")
        ),
    }


class TimedStrategy(MegatronStrategy):
    """Records the seconds of each save."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.saves: list[float] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.saves.append(seconds(partial(super().save_checkpoint, *args, **kwargs)))


class Waits(Callback):
    """Records the seconds that an optimizer step waits for the copy of its memory, and those of whole steps."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.marks: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.marks.append(time.perf_counter())
        self.waits.append(seconds(trainer.strategy.finish_copy))


def stalls(folder: Path, saves: int, precision: Any, run_async: bool) -> tuple[list[float], list[float], list[float]]:
    """Seconds of saves, of the waits in the steps after them, and of steps without a save."""
    seed_everything(1, verbose=False)
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 768, "num_attention_heads": 8, "num_query_groups": 4}
    sizes |= {"head_dim": 96, "ffn_hidden_size": 2048, "vocab_size": 8192, "max_position_embeddings": LENGTH}
    waits, strategy = Waits(), TimedStrategy(async_save=run_async)
    trainer = quiet_trainer(
        strategy,
        precision=precision,
        max_steps=(saves + 1) * EVERY + 1,
        callbacks=[waits, ModelCheckpoint(folder, every_n_train_steps=EVERY, save_top_k=1)],
        enable_checkpointing=True,
    )
    tokens = torch.randint(sizes["vocab_size"], (trainer.max_steps * BATCH, LENGTH + 1))
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    loader: Any = DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]
    trainer.fit(LlamaModule("llama-tiny", **sizes), loader)
    first = 2 * EVERY  # the first save allocates memory
    steps = [b - a for i, (a, b) in enumerate(zip(waits.marks, waits.marks[1:], strict=False)) if i % EVERY == 1]
    return strategy.saves[1 : saves + 1], waits.waits[first::EVERY][:saves], steps[1:]


def print_stalls(folder: Path, rounds: int) -> None:
    """Print the seconds for which training waits: for a save in the background, and for a save at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for precision in ("32-true", "bf16-mixed"):
        begins, waits, parts, at_once, steps = [], [], [], [], []
        for _ in range(max(1, rounds // 2)):
            direct, _, others = stalls(folder / "sync", 3, precision, run_async=False)
            begun, waited, _ = stalls(folder / "async", 3, precision, run_async=True)
            base = statistics.median(direct)
            begins += begun
            waits += waited
            parts += [(a + b) / base for a, b in zip(begun, waited, strict=True)]
            at_once += direct
            steps += others
        print(
            f"{precision}: a checkpoint of {size_of(folder / 'async'):.0f} MB, steps of"
            f" {1e3 * statistics.median(steps):.0f} ms; save at once {1e3 * statistics.median(at_once):.0f} ms, in the"
            f" background {1e3 * statistics.median(begins):.1f} ms, and the next optimizer step waits"
            f" {1e3 * statistics.median(waits):.1f} ms: {statistics.median(parts):.1%}"
        )
        for name in ("sync", "async"):
            remove(folder / name)
    torch.set_num_threads(threads)


def size_of(folder: Path) -> float:
    """MB of a checkpoint's files."""
    return sum(file.stat().st_size for file in next(folder.glob("*.ckpt")).iterdir()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parts = ("memory", "bandwidth", "stall")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "memory" in options.only:
            print(f"{'save of ' + str(options.megabytes) + ' MB':20}   at most, MB   stays, MB")
            for name, (peak, stays) in memory(folder, options.megabytes).items():
                print(f"{name:20} {peak:13.0f} {stays:11.0f}", flush=True)
        if "bandwidth" in options.only:
            print_bandwidth(folder, options.megabytes, options.rounds)
        if "stall" in options.only:
            print_stalls(folder, options.rounds)


if __name__ == "__main__":
    main()
