"""Main parameters of a rank and the user optimizer's state for them, as checkpoints access them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.kept_values import KeptModel, KeptValues
from lightning_megatron.optim.buffers.main_values import MainParam, MainValues, States
from lightning_megatron.optim.main_param_groups import MainParamGroups
from lightning_megatron.optim.optimizer_state import STEP, allocate_state, load_shard, shards_of, state_like
from lightning_megatron.optim.state_by_param import OptimizerState
from lightning_megatron.params import NO_PARAMETER, ParamShard

_KERNELS = frozenset({"foreach", "fused", "capturable"})
"""Settings of torch's optimizers that choose a kernel and do not change the result."""

_MEMBERS = frozenset({"params", "param_names"})


class ShardedState:
    """Main parameters of a torch optimizer, and its state for them.

    Attributes:
        optimizer: the user's optimizer.
        is_flat: True if main parameters are flat shares of buckets, False if each has the shape of its parameter.
    """

    _groups: MainParamGroups

    def __init__(self, optimizer: Optimizer, is_flat: bool) -> None:
        self.optimizer = optimizer
        self.is_flat = is_flat
        self._mains: dict[Bucket, MainValues] = {}
        self._position: dict[int, int] = {}
        self._provisional: list[nn.Parameter] = []
        self._constructed: dict[int, tuple[Tensor, dict[str, Any]]] = {}  # of one element, by group
        self._take_back: Callable[[], None] | None = None
        self._states = OptimizerState(optimizer, self._mains, self._before_write)

    @property
    def state(self) -> States:
        """The optimizer's state by main parameter, with what the user has changed between steps."""
        return self._states.flat

    def lend(self, take_back: Callable[[], None]) -> None:
        """Allow a background reader of main values and state; the next write waits for the reader.

        Args:
            take_back: function that blocks until the reader is done; called once, before the next write.
        """
        self._take_back = take_back

    def _before_write(self) -> None:
        """Wait for the background reader of main values and state, if there is one."""
        take_back, self._take_back = self._take_back, None
        if take_back is not None:
            take_back()

    def _move_state(self, mains: Mapping[Bucket, MainValues]) -> None:
        """Reshape state that an optimizer allocated in its constructor (Adagrad)."""
        state = self.state
        self._position = {id(p): n for group in self.optimizer.param_groups for n, p in enumerate(group["params"])}
        for bucket, main in mains.items():
            any_owner = next((p for p in self.optimizer.param_groups[bucket.key.group]["params"] if state.get(p)), None)
            for part in main.parts:
                owner, make = (any_owner, state_like) if part.owned is None else (part.owned.param, _cast_state)
                if owner is not None and state.get(owner):
                    state[part.param] = make(part.param, state[owner], owner)
                    one = part.param.detach().new_zeros(1)
                    self._constructed.setdefault(bucket.key.group, (one, state_like(one, state[owner], owner)))
        kept = {id(part.param) for main in mains.values() for part in main.parts}
        for bucket in mains:
            for slot in bucket.slots:
                if id(slot.owned.param) not in kept:
                    state.pop(slot.owned.param, None)

    def _parts_by_group(self) -> list[list[MainParam]]:
        """The main parameters of each group; whole parameters in the user's order."""
        groups: list[list[MainParam]] = [[] for _ in self.optimizer.param_groups]
        for bucket, main in self._mains.items():
            groups[bucket.key.group] += main.parts
        if not self.is_flat:
            for parts in groups:
                parts.sort(key=lambda part: 0 if part.owned is None else self._position[id(part.owned.param)])
        return groups

    @property
    def main_params(self) -> list[nn.Parameter]:
        """This rank's main parameters: flat (one per bucket, more where gradients were missing) or whole."""
        return [part.param for main in self._mains.values() for part in main.parts]

    def _mains_by_group(self) -> list[list[nn.Parameter]]:
        return [[part.param for part in parts] for parts in self._parts_by_group()]

    def kept_values(self) -> Iterator[KeptValues]:
        """This rank's main values, where they are not the parameters themselves."""
        for main in (main for main in self._mains.values() if not main.is_view):
            params = {slot.owned.name: slot.owned.param for slot in main.bucket.slots}
            for shard in _values_of(main):
                yield KeptValues(shard.name, params[shard.name], shard.start, shard.main)

    def take_kept(self, kept: KeptModel) -> None:
        """Set main values from those of the model's optimizer before; call ``refresh_params`` afterwards."""
        for main in self._mains.values():
            kept.fill(_values_of(main), main.bucket.own_params.dtype)

    def init_state(self, *, split: bool = False) -> None:
        """Allocate an element-wise optimizer's state where it has none.

        Args:
            split: True to load a checkpoint: all state becomes that of a new optimizer, and every parameter has a step
                count of its own until ``refresh_params``, as those of a checkpoint may differ.
        """
        if split:
            self._before_write()
        if self.is_flat:
            if split:
                self._begin_anew()
            self._provisional = [p for p in self.main_params if not (split or self.state.get(p))]
            with self._groups.of_main_params():
                allocate_state(self.optimizer, self._mains_by_group())
            for main in self._mains.values() if split else ():
                main.split_all(self.state)

    def _begin_anew(self) -> None:
        """Drop all state but that of the optimizer's constructor (Adagrad), as it was then."""
        for number, params in enumerate(self._mains_by_group()):
            group = self.optimizer.param_groups[number]
            if STEP in group:
                group[STEP] = 0
            for param in params:
                self.state.pop(param, None)
                if made := self._constructed.get(number):
                    self.state[param] = state_like(param, made[1], made[0])

    def drop_initial_state(self) -> None:
        """Remove the state that :meth:`init_state` has allocated to be saved: a first step may be a special one."""
        for param in self._provisional:
            self.state.pop(param, None)
        self._provisional = []

    def drop_state(self, names: Set[str]) -> None:
        """Remove state by the names of checkpoints, after ``init_state(split=True)``; the next gradient begins it."""
        for param, own in self._names_of_parts():
            if own and own <= names:
                self.state.pop(param, None)

    def names_by_state(self) -> tuple[set[str], set[str]]:
        """Names, as in checkpoints, of parameters with and without state on this rank; for element-wise optimizers."""
        begun: set[str] = set()
        others: set[str] = set()
        for param, own in self._names_of_parts() if self.is_flat else ():
            (begun if self.state.get(param) else others).update(own)
        return begun, others

    def _names_of_parts(self) -> Iterator[tuple[nn.Parameter, set[str]]]:
        for part in (part for main in self._mains.values() for part in main.parts):
            yield part.param, {slot.owned.spec.tied_with or slot.owned.name for slot in part.slots}

    def _refuse_state_of_no_parameter(self) -> None:
        unnamed = [str(key) for key in self.state if not isinstance(key, Tensor)]
        if unnamed:
            reason = (
                f"its state has the entries {', '.join(unnamed)} of no parameter, which sharded state cannot hold:"
                " remove it from elementwise_optimizers, and set distributed_optimizer=False"
            )
            raise ConfigError([Problem("optimizer", type(self.optimizer).__name__, reason)])

    def param_shards(self) -> list[ParamShard]:
        """This rank's shards with their state. They are views: copying into them loads a checkpoint.

        A parameter that is not sharded, or that is replicated over tp, appears on every rank that holds it. One without
        a gradient so far has no state.

        Raises:
            ConfigError: if an element-wise optimizer has state of no parameter.
        """
        if self.is_flat:
            self._refuse_state_of_no_parameter()
        return [shard for main in self._mains.values() for part in main.parts for shard in self._shards_of(main, part)]

    def _shards_of(self, main: MainValues, part: MainParam) -> Iterator[ParamShard]:
        group = self.optimizer.param_groups[main.bucket.key.group]
        return shards_of(main, part, self.state.get(part.param, {}) if self.is_flat else {}, group)

    def load_shard_state(
        self,
        shard: ParamShard,
        main: Tensor | None = None,
        state: Mapping[str, Tensor] | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        """Fill one of :meth:`param_shards` in place; call :meth:`init_state` before, ``refresh_params`` afterwards.

        Raises:
            KeyError: if this rank does not hold the shard, or its optimizer does not keep a state of that name.
        """
        self._before_write()
        parts = ((values, part) for values in self._mains.values() for part in values.parts)
        for values, part in parts:
            if not any(slot.owned.name == shard.name for slot in part.slots):
                continue
            owner, group = self.state[part.param], self.optimizer.param_groups[values.bucket.key.group]
            for target in self._shards_of(values, part):
                if (target.name, target.start, target.end) == (shard.name, shard.start, shard.end):
                    load_shard(target, owner, group, main, state or {}, shared or {})
                    return
        raise KeyError(f"no shard {shard.name}[{shard.start}:{shard.end}] on this rank")

    def whole_state(self) -> dict[str, dict[str, Any]]:
        """State of an optimizer that is not element-wise, by name of the parameter, in the optimizer's own form.

        The key :data:`NO_PARAMETER` holds the state that belongs to no parameter.
        """
        if self.is_flat:
            return {}
        with self._groups.of_main_params():
            saved = self.optimizer.state_dict()
        state = saved.pop("state")
        del saved["param_groups"]
        found = {name: dict(state.get(index, {})) for index, name in enumerate(self._names_in_groups())}
        return found | {
            NO_PARAMETER: {**saved, "state": {k: value for k, value in state.items() if not isinstance(k, int)}}
        }

    def load_whole_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the result of :meth:`whole_state`; call :meth:`load_group_settings` before."""
        if self.is_flat:
            return
        kept = {i: state[name] for i, name in enumerate(self._names_in_groups()) if state.get(name)}
        with self._groups.of_main_params():
            saved = {**self.optimizer.state_dict(), **state[NO_PARAMETER]}
            self.optimizer.load_state_dict({**saved, "state": {**kept, **saved["state"]}})

    def _names_in_groups(self) -> list[str]:
        return [part.owned.name for group in self._parts_by_group() for part in group if part.owned is not None]

    def group_settings(self) -> list[dict[str, Any]]:
        """Settings of each of the user's groups, without its parameters and their names: the learning rate and so on.

        The step count of a group is left out for element-wise optimizers: it is saved with each parameter.
        """
        return [
            {n: value for n, value in group.items() if n not in _MEMBERS and not (n == STEP and self.is_flat)}
            for group in self.optimizer.param_groups
        ]

    def is_like(self, settings: Iterable[Mapping[str, Any]]) -> bool:
        """True if :meth:`group_settings` of another optimizer have all that this kind has by default, but switches."""
        own = {n for n, value in self.optimizer.defaults.items() if not (value is None or isinstance(value, bool))}
        return all(own - {STEP} <= group.keys() for group in settings)

    def load_group_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Restore the result of :meth:`group_settings`, except the choice of a kernel."""
        for group, saved in zip(self.optimizer.param_groups, settings, strict=True):
            group.update({name: value for name, value in saved.items() if name not in _KERNELS})

    @property
    def state_bytes(self) -> int:
        """Bytes on this rank of optimizer state and of main values that are not the parameters themselves."""
        total = sum(main.flat.nbytes for main in self._mains.values() if not main.is_view)
        states = (self.state.get(param, {}) for param in self.main_params)
        return total + sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))


def _values_of(main: MainValues) -> Iterator[ParamShard]:
    return (shard for part in main.parts for shard in shards_of(main, part, {}, {}))


def _cast_state(main: Tensor, state: Mapping[str, Any], owner: Tensor) -> dict[str, Any]:
    """State that an optimizer allocated in the dtype of a parameter, cast to the dtype of its main values."""

    def cast(value: Any) -> Any:
        is_alike = isinstance(value, Tensor) and value.shape == owner.shape and value.dtype == owner.dtype
        return value.to(main.dtype) if is_alike else value

    return {name: cast(value) for name, value in state.items()}
