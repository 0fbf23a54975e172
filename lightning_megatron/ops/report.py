"""Which versions of ops a model runs, in a form for people and for files."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_megatron.ops.implementation import Choice
from lightning_megatron.ops.registry import OPS, Ops


def op_table(ops: Ops) -> list[dict[str, Any]]:
    """For every op what there is on the device, what would be chosen, and why.

    Args:
        ops: with a device.
    """
    assert ops.device is not None
    rows = []
    for name, op in OPS.items():
        wish = ops.wish(name)
        problem = op.problem(ops.device, wish)
        able = op.candidates(ops.device, wish)
        candidates = [f"{v.name}{'' if reason is None else f' ({reason})'}" for v, reason in able]
        choice = None if problem else ops.choose(name)
        rows.append(
            {
                "op": name,
                "wish": wish,
                "candidates": candidates,
                "variants": list(op.variants),
                "chosen": choice.version if choice else None,
                "why": choice.why if choice else problem.reason,  # type: ignore[union-attr]
            }
        )
    return rows


def choices_of(model: nn.Module) -> dict[str, list[dict[str, Any]]]:
    """What every module of ``model`` chose, by its name; ``fallbacks`` tell what of that could not be kept so far."""
    found = {}
    for name, module in model.named_modules():
        chosen = [value for value in vars(module).values() if isinstance(value, Choice)]
        if chosen:
            found[name] = [
                {"op": c.op, "chosen": c.version, "why": c.why, "fallbacks": dict(c.fallbacks)} for c in chosen
            ]
    return found
