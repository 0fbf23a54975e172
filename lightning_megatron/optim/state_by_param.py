"""An optimizer's state as user code sees it between steps: by the user's parameters, in their shapes.

During a step the optimizer has its state by main parameters, which may be flat. Between steps ``optimizer.state`` is a
mapping that is built at its first use, of views of that state; so a step costs nothing more where nobody looks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.optim.buffers.bucket import Bucket
from lightning_megatron.optim.buffers.main_values import (
    MainParam,
    MainValues,
    copy_of,
    have_equal_values,
    is_per_element,
)
from lightning_megatron.optim.buffers.slot import Slot
from lightning_megatron.optim.optimizer_state import STEP

State = dict[str, Any]


class StateByParam(MutableMapping[Any, State]):
    """Mapping in the place of ``optimizer.state``; like torch's ``defaultdict``, it makes an entry that is missing.

    Attributes:
        entries: the entries; ``None`` until the first use.

    Args:
        build: function that makes the entries; it gets the first key that is asked for.
    """

    def __init__(self, build: Callable[[object], dict[Any, State]]) -> None:
        self._build = build
        self.entries: dict[Any, State] | None = None

    def _built(self, key: object = None) -> dict[Any, State]:
        if self.entries is None:
            self.entries = self._build(key)
        return self.entries

    def __getitem__(self, key: Any) -> State:
        return self._built(key).setdefault(key, {})

    def __setitem__(self, key: Any, value: State) -> None:
        self._built(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._built(key)[key]

    def __contains__(self, key: object) -> bool:
        return key in self._built(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._built())

    def __len__(self) -> int:
        return len(self._built())

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry, or the default; it makes no entry."""
        return self._built(key).get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove and return the entry; it makes no entry."""
        return self._built(key).pop(key, *default)

    def __deepcopy__(self, memo: dict[int, Any]) -> MutableMapping[Any, State]:
        try:
            return deepcopy(dict(self._built()), memo)
        except RuntimeError:  # ranks share the state: a copy has none, as torch reads it while it copies an optimizer
            return defaultdict(dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._built(),)


class SharedStateEntry(StateByParam):
    """Entry of a ``state_dict`` for state that ranks share: a use raises an error, a use of a copy too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedStateEntry:
        return SharedStateEntry(self._build)


class OptimizerState:
    """State of an optimizer by main parameters, which user code sees by its own parameters.

    What user code changes between steps, in place or by entries that it sets and removes, counts at the next use.

    Args:
        mains: main values by bucket; more may be added.
        before_write: function that waits for background readers of the state.
    """

    def __init__(
        self, optimizer: Optimizer, mains: Mapping[Bucket, MainValues], before_write: Callable[[], None]
    ) -> None:
        self._optimizer: Any = optimizer  # torch's types have no other mapping for its state
        self._mains, self._before_write = mains, before_write
        self._hidden: MutableMapping[Any, State] | None = None

    @property
    def flat(self) -> MutableMapping[Any, State]:
        """The state by main parameters, with the user's changes."""
        if self._hidden is None:
            return self._optimizer.state
        shown: Mapping[Any, State] = self._optimizer.state
        entries = shown.entries if isinstance(shown, StateByParam) else shown
        if entries is not None:
            self.refuse_divided()
            self._take(self._hidden, entries)
            self._optimizer.state = StateByParam(self._entries)
        return self._hidden

    def show(self) -> None:
        """Give the optimizer its state by the user's parameters."""
        if self._hidden is None:
            self._hidden = self._optimizer.state
            self._optimizer.state = StateByParam(self._entries)

    def hide(self) -> None:
        """Give the optimizer its state by main parameters, as a step needs it."""
        self._optimizer.state, self._hidden = self.flat, None

    def load(self, given: Mapping[str, Any]) -> None:
        """Take over what torch has loaded from ``given``, in the dtype of main values; torch rounds to parameters'."""
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        ours = {slot.owned.param for _, part in self._parts() for slot in part.slots}
        for param, number in zip(params, numbers, strict=True):
            own = self._optimizer.state.get(param, {}) if param in ours else {}
            for name, value in own.items():
                if isinstance(value, Tensor) and value.shape == param.shape and name != STEP:
                    own[name] = given["state"][number][name]

    def begin_state_dict(self) -> None:
        """Before ``state_dict``: where ranks share the state, it has the settings of groups all the same."""
        if any(bucket.sharded for bucket in self._mains):
            self._optimizer.state = {}

    def end_state_dict(self, state_dict: dict[str, Any]) -> None:
        """After ``state_dict``: an entry for state that ranks share raises an error at its first use."""
        if any(bucket.sharded for bucket in self._mains):
            self._optimizer.state = StateByParam(self._entries)
            state_dict["state"] = SharedStateEntry(self._entries)

    def refuse_divided(self, key: object = None) -> None:
        """Raise an error if this rank has only a part of the state.

        Args:
            key: the parameter that is asked for, if it is known.

        Raises:
            RuntimeError: with the name of the parameter, or of any other.
        """
        slots = [(bucket, slot) for bucket in self._mains if bucket.sharded for slot in bucket.slots]
        for bucket, slot in [pair for pair in slots if pair[1].owned.param is key] or slots[:1]:
            raise RuntimeError(
                f"optimizer.state: {bucket.axis.size} ranks share the state of {slot.owned.name!r}, and none has all of"
                " it. To read or change it between steps, set MegatronStrategy(distributed_optimizer=False)"
            )

    def _parts(self) -> list[tuple[MainValues, MainParam]]:
        """The main parameters that are not the user's own."""
        pairs = ((main, part) for main in self._mains.values() for part in main.parts)
        return [(main, part) for main, part in pairs if not (part.owned and part.owned.param is part.param)]

    def _entries(self, key: object) -> dict[Any, State]:
        assert self._hidden is not None
        self.refuse_divided(key)
        self._before_write()  # the user may write to views
        parts = self._parts()
        mains = {part.param for _, part in parts}
        entries = {key: value for key, value in self._hidden.items() if key not in mains}
        for main, part in parts:
            if state := self._hidden.get(part.param):
                for slot in part.slots:
                    entries[slot.owned.param] = {
                        name: _view(main, part, slot, value) if is_per_element(value, part.param) else copy_of(value)
                        for name, value in state.items()
                    }
        return entries

    @torch.no_grad()
    def _take(self, flat: MutableMapping[Any, State], entries: Mapping[Any, State]) -> None:
        """Replace the state by entries for the user's parameters, in their shapes."""
        parts = self._parts()
        ours = {part.param for _, part in parts} | {slot.owned.param for _, part in parts for slot in part.slots}
        _replace_others(flat, entries, ours)
        for main, part in parts:
            given = {slot: entries.get(slot.owned.param) or {} for slot in part.slots}
            pieces = [part] if _is_uniform(part, flat.get(part.param) or {}, given) else main.split_part(flat, part)
            for piece in pieces:
                _fill(flat, main, piece, given)


def _replace_others(flat: MutableMapping[Any, State], entries: Mapping[Any, State], ours: Collection[Any]) -> None:
    """Replace what belongs to no main parameter: to parameters that are not trained, or to the whole optimizer."""
    for key in [key for key in flat if key not in ours]:
        del flat[key]
    flat.update({key: value for key, value in entries.items() if key not in ours})


def _view(main: MainValues, part: MainParam, slot: Slot, value: Tensor) -> Tensor:
    """The elements of one parameter in a value of its main parameter, in its shape."""
    here = main.local_range(slot)
    return value.view(-1)[here.start - part.start : here.stop - part.start].view(slot.data.shape)


def _has_elements(part: MainParam, state: State, slot: Slot, name: str, value: object) -> bool:
    """True for an entry with a value for each element, False for one such as the step count."""
    if name in state:
        return is_per_element(state[name], part.param)
    return isinstance(value, Tensor) and value.shape == slot.data.shape and name != STEP


def _is_uniform(part: MainParam, state: State, given: Mapping[Slot, State]) -> bool:
    """True if the parameters of a main parameter have the same entries, which differ in values of elements alone."""
    first, *others = (
        {name: None if _has_elements(part, state, slot, name, value) else value for name, value in own.items()}
        for slot, own in given.items()
    )
    return all(have_equal_values(own, first) for own in others)


def _fill(flat: MutableMapping[Any, State], main: MainValues, part: MainParam, given: Mapping[Slot, State]) -> None:
    """Set the state of a main parameter, in its own memory, from that of its parameters."""
    state, made = flat.pop(part.param, {}), {}
    first = part.slots[0]
    for name, value in given[first].items():
        made[name] = value
        if _has_elements(part, state, first, name, value):
            dtype = part.param.dtype if value.dtype == first.owned.param.dtype else value.dtype
            made[name] = state[name] if name in state else torch.zeros_like(part.param.detach(), dtype=dtype)
            for slot in part.slots:
                target, values = _view(main, part, slot, made[name]), given[slot][name]
                if target.data_ptr() != values.data_ptr():
                    target.copy_(values)
    if made:
        flat[part.param] = made
