"""State of a user's optimizer for the main parameters of a rank, in terms of parameters: for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.main_values import MainParam, MainValues
from lightning_megatron.optim.optimizer_state import STEP, PieceState, allocate_state, load_piece, pieces_of, state_like
from lightning_megatron.params import FlatPiece

_KERNELS = frozenset({"foreach", "fused", "capturable"})
"""Settings of torch's optimizers that say how, and not what, is computed."""


BESIDE = "*"
"""In the place of a parameter's name: state that belongs to none."""


class HeldState:
    """Main parameters by group of a torch optimizer, and its state of them.

    Attributes:
        optimizer: the user's.
        is_flat: whether main parameters are flat shares of buckets; else each has the shape of its parameter.

    Args:
        optimizer: the user's.
        is_flat: see above.
    """

    def __init__(self, optimizer: Optimizer, is_flat: bool) -> None:
        self.optimizer = optimizer
        self.is_flat = is_flat
        self._mains: dict[Bucket, MainValues] = {}
        self._place: dict[int, int] = {}
        self._untrue: list[nn.Parameter] = []

    def _move_state(self, mains: Mapping[Bucket, MainValues]) -> None:
        """Some optimizers allocate when they are made (Adagrad): the same start, in the new shape."""
        state = self.optimizer.state
        self._place = {id(p): n for group in self.optimizer.param_groups for n, p in enumerate(group["params"])}
        for bucket, main in mains.items():
            begun = [p for p in self.optimizer.param_groups[bucket.key.group]["params"] if state.get(p)]
            for part in main.parts:
                if part.owned is not None and state.get(part.owned.param):
                    state[part.param] = _in_dtype(part.param, state[part.owned.param], part.owned.param)
                elif part.owned is None and begun:
                    state[part.param] = state_like(part.param, state[begun[0]], begun[0])
        kept = {id(part.param) for main in mains.values() for part in main.parts}
        for slot in (slot for bucket in mains for slot in bucket.slots if id(slot.owned.param) not in kept):
            state.pop(slot.owned.param, None)

    def _parts_by_group(self) -> list[list[MainParam]]:
        """The main parameters of each group; those of whole parameters in the user's order."""
        groups: list[list[MainParam]] = [[] for _ in self.optimizer.param_groups]
        for bucket, main in self._mains.items():
            groups[bucket.key.group] += main.parts
        for parts in groups:
            parts.sort(key=lambda part: 0 if part.owned is None else self._place[id(part.owned.param)])
        return groups

    @property
    def main_params(self) -> list[nn.Parameter]:
        """This rank's main parameters: flat, one for each bucket and more where gradients were missing; or whole."""
        return [part.param for main in self._mains.values() for part in main.parts]

    def _mains_by_group(self) -> list[list[nn.Parameter]]:
        return [[part.param for part in parts] for parts in self._parts_by_group()]

    def init_state(self, *, apart: bool = False) -> None:
        """Allocate an element-wise optimizer's state where it has none, so that a checkpoint can be loaded into it.

        Args:
            apart: give every parameter a step count of its own until :meth:`refresh_params`, for a checkpoint in which
                they differ.
        """
        if self.is_flat:
            self._refuse_state_beside_parameters()
            self._untrue = [param for param in self.main_params if not self.optimizer.state.get(param)]
            allocate_state(self.optimizer, self._mains_by_group())
            for main in self._mains.values() if apart else ():
                main.spread(self.optimizer)

    def forget_untrue_state(self) -> None:
        """Take away what :meth:`init_state` has made: an optimizer may take its first step in another way.

        For when a checkpoint has been saved, or one has been loaded that was saved before the first step.
        """
        for param in self._untrue:
            self.optimizer.state.pop(param, None)
        self._untrue = []

    def _refuse_state_beside_parameters(self) -> None:
        beside = [str(key) for key in self.optimizer.state if not isinstance(key, Tensor)]
        if beside:
            reason = (
                f"it keeps {', '.join(beside)} beside its parameters, which flat state has no place for: do not vouch"
                " for it, and set distributed_optimizer=False"
            )
            raise ConfigError([Problem("optimizer", type(self.optimizer).__name__, reason)])

    def pieces(self) -> list[PieceState]:
        """What this rank holds, parameter by parameter; views, so that copying into them loads a checkpoint.

        A parameter that is not sharded, or that is replicated over tp, appears on every rank that holds it.
        """
        return [piece for main in self._mains.values() for part in main.parts for piece in self._pieces_of(main, part)]

    def _pieces_of(self, main: MainValues, part: MainParam) -> Iterator[PieceState]:
        group = self.optimizer.param_groups[main.bucket.key.group]
        return pieces_of(main, part, self.optimizer.state.get(part.param, {}) if self.is_flat else {}, group)

    def load_piece_state(
        self,
        piece: FlatPiece,
        values: Tensor | None = None,
        state: Mapping[str, Tensor] | None = None,
        scalars: Mapping[str, Any] | None = None,
    ) -> None:
        """Fill one of :meth:`pieces` in place; call :meth:`init_state` before the first, :meth:`refresh_params` after.

        Raises:
            KeyError: if this rank does not hold the piece, or its optimizer does not keep a state of that name.
        """
        parts = ((main, part) for main in self._mains.values() for part in main.parts)
        for main, part in parts:
            if not any(slot.owned.name == piece.name for slot in part.slots):
                continue
            owner, group = self.optimizer.state[part.param], self.optimizer.param_groups[main.bucket.key.group]
            for target in self._pieces_of(main, part):
                if (target.piece.name, target.piece.start, target.piece.end) == (piece.name, piece.start, piece.end):
                    load_piece(target, owner, group, values, state or {}, scalars or {})
                    return
        raise KeyError(f"no piece {piece.name}[{piece.start}:{piece.end}] on this rank")

    def whole_state(self) -> dict[str, dict[str, Any]]:
        """What an optimizer that is not element-wise keeps, by name of the parameter; it may have any form.

        Under :data:`BESIDE` stands what belongs to no parameter.
        """
        if self.is_flat:
            return {}
        saved = self.optimizer.state_dict()
        state = saved.pop("state")
        del saved["param_groups"]
        found = {name: dict(state.get(index, {})) for index, name in enumerate(self._names_in_groups())}
        return found | {BESIDE: {**saved, "state": {k: value for k, value in state.items() if not isinstance(k, int)}}}

    def load_whole_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with what :meth:`whole_state` gave; call :meth:`load_group_settings` before."""
        if self.is_flat:
            return
        saved = {**self.optimizer.state_dict(), **state[BESIDE]}
        kept = {i: state[name] for i, name in enumerate(self._names_in_groups()) if state.get(name)}
        self.optimizer.load_state_dict({**saved, "state": {**kept, **saved["state"]}})

    def _names_in_groups(self) -> list[str]:
        return [part.owned.name for group in self._parts_by_group() for part in group if part.owned is not None]

    def group_names(self) -> list[list[str]]:
        """Global names of the parameters in each of the user's groups, in order of definition."""
        names: list[list[tuple[int, str]]] = [[] for _ in self.optimizer.param_groups]
        for bucket in self._mains:
            names[bucket.key.group] += [(slot.owned.order, slot.owned.name) for slot in bucket.slots]
        return [[name for _, name in sorted(group)] for group in names]

    def group_settings(self) -> list[dict[str, Any]]:
        """What each of the user's groups says besides its parameters: the learning rate and so on.

        Element-wise state has the step of a group with each parameter.
        """
        return [
            {name: value for name, value in group.items() if name != "params" and not (name == STEP and self.is_flat)}
            for group in self.optimizer.param_groups
        ]

    def load_group_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Set what :meth:`group_settings` gave, but for the choice of a kernel, which is today's."""
        for group, saved in zip(self.optimizer.param_groups, settings, strict=True):
            group.update({name: value for name, value in saved.items() if name not in _KERNELS})

    @property
    def state_bytes(self) -> int:
        """Bytes on this rank of optimizer state and of main values that are not the parameters themselves."""
        total = sum(main.flat.nbytes for main in self._mains.values() if not main.is_view)
        states = (self.optimizer.state.get(param, {}) for param in self.main_params)
        return total + sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))


def _in_dtype(main: Tensor, state: Mapping[str, Any], owner: Tensor) -> dict[str, Any]:
    """State that an optimizer began in the dtype of a parameter, in that of its main values."""

    def cast(value: Any) -> Any:
        is_alike = isinstance(value, Tensor) and value.shape == owner.shape and value.dtype == owner.dtype
        return value.to(main.dtype) if is_alike else value

    return {name: cast(value) for name, value in state.items()}
