"""Print the versions of Intel's packages in this image as constraints for pip; fail if there is no such torch."""

from __future__ import annotations

import sys
from importlib.metadata import distributions

KEPT = ("torch", "habana", "intel-transformer-engine", "numpy", "pyhlml")


def constraints() -> list[str]:
    """``name==version`` of every package that an installation must leave alone."""
    found = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in distributions()}
    if "torch" not in found:
        raise SystemExit("no torch in this image: GAUDI_IMAGE must be one of Intel's with PyTorch")
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name.startswith(KEPT)]


if __name__ == "__main__":
    sys.stdout.write("\n".join(constraints()) + "\n")
