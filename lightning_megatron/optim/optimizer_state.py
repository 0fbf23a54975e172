"""Optimizer state in terms of parameters: what a checkpoint saves and fills.

The optimizer sees one long tensor per bucket and keeps its state in that shape. A checkpoint wants to know which range
of which parameter each stretch of it is.

It speaks torch's words, where every parameter has a ``step`` of its own. An optimizer may count the steps of a whole
group in the group instead (Intel's FusedAdamW does), and is translated, so that either goes on where the other stopped.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.optim.buffers.main_values import MainParam, MainValues, is_per_element
from lightning_megatron.params import FlatPiece

STEP = "step"


class PieceState(NamedTuple):
    """What this rank's optimizer holds of one parameter.

    Attributes:
        piece: which range of which parameter.
        main: ``[n]``, its main values, a view.
        state: per-element state by name (``exp_avg``), each ``[n]``, views.
        scalars: state that the elements share, by name (``step``): 0-dim tensors or numbers.
    """

    piece: FlatPiece
    main: Tensor
    state: dict[str, Tensor]
    scalars: dict[str, Any]


def pieces_of(
    main: MainValues, part: MainParam, state: Mapping[str, Any], group: Mapping[str, Any]
) -> Iterator[PieceState]:
    """The pieces that this rank owns of the parameters of ``part``, in buffer order.

    Args:
        main: main values of a bucket.
        part: a stretch of them.
        state: the optimizer's, of that stretch.
        group: the optimizer's group that it is in.
    """
    if state and STEP in group:
        state = {**state, STEP: float(group[STEP])}
    for slot in part.slots:
        own, owned, first = main.stretch(slot), slot.owned, main.bucket.own_start - slot.start
        piece = FlatPiece(owned.name, owned.spec, tuple(owned.param.shape), own.start + first, own.stop + first)
        here = slice(own.start - part.start, own.stop - part.start)
        values = part.param.detach()
        yield PieceState(
            piece,
            values.view(-1)[here],
            {name: value.view(-1)[here] for name, value in state.items() if is_per_element(value, values)},
            {name: value for name, value in state.items() if not is_per_element(value, values)},
        )


def state_like(main: Tensor, state: Mapping[str, Any], owner: Tensor) -> dict[str, Any]:
    """State of ``main`` as an optimizer began it for another parameter, ``owner``, filled with its first element."""
    made: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == owner.shape and name != STEP:
            made[name] = torch.full_like(main, value.flatten()[0].item(), dtype=value.dtype, requires_grad=False)
        else:
            made[name] = value.clone() if isinstance(value, Tensor) else value
    return made


def allocate_state(optimizer: Optimizer, mains: Sequence[Sequence[nn.Parameter]]) -> None:
    """Give every main parameter that has no state the state that its optimizer would create for it.

    Which names, dtypes and shapes that is, only the optimizer knows. So a copy of it takes one step on parameters of
    one element, of value and gradient zero, and what it leaves is made as long as the main parameters; neither the
    weights nor the optimizer's hooks notice. ``step`` is put back to zero. Moments are zero as in a fresh optimizer;
    the few values that a step moves without a gradient (``mu_product`` of NAdam, ``eta`` of ASGD) are those after one
    step, until a checkpoint overwrites them.

    Args:
        optimizer: the user's.
        mains: main parameters of each of its groups.
    """
    probes = [[nn.Parameter(torch.zeros_like(main[:1])) for main in group] for group in mains]
    for probe in (probe for group in probes for probe in group):
        probe.grad = torch.zeros_like(probe)
    scratch = copy.copy(optimizer)  # torch's own copy protocol: groups and state, no hooks
    for name, value in vars(optimizer).items():
        if name != "step":  # which a scheduler has wrapped; the rest is what a class adds
            vars(scratch).setdefault(name, value)
    scratch.param_groups = [
        {**group, "params": probe} for group, probe in zip(optimizer.param_groups, probes, strict=True)
    ]
    scratch.state = defaultdict(dict)
    for group, probe_group in zip(mains, probes, strict=True):
        for main, probe in zip(group, probe_group, strict=True):
            if optimizer.state.get(main):  # an optimizer that allocates when it is made (Adagrad): it steps on that
                scratch.state[probe] = state_like(probe, optimizer.state[main], main)
    type(scratch).step(scratch)
    for settings, tried in zip(optimizer.param_groups, scratch.param_groups, strict=True):
        if STEP in tried:
            settings.setdefault(STEP, 0)
    for group, probe_group in zip(mains, probes, strict=True):
        for main, probe in zip(group, probe_group, strict=True):
            if optimizer.state.get(main):
                continue
            state = state_like(main, scratch.state[probe], probe)
            if STEP in state:
                state[STEP] = torch.zeros_like(state[STEP]) if isinstance(state[STEP], Tensor) else 0
            optimizer.state[main] = state


def load_piece(
    target: PieceState,
    owner: dict[str, Any],
    group: dict[str, Any],
    main: Tensor | None,
    state: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Fill a piece in place.

    Args:
        target: the piece.
        owner: the optimizer's state of the main parameter that the piece is part of; plain numbers are set there.
        group: of the optimizer; its count of steps, where it has one, is set there.
        main: ``[n]``, ``None`` to leave the main values.
        state: values by name, each ``[n]``.
        scalars: values by name.

    Raises:
        KeyError: for a name that this optimizer does not keep.
    """
    if main is not None:
        target.main.copy_(main)
    for name, value in state.items():
        target.state[name].copy_(value)
    for name, value in scalars.items():
        held = target.scalars[name]
        if isinstance(held, Tensor):
            held.copy_(torch.as_tensor(value))
            continue
        number = value.item() if isinstance(value, Tensor) else value
        if name == STEP and STEP in group:
            group[STEP] = int(number)
        else:
            owner[name] = number
