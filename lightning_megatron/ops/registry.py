"""All ops and the user's mode for each, in one object that models take as an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_megatron.config.layout import ModelShape, ParallelLayout
from lightning_megatron.errors import ConfigError, Problem, nearest_names, raise_if_any
from lightning_megatron.ops.adamw import ADAMW
from lightning_megatron.ops.attention import ATTENTION
from lightning_megatron.ops.fp8 import LINEAR_FP8, Fp8Recipe
from lightning_megatron.ops.grouped_linear import GROUPED_LINEAR
from lightning_megatron.ops.implementation import REFERENCE, Function, Op, OpChoice
from lightning_megatron.ops.mixture_of_experts import MIXTURE_OF_EXPERTS
from lightning_megatron.ops.norm import LAYER_NORM, RMS_NORM
from lightning_megatron.ops.rope import ROPE

SELECTABLE: Mapping[str, Op[Any]] = {
    each.name: each
    for each in (ATTENTION, RMS_NORM, LAYER_NORM, ROPE, MIXTURE_OF_EXPERTS, GROUPED_LINEAR, LINEAR_FP8, ADAMW)
}
"""All names that ``ops=`` accepts."""
OPS: Mapping[str, Op[Function]] = {name: each for name, each in SELECTABLE.items() if each.run is not None}
"""Those that are functions of tensors."""

OpModes = Mapping[str, str] | str | None
"""``{"attention": "off"}``, or ``"attention=off,rms_norm=require"``."""

DEFAULT_FP8 = Fp8Recipe()


def parse_op_modes(modes: OpModes) -> tuple[dict[str, str], list[Problem]]:
    """Modes by name of the op, and every fault in them."""
    known: dict[str, str] = {}
    found: list[Problem] = []
    if modes is None:
        return known, found
    if isinstance(modes, str):
        entries = [part.strip().partition("=") for part in modes.split(",") if part.strip()]
        pairs = [(name.strip(), value.strip()) for name, _, value in entries]
        for name in sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1}):
            found.append(Problem("ops", modes, f"{name} is given twice"))
        modes = dict(pairs)
    if not isinstance(modes, Mapping):
        form = "is neither a mapping of names to modes nor text like 'attention=off,rms_norm=require'"
        return {}, [Problem("ops", modes, form, (None,))]
    for name, mode in modes.items():
        if name not in SELECTABLE:
            found.append(Problem("ops", name, "there is no such op", nearest_names(str(name), list(SELECTABLE))))
        elif mode not in SELECTABLE[name].modes:
            near = tuple(f"{name}={other}" for other in nearest_names(str(mode), SELECTABLE[name].modes))
            found.append(Problem("ops", f"{name}={mode}", "there is no such mode", near))
        else:
            known[name] = mode
    return known, found


@dataclass(frozen=True)
class Ops:
    """The ops of a model.

    Attributes:
        device: type of the model's device; ``None`` if it is not known yet: then each call chooses by the device of
            its tensors.
        modes: the user's modes.
        fp8: linear layers to which ``linear_fp8`` applies, and the scaling of their tensors.

    Raises:
        ConfigError: for every fault of the modes.
    """

    device: str | None = None
    modes: OpModes = None
    fp8: Fp8Recipe = DEFAULT_FP8
    _given: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given, found = parse_op_modes(self.modes)
        raise_if_any(found + self.fp8.problems())
        object.__setattr__(self, "_given", given)

    def mode(self, op: str) -> str:
        """The mode of an op: the user's, or its default."""
        return self._given.get(op, SELECTABLE[op].default)

    def choose(self, op: str | Op[Any], unless: str | None = None) -> OpChoice[Any]:
        """The implementation of an op for one module.

        Args:
            op: name of the op, or an op of that name with other implementations.
            unless: reason why this module cannot use an implementation made for the device, if there is one.

        Raises:
            ConfigError: if one is required and none is usable.
        """
        known = SELECTABLE[op] if isinstance(op, str) else op
        mode = self.mode(known.name)
        if self.device is None and mode == "auto":
            name, run = (REFERENCE, known.reference) if known.run is None else ("by device", known.run)
            return OpChoice(known.name, name, _UNKNOWN_DEVICE, run)
        return known.choose(self.device or "", mode, unless)

    def custom(self, op: str, implementation: str, why: str, run: Function) -> OpChoice[Function]:
        """The choice of a module that has its own implementation of an op.

        Raises:
            ConfigError: if one made for the device is required.
        """
        if self.mode(op) == "require":
            raise ConfigError([Problem("ops", f"{op}=require", why, (f"{op}=auto", f"{op}=off"))])
        return OpChoice(op, implementation, why, run)

    def problems(self) -> list[Problem]:
        """Ops that are required and not available on this device."""
        if self.device is None:
            return []
        found = (SELECTABLE[name].problem(self.device, mode) for name, mode in self._given.items())
        return [problem for problem in found if problem is not None]

    def model_problems(
        self, layout: ParallelLayout, model: ModelShape, dtype: torch.dtype | None = None
    ) -> list[Problem]:
        """Modes that a model or a layout does not support.

        Args:
            model: shape of the model.
            dtype: dtype in which the model computes; ``None`` if it is not known.
        """
        mode = self.mode(LINEAR_FP8.name)
        if mode == "off":
            return []
        found, off = [], ("linear_fp8=off",)
        if layout.cp > 1:
            reason = f"Intel's own fp8 supports cp=1 only, and ours has not been tested with cp={layout.cp}"
            found.append(Problem("ops", f"linear_fp8={mode}", reason, off))
        if dtype == torch.float16:
            reason = "casts to fp8 take bf16 and fp32, not fp16: set precision='bf16-mixed', or leave it out"
            found.append(Problem("ops", f"linear_fp8={mode}", reason, off))
        return found


ANY_DEVICE = Ops()
_UNKNOWN_DEVICE = "the model's device is not known yet"


def op_table(ops: Ops) -> list[dict[str, Any]]:
    """A row for every op: its implementations on the device, the one that would be chosen, and the reason.

    Args:
        ops: modes, with a device.
    """
    assert ops.device is not None
    rows = []
    for name, each in SELECTABLE.items():
        mode = ops.mode(name)
        problem = each.problem(ops.device, mode)
        candidates = [
            f"{implementation.name}{'' if reason is None else f' ({reason})'}"
            for implementation, reason in each.candidates(ops.device, mode)
        ]
        usable, why = ([], problem.reason) if problem else each.usable(ops.device, mode)
        chosen = usable[0].name if usable else REFERENCE
        rows.append(
            {
                "op": name,
                "mode": mode,
                "candidates": candidates,
                "variants": list(each.variants),
                "chosen": None if problem else chosen,
                "why": why,
            }
        )
    return rows


def choices_of(model: nn.Module) -> dict[str, list[dict[str, Any]]]:
    """The choices of every module of ``model``, by its name; ``fallbacks``: unsupported calls so far, by reason."""
    found = {}
    for name, module in model.named_modules():
        chosen = [value for value in vars(module).values() if isinstance(value, OpChoice)]
        if chosen:
            found[name] = [
                {"op": each.op, "chosen": each.implementation, "why": each.why, "fallbacks": dict(each.fallbacks)}
                for each in chosen
            ]
    return found
