"""Damaged checkpoints through plain ``fit``: refused, harmless, or passed over by "last", and never trained on.

A run of two ranks leaves a checkpoint after each step, and of each it is known what parameters and optimizers hold. A
case damages one or more of them in a copy of the folder and resumes, from a path or from "last". What ``fit`` is about
to train on must be, bit for bit, what the checkpoint of that step held.

Run: ``python tests/fuzz/damaged_checkpoints.py [--trials 500] [--seed 0]``.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.checkpoint import CheckpointError, verify
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.testing.workers import WorkerPool

RANKS, STEPS = 2, 4
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp2": {}, "pp2": {"pp": 2, "micro_batch_size": 2}}
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "vocab_size": 32}
SIZES |= {"ffn_hidden_size": 24, "head_dim": 8, "vocab_multiple": 2}

Damage = Callable[[Path, Path, random.Random], None]
"""Does something to the first checkpoint; the second one is of another step."""

DAMAGES: dict[str, Damage] = {}


def damage(kind: Damage) -> Damage:
    """Add a kind to the list."""
    DAMAGES[kind.__name__.replace("_", " ")] = kind
    return kind


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def _tensors(path: Path) -> list[Path]:
    return sorted(path.glob("*.distcp"))


def _edit(file: Path, edit: Callable[[bytearray], object]) -> None:
    content = bytearray(file.read_bytes())
    edit(content)
    file.write_bytes(content)


@damage
def one_bit(path: Path, other: Path, dice: random.Random) -> None:
    def flip(content: bytearray) -> None:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)

    _edit(dice.choice(_files(path)), flip)


@damage
def one_bit_of_a_tensor(path: Path, other: Path, dice: random.Random) -> None:
    def flip(content: bytearray) -> None:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)

    _edit(dice.choice(_tensors(path)), flip)


@damage
def many_bits(path: Path, other: Path, dice: random.Random) -> None:
    def flip(content: bytearray) -> None:
        for _ in range(dice.randint(2, 400)):
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)

    _edit(dice.choice(_tensors(path)), flip)


@damage
def block_of_zeros(path: Path, other: Path, dice: random.Random) -> None:
    def zero(content: bytearray) -> None:
        start, length = dice.randrange(len(content)), dice.choice([64, 512, 4096])
        content[start : start + length] = bytes(len(content[start : start + length]))

    _edit(dice.choice(_tensors(path)), zero)


@damage
def moved_block(path: Path, other: Path, dice: random.Random) -> None:
    def move(content: bytearray) -> None:
        length = dice.choice([16, 64, 512, 4096])
        here, there = (dice.randrange(len(content) - length) for _ in range(2))
        content[there : there + length] = content[here : here + length]

    _edit(dice.choice(_tensors(path)), move)


@damage
def random_bytes(path: Path, other: Path, dice: random.Random) -> None:
    file = dice.choice(_files(path))
    file.write_bytes(dice.randbytes(file.stat().st_size))


@damage
def cut(path: Path, other: Path, dice: random.Random) -> None:
    file = dice.choice(_files(path))
    os.truncate(file, dice.choice([0, dice.randrange(file.stat().st_size)]))


@damage
def longer(path: Path, other: Path, dice: random.Random) -> None:
    _edit(dice.choice(_files(path)), lambda content: content.extend(dice.randbytes(dice.randint(1, 64))))


@damage
def lost_file(path: Path, other: Path, dice: random.Random) -> None:
    dice.choice(_files(path)).unlink()


@damage
def foreign_file(path: Path, other: Path, dice: random.Random) -> None:
    (path / dice.choice(["__7_0.distcp", "notes.txt"])).write_bytes(dice.randbytes(99))


@damage
def swapped_files(path: Path, other: Path, dice: random.Random) -> None:
    first, second = dice.sample(_files(path), 2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


@damage
def tensors_of_another_step(path: Path, other: Path, dice: random.Random) -> None:
    name = dice.choice(_tensors(path)).name
    shutil.copyfile(other / name, path / name)


@damage
def files_of_another_step(path: Path, other: Path, dice: random.Random) -> None:
    names = [file.name for file in _files(path)]
    for name in dice.sample(names, dice.randint(1, len(names) - 1)):
        shutil.copyfile(other / name, path / name)


@damage
def block_of_another_step(path: Path, other: Path, dice: random.Random) -> None:
    file = dice.choice(_tensors(path))
    theirs = (other / file.name).read_bytes()

    def take(content: bytearray) -> None:
        start, length = dice.randrange(len(content)), dice.choice([64, 4096, len(content) // 2])
        content[start : start + length] = theirs[start : start + length]

    _edit(file, take)


@damage
def edited_manifest(path: Path, other: Path, dice: random.Random) -> None:
    def edit(content: bytearray) -> None:
        place = dice.choice([place for place, sign in enumerate(content) if chr(sign).isalnum()])
        content[place] = ord(dice.choice([sign for sign in "0123456789abcdef" if ord(sign) != content[place]]))

    _edit(path / "manifest.json", edit)


@damage
def manifest_of_another_step(path: Path, other: Path, dice: random.Random) -> None:
    shutil.copyfile(other / "manifest.json", path / "manifest.json")


@damage
def edited_metadata(path: Path, other: Path, dice: random.Random) -> None:
    """Two tensors of one shape change places, in a file of the same length."""
    content = (path / ".metadata").read_bytes()
    one, two = dice.sample([b"layers.0.mlp.fc1", b"layers.1.mlp.fc1"], 2)
    marked = content.replace(one, b"\0" * len(one)).replace(two, one).replace(b"\0" * len(one), two)
    (path / ".metadata").write_bytes(marked if dice.random() < 0.5 else content[:-1] + b"?")


@dataclass(frozen=True)
class Case:
    """Damage to each checkpoint, and the one from which ``fit`` resumes."""

    layout: str
    kind: str
    resumes_from: str
    also: tuple[str, ...]
    seed: int


def draw(dice: random.Random, number: int) -> Case:
    """The kinds in turn; half of the cases ask for "last", of which some find newer ones damaged as well."""
    layout, kind = dice.choice(list(LAYOUTS)), list(DAMAGES)[number % len(DAMAGES)]
    name = dice.choice(["last.ckpt", f"step={dice.randint(1, STEPS)}.ckpt"])
    newest = [f"step={step}.ckpt" for step in range(STEPS, STEPS - dice.randint(0, STEPS), -1)]
    return Case(layout, kind, name, tuple(newest) if name == "last.ckpt" else (), dice.randrange(10**9))


class _Seen(Exception):  # noqa: N818 - no error
    """Enough is known: training would begin now."""


class Look(Callback):
    """Hashes all that the run is about to train with, and ends it."""

    def __init__(self) -> None:
        self.step, self.digest = -1, ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step, self.digest = trainer.global_step, digest_of(trainer, pl_module)
        raise _Seen


def digest_of(trainer: Any, module: Any) -> str:
    """Of parameters, buffers, and of everything that the optimizer holds on this rank."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for optimizer in trainer.strategy.sharded_optimizers:
        for shard in optimizer.param_shards():
            values = {"main": shard.main, **shard.state, **shard.shared}
            for name, value in sorted(values.items()):
                content = torch.as_tensor(value).detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
                digest.update(f"{shard.name}.{name}".encode() + content)
    return digest.hexdigest()


def run(folder: Path, layout: str, ckpt_path: str | None) -> Look | None:
    """Train from the beginning, or look at what a resumed run would train on."""
    seed_everything(5, verbose=False)
    look = None if ckpt_path is None else Look()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    trainer = quiet_trainer(
        MegatronStrategy(**LAYOUTS[layout]),
        max_steps=STEPS if look is None else STEPS + 1,
        enable_checkpointing=True,
        callbacks=[saver, *([] if look is None else [look])],
        use_distributed_sampler=False,
    )
    tokens = torch.randint(32, (STEPS * 8, 9), generator=torch.Generator().manual_seed(2))
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    with suppress(_Seen):
        trainer.fit(LlamaModule("llama-tiny", lr=1e-2, **SIZES), DataLoader(rows, batch_size=4), ckpt_path=ckpt_path)
    return look


def outcome(case: Case, scratch: Path, known: Mapping[int, str]) -> str:
    """Outcome of a case on this rank.

    Args:
        case: the case.
        scratch: has a folder of sound checkpoints for each layout.
        known: digests of what this rank holds after each step, under the case's layout.
    """
    folder = scratch / f"{case.layout}-damaged"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(scratch / case.layout, folder)
        dice = random.Random(case.seed)
        step = STEPS if case.resumes_from == "last.ckpt" else int(case.resumes_from[5:-5])
        others = [number for number in range(1, STEPS + 1) if number != step]
        for name in (case.resumes_from, *case.also):
            own = STEPS if name == "last.ckpt" else int(name[5:-5])
            other = scratch / case.layout / f"step={dice.choice([n for n in others if n != own])}.ckpt"
            DAMAGES[case.kind](folder / name, other, dice)
    dist.barrier()
    is_damaged = bool(verify(folder / case.resumes_from))
    path = "last" if case.resumes_from == "last.ckpt" else str(folder / case.resumes_from)
    try:
        look = run(folder, case.layout, path)
    except CheckpointError:
        return "refused"
    except Exception as error:
        return f"RAW ERROR {error!r}"
    assert look is not None
    if look.digest != known.get(look.step):
        return f"WRONG at step {look.step}"
    return f"passed over, step {look.step}" if is_damaged else "harmless"


def outcomes(scratch: Path, layout: str, cases: list[Case]) -> list[str]:
    """All cases of a layout, in the processes of one pool."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run(scratch / layout, layout, None)
    known = {}
    for step in range(1, STEPS + 1):
        look = run(scratch / layout, layout, str(scratch / layout / f"step={step}.ckpt"))
        assert look is not None
        assert look.step == step
        known[step] = look.digest
    assert len(set(known.values())) == STEPS
    return [outcome(case, scratch, known) for case in cases]


def check(trials: int, seed: int, on_ranks: Callable[..., list[Any]], scratch: Path) -> dict[str, Counter[str]]:
    """Run cases; how those of each kind ended.

    Args:
        trials: their number.
        seed: seed of the choice.
        on_ranks: a pool's, ``on_ranks(2, function, *args)``.
        scratch: a folder.

    Raises:
        AssertionError: for each case that was trained on, ended in another error, or differently on two ranks.
    """
    dice = random.Random(seed)
    cases = [draw(dice, number) for number in range(trials)]
    table: dict[str, Counter[str]] = {}
    wrong = []
    for layout in LAYOUTS:
        own = [case for case in cases if case.layout == layout]
        for case, *ends in zip(own, *on_ranks(RANKS, outcomes, scratch, layout, own), strict=True):
            table.setdefault(case.kind, Counter())[ends[0].partition(",")[0]] += 1
            if len(set(ends)) > 1 or ends[0].startswith(("WRONG", "RAW")):
                wrong.append(f"{case}: {ends}")
    assert not wrong, "\n".join(wrong)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, WorkerPool(size=RANKS, timeout=7200) as pool:
        table = check(options.trials, options.seed, pool.run, Path(scratch))
    ends = ("refused", "passed over", "harmless")
    print(f"{'':26}" + "".join(f"{end:>13}" for end in ends))
    for kind, counts in [*table.items(), ("all", sum(table.values(), Counter[str]()))]:
        print(f"{kind:26}" + "".join(f"{counts[end]:13}" for end in ends))


if __name__ == "__main__":
    main()
