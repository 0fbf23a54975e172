"""Which optimizers can work on flat shards, and which parameters go into which buffer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_megatron.config import ConfigError, Problem, raise_if_any
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.adamw import is_fused_adamw
from lightning_megatron.optim.buffer import BufferKey, OwnedParam
from lightning_megatron.params import ParamSpec

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers whose update of an element depends on that element alone."""


def optimizer_problems(
    optimizer: Optimizer, named_params: Sequence[tuple[str, nn.Parameter, ParamSpec]]
) -> list[Problem]:
    """What keeps ``optimizer`` from working on flat shards of the parameters."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, ELEMENTWISE) and not is_fused_adamw(optimizer):
        works = (*(c.__name__ for c in ELEMENTWISE), "FusedAdamW")
        reason = (
            "parameters are laid end to end and cut into shards, so an update may look at one element at a time; this "
            "optimizer is not known to (those that use the norm, the rows or the shape of a whole parameter cannot). "
            "Use one of torch.optim's element-wise optimizers or a subclass of one"
        )
        return [Problem("optimizer", kind, reason, works)]
    found: list[Problem] = []
    has_stepped = any(group.get("step", 0) for group in optimizer.param_groups)
    if has_stepped or any(state and float(state.get("step", 1)) != 0 for state in optimizer.state.values()):
        reason = (
            "it has already taken steps, and its state belongs to whole parameters: pass a new one, load state later"
        )
        found.append(Problem("optimizer", kind, reason))
    names = {id(param): name for name, param, _ in named_params}
    seen: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            name = names.get(id(param))
            if name is None:
                reason = f"holds a parameter of shape {tuple(param.shape)} that is not in the model"
                found.append(Problem(f"param_groups[{index}]", kind, reason))
            elif id(param) in seen:
                reason = f"holds {name!r}, which param_groups[{seen[id(param)]}] holds too"
                found.append(Problem(f"param_groups[{index}]", kind, reason))
            elif param.device.type == "meta":
                found.append(Problem(f"param_groups[{index}]", kind, f"holds {name!r}, which is on the meta device"))
            seen[id(param)] = index
    return found


def assign(
    optimizer: Optimizer,
    named_params: Iterable[tuple[str, nn.Parameter, ParamSpec]],
    mesh: ParallelMesh,
    hold: Collection[str] = (),
) -> dict[BufferKey, list[OwnedParam]]:
    """Sort the parameters that ``optimizer`` trains into buffers, in order of definition.

    Args:
        optimizer: the user's.
        named_params: name, parameter and spec of everything in the model.
        mesh: of this rank.
        hold: names of parameters whose gradients something else still changes after backward.

    Raises:
        ConfigError: with everything that :func:`optimizer_problems` finds, or a name in ``hold`` that does not exist.
    """
    known = list(named_params)
    raise_if_any(optimizer_problems(optimizer, known))
    unknown = set(hold) - {name for name, _, _ in known}
    if unknown:
        raise ConfigError([Problem("hold", sorted(unknown), "no parameter of the model has this name")])
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    buffers: dict[BufferKey, list[OwnedParam]] = {}
    for order, (name, param, spec) in enumerate(known):
        if id(param) not in group_of or not param.requires_grad:
            continue
        shared = mesh.tp.size > 1 and spec.tp_dim is None and not spec.is_expert
        key = BufferKey(
            dtype=param.dtype,
            group=group_of[id(param)],
            replicated_over_tp=shared,
            grad_sum_over_tp=shared and spec.grad_sum_over_tp,
            tied_copy=spec.tied_with is not None,
            expert=spec.is_expert and mesh.edp.ranks != mesh.dp_cp.ranks,
            held=name in hold,
        )
        buffers.setdefault(key, []).append(OwnedParam(name, param, spec, order))
    return buffers
