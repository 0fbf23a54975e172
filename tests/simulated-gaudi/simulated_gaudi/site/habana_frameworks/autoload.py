"""Entry point that ``import torch`` calls at its end, since this package is an extension of torch."""

from __future__ import annotations

import os


def __autoload() -> None:
    from simulated_hpu.native_extension import native
    from simulated_hpu.settings import settings

    # In the lazy mode too, where the real one waits for its import: torch looks for hooks only once. Until the bridge
    # is imported they say that there is no HPU.
    native()
    if not settings().is_lazy and os.environ.get("PT_HPU_AUTOLOAD", "1") == "1":
        import habana_frameworks.torch  # noqa: F401
