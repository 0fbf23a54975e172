"""What a user wishes of each op, and what a model gets: an argument, like a plan of recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_megatron.config.layout import ModelShape, ParallelLayout
from lightning_megatron.errors import ConfigError, Problem, nearest_names, raise_if_any
from lightning_megatron.ops.adamw import ADAMW
from lightning_megatron.ops.attention import ATTENTION
from lightning_megatron.ops.fp8 import LINEAR_FP8, Fp8Recipe
from lightning_megatron.ops.grouped_linear import GROUPED_LINEAR
from lightning_megatron.ops.implementation import Choice, Function, Op
from lightning_megatron.ops.mixture_of_experts import MIXTURE_OF_EXPERTS
from lightning_megatron.ops.norm import LAYER_NORM, RMS_NORM
from lightning_megatron.ops.rope import ROPE

OPS: Mapping[str, Op] = {
    op.name: op for op in (ATTENTION, RMS_NORM, LAYER_NORM, ROPE, MIXTURE_OF_EXPERTS, GROUPED_LINEAR, LINEAR_FP8, ADAMW)
}
OpWishes = Mapping[str, str] | str | None
"""``{"attention": "off"}``, or ``"attention=off,rms_norm=require"``."""

DEFAULT_FP8 = Fp8Recipe()


def parse_wishes(wishes: OpWishes) -> tuple[dict[str, str], list[Problem]]:
    """Wishes by name of the op, and every fault in them."""
    found: list[Problem] = []
    if wishes is None:
        return {}, found
    if isinstance(wishes, str):
        entries = [part.strip().partition("=") for part in wishes.split(",") if part.strip()]
        pairs = [(name.strip(), value.strip()) for name, _, value in entries]
        for name in sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1}):
            found.append(Problem("ops", wishes, f"{name} is wished for twice"))
        wishes = dict(pairs)
    if not isinstance(wishes, Mapping):
        form = "is neither a mapping of names to wishes nor text like 'attention=off,rms_norm=require'"
        return {}, [Problem("ops", wishes, form, (None,))]
    for name, wish in wishes.items():
        if name not in OPS:
            found.append(Problem("ops", name, "no op that can be chosen", nearest_names(str(name), list(OPS))))
        elif wish not in OPS[name].wishes:
            near = tuple(f"{name}={known}" for known in nearest_names(str(wish), OPS[name].wishes))
            found.append(Problem("ops", f"{name}={wish}", "no way to choose", near))
    known = {name: wish for name, wish in wishes.items() if name in OPS and wish in OPS[name].wishes}
    return known, found


@dataclass(frozen=True)
class Ops:
    """The ops of a model.

    Attributes:
        device: type of the device that the model is on; ``None`` where nobody has said, and every call goes by the
            device of its tensors.
        wishes: of the user.
        fp8: which linear layers ``linear_fp8`` is about, and how they are scaled.

    Raises:
        ConfigError: with every fault of the wishes.
    """

    device: str | None = None
    wishes: OpWishes = None
    fp8: Fp8Recipe = DEFAULT_FP8
    _wished: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        wished, found = parse_wishes(self.wishes)
        raise_if_any(found + self.fp8.problems())
        object.__setattr__(self, "_wished", wished)

    def wish(self, op: str) -> str:
        """What is wished of an op."""
        return self._wished.get(op, OPS[op].default)

    def choose(self, op: str, unless: str | None = None) -> Choice:
        """The version of an op for one module.

        Args:
            op: its name.
            unless: why this module cannot use a kernel of the device's own, if it cannot.

        Raises:
            ConfigError: where one is required and there is none.
        """
        if self.device is None and self.wish(op) == "auto":
            return Choice(op, "by device", "nobody has said where the model will be", OPS[op].run)
        return OPS[op].choose(self.device or "", self.wish(op), unless)

    def instead(self, op: str, version: str, why: str, run: Function) -> Choice:
        """The choice of a module that computes an op in a way of its own.

        Raises:
            ConfigError: where a kernel of the device's own is required.
        """
        if self.wish(op) == "require":
            raise ConfigError([Problem("ops", f"{op}=require", why, (f"{op}=auto", f"{op}=off"))])
        return Choice(op, version, why, run)

    def problems(self) -> list[Problem]:
        """Kernels that are required in vain on this device."""
        if self.device is None:
            return []
        found = (OPS[name].problem(self.device, wish) for name, wish in self._wished.items())
        return [problem for problem in found if problem is not None]

    def model_problems(self, layout: ParallelLayout, model: ModelShape) -> list[Problem]:
        """What does not go together with a model or a layout."""
        wish = self.wish("linear_fp8")
        if wish == "off":
            return []
        found, off = [], ("linear_fp8=off",)
        if getattr(model, "num_experts", 0):
            found.append(Problem("ops", f"linear_fp8={wish}", "experts multiply in the dtype of their weights", off))
        if layout.cp > 1:
            reason = f"Intel's own fp8 is for cp=1, and ours has not been tried with cp={layout.cp}"
            found.append(Problem("ops", f"linear_fp8={wish}", reason, off))
        return found


ANY_DEVICE = Ops()


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
