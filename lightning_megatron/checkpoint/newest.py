"""Which checkpoint to go on with where the one that was asked for is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lightning_megatron.checkpoint.fault import Fault
from lightning_megatron.checkpoint.locate import locate
from lightning_megatron.checkpoint.manifest import MANIFEST
from lightning_megatron.checkpoint.publish import recover
from lightning_megatron.checkpoint.together import CheckpointError
from lightning_megatron.checkpoint.verify import size_faults, verify


def newest_good(
    path: Path, *, check: Literal["sizes", "hashes"] = "sizes"
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The checkpoint at ``path`` if it is good, else the newest good one beside it. Call it on one rank.

    Of two checkpoints the newer one is whose manifest, the last file of every save, was written later.

    Args:
        path: what was asked for.
        check: compare the length of every file with the manifest, or everything that ``verify`` looks at.

    Returns:
        The checkpoint (``None`` if there is no good one), and each that was passed over with why.
    """
    recover(path)
    beside = {entry for entry in path.parent.iterdir() if entry.suffix == path.suffix} - {path}
    written = {entry: (entry / MANIFEST).stat().st_mtime_ns for entry in beside if (entry / MANIFEST).is_file()}
    passed: list[tuple[Path, str]] = []
    for candidate in (path, *sorted(written, key=lambda entry: (written[entry], entry.name), reverse=True)):
        what = _first_fault(candidate, check)
        if what is None:
            return candidate, passed
        passed.append((candidate, what))
    return None, passed


def _first_fault(path: Path, check: Literal["sizes", "hashes"]) -> str | None:
    try:
        manifest = locate(path)
    except CheckpointError as error:
        return str(error)
    faults: list[Fault] = size_faults(path, manifest) or (verify(path) if check == "hashes" else [])
    return str(faults[0]) if faults else None
