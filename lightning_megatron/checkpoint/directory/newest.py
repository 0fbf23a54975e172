"""The newest checkpoint of some folders that a run can go on from.

Newer is what has come further, by what the checkpoints say of themselves: times of files do not survive a copy, and a
link may lead to an older one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lightning_megatron.checkpoint.directory.atomic_dir import UNFINISHED, Unfinished, link_end, unfinished_of
from lightning_megatron.checkpoint.directory.leftovers import recover
from lightning_megatron.checkpoint.directory.locate import locate
from lightning_megatron.checkpoint.integrity.manifest import Progress
from lightning_megatron.checkpoint.integrity.verify import size_faults
from lightning_megatron.checkpoint.meta import read_meta
from lightning_megatron.errors import CheckpointError

State = Literal["good", "damaged", "weights", "interrupted"]


@dataclass(frozen=True)
class Candidate:
    """An entry of a folder with the name of a checkpoint.

    Attributes:
        path: where it is.
        progress: of the run; ``None`` where nothing says it.
        state: good as far as lengths of files show; damaged; weights alone, with which no run goes on; or a link to a
            save that was interrupted, so that nothing is lost.
        reason: why no run can go on from it; empty if one can.
    """

    path: Path
    progress: Progress | None = None
    state: State = "good"
    reason: str = ""


def candidates(places: Iterable[tuple[Path, str]], also: Iterable[Path] = ()) -> list[Candidate]:
    """All that have the name of a checkpoint, the newest first, and those at the end that do not say how new they are.

    Of equally new ones a name that begins with ``last`` comes first: Lightning removes it by rules of its own. What a
    crash has left aside while it was being replaced gets its name back. Call it on one rank.

    Args:
        places: folders, and how names in them end.
        also: further paths, which need not exist.
    """
    paths = [path for folder, suffix in places for path in _recovered(folder, suffix)]
    paths += [path for path in also if os.path.lexists(path)]
    return sorted(map(_candidate, dict.fromkeys(paths)), key=_place)


def newest_good(found: Sequence[Candidate]) -> tuple[Candidate | None, list[Candidate]]:
    """The first that a run can go on from, and the damaged ones that are newer, or may be."""
    best = next((candidate for candidate in found if candidate.state == "good"), None)
    damaged = [candidate for candidate in found if candidate.state == "damaged"]
    if best is None or best.progress is None:
        return best, damaged
    own = best.progress
    return best, [candidate for candidate in damaged if candidate.progress is None or candidate.progress >= own]


def _recovered(folder: Path, suffix: str) -> Iterator[Path]:
    if not folder.is_dir():
        return
    unfinished = folder / UNFINISHED
    for entry in sorted(unfinished.iterdir()) if unfinished.is_dir() else ():
        if (name := Unfinished.parse(entry)) is not None and name.kind == "replaced":
            recover(name.path)
    yield from (entry for entry in sorted(folder.iterdir()) if entry.suffix == suffix)


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
    except Exception as error:  # a damaged file raises what it likes
        return Candidate(path, None, "damaged", str(error))


def _directory(path: Path) -> Candidate:
    manifest = locate(path)
    if faults := size_faults(path, manifest):
        return Candidate(path, manifest.progress, "damaged", str(faults[0]))
    if manifest.progress is not None:
        return Candidate(path, manifest.progress)
    return _without_progress(path, read_meta(path, weights_only=True))


def _file(path: Path) -> Candidate:
    """A single file of Lightning's."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # it is a pickle: any error may come out of it
        raise CheckpointError(f"the file cannot be read: {error}") from None
    return _without_progress(path, content if isinstance(content, dict) else {})


def _without_progress(path: Path, meta: Mapping[str, object]) -> Candidate:
    """Progress of a checkpoint saved by an earlier version, without this strategy, or without a run."""
    if "optimizer_states" not in meta:
        return Candidate(path, None, "weights", "it holds weights alone, and no run can go on from them")
    step = meta.get("global_step")
    return Candidate(path, Progress(0, step) if type(step) is int else None)
