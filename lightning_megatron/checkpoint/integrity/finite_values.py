"""Parameters and optimizer state that are NaN or infinite: neither saved nor loaded."""

from __future__ import annotations

from collections.abc import Collection

from lightning_megatron.checkpoint.integrity.fault import listed
from lightning_megatron.checkpoint.tensors.fragment import Fragment
from lightning_megatron.checkpoint.tensors.keys import Key, model_name
from lightning_megatron.checkpoint.tensors.state_dict import State
from lightning_megatron.device.finite import amount, not_finite
from lightning_megatron.errors import CheckpointError


def refuse_nonfinite(state: State, params: Collection[str]) -> None:
    """Check this rank's parameters, which have the names ``params``, and optimizer state; buffers may hold any values.

    Raises:
        CheckpointError: naming each that is not finite.
    """
    held = {
        key: value
        for key, value in state.items()
        if isinstance(value, Fragment) and (Key.parse(key).is_optimizer or model_name(key) in params)
    }
    chunks = {(key, number): chunk.data for key, value in held.items() for number, chunk in enumerate(value.chunks)}
    bad = not_finite(chunks.items())
    if bad:
        raise CheckpointError(
            "it would hold values that are NaN or infinite:\n"
            + listed([f"{key}: {amount(chunks[key, number])}" for key, number in bad])
        )
