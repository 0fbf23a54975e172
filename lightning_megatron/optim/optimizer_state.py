"""Optimizer state by parameter, as a checkpoint saves and loads it.

The optimizer sees one long tensor per bucket and keeps its state in that shape. For a checkpoint that state is split
into ranges of parameters.

State has torch's form, in which every parameter has a ``step`` of its own. The state of an optimizer that keeps one
step count per group (Intel's FusedAdamW) is converted, so that each kind can continue from the other's checkpoints.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.optim.buffers.main_values import MainParam, MainValues, is_per_element
from lightning_megatron.params import ParamShard

STEP = "step"


def shards_of(
    main: MainValues, part: MainParam, state: Mapping[str, Any], group: Mapping[str, Any]
) -> Iterator[ParamShard]:
    """The shards that this rank owns of the parameters of ``part``, in buffer order; ``state`` is the optimizer's."""
    if state and STEP in group:
        state = {**state, STEP: float(group[STEP])}
    for slot in part.slots:
        own, owned, first = main.local_range(slot), slot.owned, main.bucket.own_start - slot.start
        span = slice(own.start - part.start, own.stop - part.start)
        values = part.param.detach()
        yield ParamShard(
            owned.name,
            owned.spec,
            tuple(owned.param.shape),
            own.start + first,
            own.stop + first,
            values.view(-1)[span],
            {name: value.view(-1)[span] for name, value in state.items() if is_per_element(value, values)},
            {name: value for name, value in state.items() if not is_per_element(value, values)},
        )


def state_like(main: Tensor, state: Mapping[str, Any], owner: Tensor) -> dict[str, Any]:
    """State for ``main`` from the initial state of ``owner``, whose tensors are expanded by their first element."""
    made: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == owner.shape and name != STEP:
            made[name] = torch.full_like(main, value.flatten()[0].item(), dtype=value.dtype, requires_grad=False)
        else:
            made[name] = value.clone() if isinstance(value, Tensor) else value
    return made


def allocate_state(optimizer: Optimizer, mains: Sequence[Sequence[nn.Parameter]]) -> None:
    """Give every main parameter, listed by group, that has no state the state that its optimizer would create for it.

    Only the optimizer knows the names, dtypes and shapes of its state; ``load_state_dict`` accepts any. So a copy of
    the optimizer takes one step on parameters of one element, with value and gradient zero. The resulting state is
    expanded to the size of the main parameters. Weights are not changed, and the optimizer's hooks do not run. ``step``
    is reset to zero. Moments are zero as in a fresh optimizer. The few values that a step changes even with a zero
    gradient (``mu_product`` of NAdam, ``eta`` of ASGD) are those after one step, until a checkpoint overwrites them.
    """
    probes = {main: nn.Parameter(torch.zeros_like(main[:1])) for group in mains for main in group}
    scratch = copy.copy(optimizer)  # torch's own copy protocol: groups and state, no hooks
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler has wrapped it; the others are attributes of the subclass
            vars(scratch).setdefault(name, value)
    scratch.param_groups = [
        {**group, "params": [probes[main] for main in own]}
        for group, own in zip(optimizer.param_groups, mains, strict=True)
    ]
    scratch.state = defaultdict(dict)
    for main, probe in probes.items():
        probe.grad = torch.zeros_like(probe)
        if optimizer.state.get(main):  # allocated by the constructor (Adagrad)
            scratch.state[probe] = state_like(probe, optimizer.state[main], main)
    type(scratch).step(scratch)
    for settings, tried in zip(optimizer.param_groups, scratch.param_groups, strict=True):
        if STEP in tried:
            settings.setdefault(STEP, 0)
    for main, probe in probes.items():
        if optimizer.state.get(main):
            continue
        state = state_like(main, scratch.state[probe], probe)
        if STEP in state:
            state[STEP] = torch.zeros_like(state[STEP]) if isinstance(state[STEP], Tensor) else 0
        optimizer.state[main] = state


def load_shard(
    target: ParamShard,
    owner: dict[str, Any],
    group: dict[str, Any],
    main: Tensor | None,
    state: Mapping[str, Tensor],
    shared: Mapping[str, Any],
) -> None:
    """Fill a shard in place.

    Args:
        target: the shard.
        owner: the optimizer's state for the main parameter that contains the shard; plain numbers are written to it.
        group: the optimizer's group; a step count of the group is written to it.
        main: ``[n]``, main values; ``None`` to keep the present ones.
        state: state per element by name, each ``[n]``.
        shared: state that all elements share, by name.

    Raises:
        KeyError: for a name that this optimizer does not keep.
    """
    if main is not None:
        target.main.copy_(main)
    for name, value in state.items():
        target.state[name].copy_(value)
    for name, value in shared.items():
        own = target.shared[name]
        if isinstance(own, Tensor):
            own.copy_(torch.as_tensor(value))
            continue
        number = value.item() if isinstance(value, Tensor) else value
        if name == STEP and STEP in group:
            group[STEP] = int(number)
        else:
            owner[name] = number
