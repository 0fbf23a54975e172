"""Current place of a run, from its action log and hooks of its modules: phase, micro-batch, module, traffic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.moe.router import Router
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import ActionLog, Recorder

LOGITS, ACTIVATIONS = "logits", "activations"
ACTIVATION_GRADIENTS = "activation gradients"

_FORWARDS = {Kind.FORWARD, Kind.TRAINING_STEP}
_BACKWARDS = {Kind.BACKWARD, Kind.INPUT_BACKWARD, Kind.WEIGHT_BACKWARD}
_WORDS = {
    Kind.SETUP: "setup",
    Kind.FORWARD: "forward",
    Kind.TRAINING_STEP: "training step",
    Kind.BACKWARD: "backward",
    Kind.INPUT_BACKWARD: "backward of inputs",
    Kind.WEIGHT_BACKWARD: "backward of weights",
    Kind.OPTIMIZER_STEP: "optimizer step",
}


@dataclass
class Traffic:
    """Collectives or messages of one kind on one axis.

    Attributes:
        number: number of them.
        nbytes: bytes of their results, or of the messages.
    """

    number: int = 0
    nbytes: int = 0


class PlaceLog(ActionLog):
    """Action log that tracks the rank's current phase, and sums up its traffic.

    It replaces the recorder's log (``recorder.main``) before the mesh is created.

    Args:
        recorder: recorder of the rank.

    Attributes:
        group: number of the group of the newest collective.
        collective: kind of the newest collective; ``None`` before the first one.
        ends_forward: function called when a forward ends; ``None`` for none.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder, 0)
        self._phases: list[tuple[int, Kind]] = []
        self._traffic: dict[tuple[int, Kind], Traffic] = defaultdict(Traffic)
        self.group = 0
        self.collective: Kind | None = None
        self.ends_forward: Any = None

    def begin(
        self, kind: int, group: int = 0, size: int = 0, peer: int = -1, waits: bool = True, detail: bool = False
    ) -> int:
        """Log the beginning of an action."""
        token = super().begin(kind, group, size, peer, waits, detail)
        if kind >= Kind.ALL_REDUCE:
            self.group, self.collective = group, Kind(kind)
            found = self._traffic[group, Kind(kind)]
            found.number += 1
            found.nbytes += size
        elif kind in _WORDS:
            self._phases.append((token >> 4, Kind(kind)))
        return token

    def end(self, token: int) -> None:
        """Log the end of an action, and of those nested in it."""
        number = token >> 4
        if any(begun == number for begun, _ in self._phases):
            while True:
                begun, kind = self._phases.pop()
                if kind is Kind.FORWARD and self.ends_forward is not None:
                    self.ends_forward()
                if begun == number:
                    break
        super().end(token)

    @property
    def phase(self) -> Kind | None:
        """The innermost phase."""
        return self._phases[-1][1] if self._phases else None

    def take_traffic(self, mesh: ParallelMesh) -> dict[str, dict[str, Traffic]]:
        """Traffic since the last call, by axis and kind."""
        names = axes_by_number(mesh)
        found: dict[str, dict[str, Traffic]] = {}
        for (group, kind), amount in sorted(self._traffic.items()):
            axis = names.get(group)
            found.setdefault("other" if axis is None else axis.name, {})[kind.name.lower()] = amount
        self._traffic.clear()
        return found


def axes_by_number(mesh: ParallelMesh) -> dict[int, Axis]:
    """Axes of a mesh by their number in the log."""
    return {axis.number: axis for axis in vars(mesh).values() if isinstance(axis, Axis)}


class RunningPlace:
    """Cause of bytes that are allocated now, and name of the current moment."""

    def __init__(self, log: PlaceLog) -> None:
        self._log = log
        self._labels: Mapping[int, str] = {}
        self._stack: list[tuple[nn.Module, str]] = []
        self._handles: list[Any] = []

    def follow_modules(self, module: nn.Module) -> None:
        """Follow the calls of a module's parts, until :meth:`close`."""
        self.close()
        self._labels = {id(part): _label(name) for name, part in module.named_modules()}
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def leave_all(self) -> None:
        """Forget calls that an exception has ended, which is how every stage but the last one ends."""
        self._stack.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        label = self._labels.get(id(module))
        if label is not None:
            self._stack.append((module, label))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        while self._stack and id(module) in self._labels:
            if self._stack.pop()[0] is module:
                break

    @property
    def routed_experts(self) -> int:
        """Number of experts if a router runs now; 0 elsewhere."""
        module = self._stack[-1][0] if self._stack else None
        return module.config.num_experts if isinstance(module, Router) else 0

    def is_choosing(self, scores: torch.Tensor) -> bool:
        """True if a top-k of these scores is a router's choice of experts, not its preceding choice of groups."""
        return bool(self.routed_experts) and scores.shape[-1] == self.routed_experts

    @property
    def is_reducing(self) -> bool:
        """True if the newest collective is a reduce-scatter."""
        return self._log.collective is Kind.REDUCE_SCATTER

    @property
    def _label(self) -> str:
        return self._stack[-1][1] if self._stack else ""

    @property
    def cause(self) -> str:
        """Cause of bytes that are allocated now."""
        phase, label = self._log.phase, self._label
        if phase in _FORWARDS or (phase in _BACKWARDS and label):  # a forward that is computed again
            return LOGITS if label == "head" else f"{ACTIVATIONS}: {label or 'step'}"
        if phase in _BACKWARDS:
            return ACTIVATION_GRADIENTS
        return "other" if phase is None else _WORDS[phase]

    @property
    def moment(self) -> str:
        """Name of this moment."""
        log = self._log
        if log.phase is None:
            return "between steps"
        text = f"step {log.step + 1}, {_WORDS[log.phase]}"
        if log.microbatch >= 0:
            text += f" of micro-batch {log.microbatch} on stage {log.stage}"
        return f"{text}, {self._label}" if self._label else text


def _label(name: str) -> str:
    """``model.layers.3.attention.qkv`` -> ``attention``; the first part of a name outside the layers."""
    parts = [part for part in name.split(".") if part != "model"]
    if parts[:1] == ["layers"]:
        parts = parts[2:] or ["block"]
    return parts[0] if parts and parts[0] else "model"
