"""Trials of the devices of this machine, in processes of their own."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_megatron import device as devices
from lightning_megatron.errors import ConfigError
from lightning_megatron.machine.finding import Finding
from lightning_megatron.tools.cli.doctor.children import Child, ending, watch
from lightning_megatron.tools.cli.doctor.op_trials import op_trials

IMPORT, PRODUCT = "import", "product"
"""Trials that must succeed before any other can."""


def trials(tokens: int, limit: float) -> list[Finding]:
    """Findings about the kind of device that a Trainer would take.

    Args:
        tokens: length of the sequence in trials of ops.
        limit: seconds that one trial may take.
    """
    kind = devices.best_available()
    ops = list(op_trials(kind.type))
    try:
        pair = 2 if kind is devices.CPU else min(2, devices.device_count(kind))
    except ConfigError:
        pair = 1
    of_pair = "collectives of 2 processes" if pair == 2 else "no collectives, since there is one device"
    plan = f"{kind.type}: a product, {len(ops)} trials of ops against their references, {of_pair}"
    found = [Finding("device trials", plan)]
    with TemporaryDirectory(prefix="lightning-megatron-doctor-") as name:
        folder, words = Path(name), ["--device", kind.type, "--tokens", str(tokens)]
        found += one_by_one(folder, words, [PRODUCT, *ops], limit)
        if pair == 2 and not any(finding.subject in (IMPORT, PRODUCT) and finding.fault for finding in found):
            found += together(folder, words, limit)
    return found


def one_by_one(folder: Path, words: list[str], names: list[str], limit: float) -> list[Finding]:
    """Findings of trials on one device; a trial that kills its process does not stop the others."""
    found: list[Finding] = []
    waiting = names
    while waiting:
        child = Child(folder, f"trials-{len(waiting)}", [*words, "--names", *waiting])
        hung = watch([child], limit)
        made = child.findings
        done = {finding.subject for finding in made}
        left = [name for name in waiting if name not in done]
        failed = _unfinished(child, done, left)
        found += made
        if failed is not None:
            found.append(Finding(failed, "failed", hung or ending(child)))
        waiting = [name for name in left if name != failed]
        if waiting and any(finding.fault for finding in found if finding.subject in (IMPORT, PRODUCT)):
            found.append(Finding("other trials", "not made", "the ones before must succeed first", harmful=False))
            break
    return found


def _unfinished(child: Child, done: set[str], left: list[str]) -> str | None:
    """Trial during or before which a process has ended; ``None`` if it has run all that it could."""
    if child.is_inside or IMPORT in done:
        last = child.begun or IMPORT
        return None if last in done else last
    return left[0] if left else None


def together(folder: Path, words: list[str], limit: float) -> list[Finding]:
    """Findings of collectives of two devices."""
    store = ["--store", str(folder / "store")]
    children = [Child(folder, f"rank-{rank}", [*words, *store, "--rank", str(rank)]) for rank in (0, 1)]
    hung = watch(children, limit)
    found = list(dict.fromkeys(finding for child in children for finding in child.findings if finding.fault))
    faulty = {finding.subject for finding in found}
    found += [finding for finding in children[0].findings if finding.subject not in faulty]
    ends = [
        f"rank {rank} in {child.begun or IMPORT} {ending(child)}" for rank, child in enumerate(children) if child.status
    ]
    if hung or ends:
        found.append(Finding("collectives", "failed", "; ".join([*([hung] if hung else []), *ends])))
    return found
