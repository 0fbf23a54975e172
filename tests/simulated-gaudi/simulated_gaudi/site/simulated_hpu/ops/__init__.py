"""The ops of ``torch.ops.hpu`` with the bridge's schemas; their bodies are plain torch, and record no gradient."""

from __future__ import annotations

from simulated_hpu.ops import adamw, experts, fp8, norm, rotary, sdpa


def define() -> None:
    """Register the ops with torch; once in a process."""
    for module in (sdpa, norm, rotary, adamw, experts, fp8):
        module.define()
