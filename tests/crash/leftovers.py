"""Ends jobs of every kind by a signal, to their first process or to a child, and looks at what they leave.

Afterwards there must be no process of the job, nothing of it in shared memory, no final name with half a content, and
nothing that the next run of the same job does not clear. Processes are known by a variable of the job's environment,
which all of its children have; temporary files by a folder of the job's own.

Run: ``python tests/crash/leftovers.py [--trials 16] [--seed 0] [--kind NAME]``; it needs ``/proc``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.checkpoint import verify
from lightning_megatron.machine.job_environment import own_environment

MARK = "LEFTOVERS_JOB"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE, GONE_AFTER = 240.0, 40.0  # seconds

FIT = """
import sys
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_megatron import GPTModule, MegatronStrategy

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "ffn_hidden_size": 64}

if __name__ == "__main__":
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    tokens = torch.randint(64, (4000, 9))
    rows = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    workers, steps = int(sys.argv[1]), int(sys.argv[2])
    loader = torch.utils.data.DataLoader(rows, batch_size=2, num_workers=workers, persistent_workers=workers > 0)
    kept = {"save_last": "link", "save_top_k": 2, "monitor": "step", "mode": "max"}
    saver = ModelCheckpoint("run", filename="{step}", every_n_train_steps=4, **kept)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(tp=2, async_save=True), max_steps=steps,
                      callbacks=[saver], logger=False, enable_progress_bar=False, enable_model_summary=False,
                      use_distributed_sampler=False)
    trainer.fit(GPTModule("llama-tiny", **SIZES), loader, ckpt_path="last")
"""
COMMAND = """
import sys
from lightning_megatron.tools.cli.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    Attributes:
        words: the command, to be ended in mid-work.
        again: the command that is then to end well, and to clear what is left.
        begun: True once there is something to interrupt.
    """

    words: tuple[str, ...]
    again: tuple[str, ...]
    begun: Callable[[Path], bool]


def _saved(home: Path) -> bool:
    return any(home.glob("run/step=*"))


def _written(home: Path) -> bool:
    return any(path.stat().st_size > 1 << 16 for path in home.glob("out*.bin.tmp-*"))


_PREPROCESS = (
    "command.py", "preprocess", "--input", "corpus.jsonl", "--output-prefix", "out", "--tokenizer-type",
    "NullTokenizer", "--vocab-size", "100",
)  # fmt: skip
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
KINDS: dict[str, Kind] = {
    "fit": Kind(("fit.py", "0", "100000"), ("fit.py", "0", "8"), _saved),
    "fit with loading workers": Kind(("fit.py", "1", "100000"), ("fit.py", "0", "8"), _saved),
    "torchrun": Kind((*_TORCHRUN, "fit.py", "1", "100000"), ("fit.py", "0", "8"), _saved),
    "preprocess": Kind((*_PREPROCESS, "--workers", "2"), _PREPROCESS, _written),
}


def processes(mark: str) -> list[int]:
    """Ids of the processes that have a mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] if state != "Z" else []
        except OSError:  # it has just ended, or is somebody else's
            continue
    return sorted(found)


def ignores(process: int, number: signal.Signals) -> bool:
    """True if a process ignores a signal, as Python's own helpers and workers that wait for their rank do."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(mask >> (number - 1) & 1)


def shared_memory(ids: set[int]) -> list[str]:
    """Segments named after processes."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return [name for name in names if any(str(one) in name.split("_") for one in ids)]


def start(kind: Kind, words: tuple[str, ...], home: Path, mark: str) -> subprocess.Popen[bytes]:
    (home / "tmp").mkdir(exist_ok=True)
    environment = own_environment(**{MARK: mark}, TMPDIR=str(home / "tmp"), OMP_NUM_THREADS="1")
    with (home / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *words], cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def prepare(home: Path) -> None:
    home.mkdir()
    (home / "fit.py").write_text(FIT)
    (home / "command.py").write_text(COMMAND)
    words = " ".join(str(n % 90) for n in range(2000))
    (home / "corpus.jsonl").write_text("\n".join(json.dumps({"text": words}) for _ in range(4000)))


def trial(name: str, number: signal.Signals, hits_child: bool, home: Path, dice: random.Random) -> list[str]:
    """End a job by a signal; what it leaves that it should not.

    Args:
        name: name of the kind.
        number: the signal.
        hits_child: True to send it to one of the children, if there is one.
        home: folder to make.
        dice: random numbers for the moment and the child.
    """
    kind, mark = KINDS[name], uuid.uuid4().hex
    prepare(home)
    job = start(kind, kind.words, home, mark)
    _wait(lambda: kind.begun(home) or job.poll() is not None)
    assert job.poll() is None, (home / "log").read_text()[-3000:]
    time.sleep(dice.uniform(0.0, 1.0))
    seen = set(processes(mark))
    victims = [one for one in sorted(seen - {job.pid}) if hits_child and not ignores(one, number)]
    os.kill(dice.choice(victims) if victims else job.pid, number)
    ends = _wait(lambda: not processes(mark), GONE_AFTER)
    seen |= set(processes(mark))
    wrong = [] if ends else [f"processes {_described(processes(mark))}"]
    for one in processes(mark):
        os.kill(one, signal.SIGKILL)
    job.wait(PATIENCE)
    wrong += [f"shared memory: {shared}" for shared in shared_memory(seen)]
    wrong += [f"{path.name}: {verify(path)[0]}" for path in home.glob("run/*.ckpt") if verify(path)]
    wrong += [f"{path.name} without its other half" for path in home.glob("out*.bin") if not _other(path).exists()]
    again = start(kind, kind.again, home, mark)
    if again.wait(PATIENCE):
        wrong.append(f"the next run ends with {again.returncode}: {(home / 'log').read_text()[-1500:]}")
    wrong += [f"left by both: {path.relative_to(home)}" for path in _unfinished(home)]
    return wrong


def _other(path: Path) -> Path:
    return path.with_suffix(".idx")


def _unfinished(home: Path) -> list[Path]:
    return [*home.glob("**/.unfinished/*"), *home.glob("**/*.tmp-*"), *home.glob("**/*.saving"), *home.glob("**/*.tmp")]


def _described(ids: list[int]) -> list[str]:
    found = []
    for one in ids:
        try:
            words = Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found.append(f"{one} {words[:100]}")
    return found


def _wait(what: Callable[[], bool], patience: float = PATIENCE) -> bool:
    deadline = time.monotonic() + patience
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def run(trials: int, seed: int, scratch: Path, kind: str = "", tell: Callable[[str], None] = print) -> list[str]:
    """Some trials, one after another; everything that was left.

    Args:
        trials: their number; kinds, signals and victims take turns.
        seed: seed of the order and the moments.
        scratch: folder for the jobs.
        kind: a part of the name of the kinds to take.
        tell: takes a line for each trial.
    """
    dice = random.Random(seed)
    names = [name for name in KINDS if kind in name]
    pairs = [(name, number, child) for number in SIGNALS for child in (False, True) for name in names]
    dice.shuffle(pairs)
    found = []
    for count in range(trials):
        name, number, child = pairs[count % len(pairs)]
        home = scratch / f"trial-{count}"
        wrong = trial(name, number, child, home, dice)
        temporary = sorted(path.name for path in (home / "tmp").iterdir())
        title = f"{name}, {number.name} to {'a child' if child else 'the first process'}"
        tell(f"{count}: {title}: {wrong or 'nothing left'}" + (f"; in TMPDIR: {temporary}" if temporary else ""))
        found += [f"{title}: {what}" for what in wrong]
        shutil.rmtree(home)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(bool(run(options.trials, options.seed, Path(scratch), options.kind)))


if __name__ == "__main__":
    main()
