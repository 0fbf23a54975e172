"""Versions of Intel's packages in this image, which an installation must leave alone.

``keep.py`` prints them as constraints for pip and fails if there is no torch. ``keep.py --check FILE`` fails if a
package of such a file is not what is installed now; packages that are new are no fault.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

KEPT = ("torch", "habana", "intel-transformer-engine", "numpy", "pyhlml")


def installed() -> dict[str, str]:
    """Version of every distribution, by its name; of two with one name that of the first, which Python imports."""
    found = reversed(list(distributions()))
    return {d.metadata["Name"].lower().replace("_", "-"): d.version for d in found}


def constraints() -> list[str]:
    """``name==version`` of every package that an installation must leave alone."""
    found = installed()
    if "torch" not in found:
        raise SystemExit("no torch in this image: GAUDI_IMAGE must be one of Intel's with PyTorch")
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name.startswith(KEPT)]


def changed(lines: Sequence[str]) -> list[str]:
    """The constraints that no longer hold, each with the version that is installed now."""
    found = installed()
    pairs = [line.split("==", 1) for line in lines if line.strip()]
    kept = [(name, version.strip(), found.get(name)) for name, version in pairs]
    return [f"{name} was {before} and is now {now or 'gone'}" for name, before, now in kept if now != before]


def main(words: Sequence[str]) -> None:
    """Print the constraints, or check a file of them.

    Raises:
        SystemExit: for other arguments, an image without torch, or packages that have changed.
    """
    if not words:
        sys.stdout.write("\n".join(constraints()) + "\n")
    elif len(words) == 2 and words[0] == "--check":
        found = changed(Path(words[1]).read_text().splitlines())
        if found:
            raise SystemExit("the installation has replaced packages of the image:\n" + "\n".join(found))
    else:
        raise SystemExit("usage: keep.py [--check FILE]")


if __name__ == "__main__":
    main(sys.argv[1:])
