"""Checkpoints at paths and in folders: the manifest of one, and the newest that a run can resume from.

The newer checkpoint is the one with more progress by its own manifest: times of files do not survive a copy, and a link
may lead to an older checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED, Unfinished, link_end, unfinished_of
from lightning_megatron.checkpoint.directory.leftovers import recover
from lightning_megatron.checkpoint.formats.meta import NOTE, read_meta
from lightning_megatron.checkpoint.integrity.manifest import MANIFEST, Manifest, Progress, read_manifest
from lightning_megatron.checkpoint.select.verify import size_faults
from lightning_megatron.errors import CheckpointError, MissingCheckpointError, nearest_names

State = Literal["good", "damaged", "weights", "interrupted"]


@dataclass(frozen=True)
class Candidate:
    """An entry of a folder with the name of a checkpoint.

    Attributes:
        path: its path.
        progress: progress of the run; ``None`` if it is unknown.
        state: ``"good"`` as far as lengths of files show, ``"damaged"``, ``"weights"`` without optimizer state, or
            ``"interrupted"`` for a link to a save that never completed.
        reason: reason why no run can resume from it; empty if one can.
    """

    path: Path
    progress: Progress | None = None
    state: State = "good"
    reason: str = ""


def candidates(places: Iterable[tuple[Path, str]], also: Iterable[Path] = ()) -> list[Candidate]:
    """Entries with the name of a checkpoint, the newest first, and those of unknown progress at the end.

    Ties go to ``last*``: Lightning never deletes it under ``save_top_k``. A checkpoint that a crash left renamed while
    it was being replaced gets its name back. Call it on one rank.

    Args:
        places: folders, which are searched with all folders in them, and the suffix of names there.
        also: further paths, which need not exist.
    """
    paths = [path for folder, suffix in places for path in _recovered(folder, suffix)]
    paths += [path for path in also if os.path.lexists(path)]
    return sorted(map(_candidate, dict.fromkeys(paths)), key=_place)


def newest_good(found: Sequence[Candidate]) -> tuple[Candidate | None, list[Candidate]]:
    """The first checkpoint that a run can resume from, and the skipped ones that are, or may be, newer."""
    best = next((candidate for candidate in found if candidate.state == "good"), None)
    damaged = [candidate for candidate in found if candidate.state == "damaged"]
    if best is None or best.progress is None:
        return best, damaged
    own, reason = best.progress, "a single file with more steps, which does not say whether its run was later"
    passed = [candidate for candidate in damaged if candidate.progress is None or candidate.progress >= own]
    files = [candidate for candidate in found if candidate.state == "good" and _is_file_beyond(own, candidate.progress)]
    return best, passed + [replace(candidate, reason=reason) for candidate in files]


def _is_file_beyond(own: Progress, other: Progress | None) -> bool:
    """True if ``other`` is of a single file, without a generation, and has more steps than ``own``, which has one."""
    return own.generation != 0 and other is not None and other.generation == 0 and other.step > own.step


def _recovered(top: Path, suffix: str) -> Iterator[Path]:
    seen = set()
    # A checkpoint name with a slash, such as a metric's, makes subfolders; some may be links to other disks by now.
    for folder, inner, _ in os.walk(top, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            inner.clear()
            continue
        seen.add(real)
        unfinished = Path(folder) / UNFINISHED
        for entry in sorted(unfinished.iterdir()) if unfinished.is_dir() else ():
            if (name := Unfinished.parse(entry)) is not None and name.kind == "replaced":
                recover(name.path)
        yield from (entry for entry in sorted(Path(folder).iterdir()) if entry.suffix == suffix)
        inner[:] = [name for name in inner if name != UNFINISHED and Path(name).suffix != suffix]


def _place(candidate: Candidate) -> tuple[bool, int, int, bool, str]:
    known = candidate.progress or Progress(0, 0)
    is_last = candidate.path.name.startswith("last")
    return candidate.progress is None, -known.generation, -known.step, not is_last, candidate.path.name


def _candidate(path: Path) -> Candidate:
    if path.is_symlink() and not path.exists():
        target = link_end(path, os.readlink(path))
        if any(name.kind == "saving" for _, name in unfinished_of(target)):
            return Candidate(path, None, "interrupted", f"a link to {target.name}, whose save was interrupted")
        return Candidate(path, None, "damaged", f"a link to {target.name}, which does not exist")
    try:
        return _file(path) if path.is_file() else _directory(path)
    except Exception as error:  # a damaged file may raise anything
        return Candidate(path, None, "damaged", str(error))


def _directory(path: Path) -> Candidate:
    manifest = locate(path)
    if faults := size_faults(path, manifest):
        return Candidate(path, manifest.progress, "damaged", str(faults[0]))
    if manifest.progress is not None:
        return Candidate(path, manifest.progress)
    return _without_progress(path, read_meta(path, weights_only=True))


def _file(path: Path) -> Candidate:
    """Candidate for a single file of Lightning's."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # it is a pickle: any error may come out of it
        raise CheckpointError(f"the file cannot be read: {error}") from None
    content = content if isinstance(content, dict) else {}
    if (told := content.get(NOTE, {}).get("progress")) is not None:
        return Candidate(path, Progress(*told))
    return _without_progress(path, content)


def _without_progress(path: Path, meta: Mapping[str, object]) -> Candidate:
    """Candidate for a checkpoint saved by an earlier version, without this strategy, or outside a run."""
    if "optimizer_states" not in meta:
        return Candidate(path, None, "weights", "it holds only weights, and no run can resume from them")
    step = meta.get("global_step")
    return Candidate(path, Progress(0, step) if type(step) is int else None)


def locate(path: Path) -> Manifest:
    """The manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: if there is none, saying what is there and what to do.
    """
    if path.parent.name == UNFINISHED:
        raise CheckpointError("it was never completed: a save was interrupted, or is under way. Use another one")
    if path.is_file():
        raise CheckpointError("it is a single file, which has no manifest")
    if not path.is_dir():
        raise MissingCheckpointError(absent(path))
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"it is no checkpoint of this package: it has no {MANIFEST}{_looks_like(path)}")
    try:
        return read_manifest(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST}: {error}") from None


def absent(path: Path) -> str:
    """Error text for a path without a checkpoint, with the existing ones of similar names."""
    text = "it does not exist (Checkpoint file not found)"
    if not path.parent.is_dir():
        return f"{text}, nor does {path.parent}"
    if any(name.kind == "saving" for _, name in unfinished_of(path)):
        text += "; a save under this name was interrupted before it was complete"
    others = sorted(entry.name for entry in path.parent.iterdir() if (entry / MANIFEST).is_file())
    if not others:
        return f"{text}; {path.parent} holds no checkpoint"
    return f"{text}; checkpoints there: {', '.join(nearest_names(path.name, others)[:5])}"


def _looks_like(path: Path) -> str:
    names = {entry.name for entry in path.iterdir()}
    if ".metadata" in names:
        return ", but files of torch.distributed.checkpoint: it was written by another program"
    if "config.json" in names:
        return ", but a config.json: it looks like a Hugging Face model"
    return ""
