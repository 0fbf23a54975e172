"""Assignment of an optimizer's parameters to buffers, and its checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffers.slot import BufferKey, OwnedParam
from lightning_megatron.optim.core.config import DistributedOptimizerConfig
from lightning_megatron.optim.core.update_scope import ELEMENTWISE, UpdateScope, has_train_eval_modes, update_scope
from lightning_megatron.params import ParamSpec

_REFUSED: Mapping[type[Optimizer], str] = {
    torch.optim.LBFGS: "it runs its closure several times a step, and gradients are averaged over ranks once a step",
    torch.optim.SparseAdam: (
        "it takes sparse gradients alone, and those of sparse=True become dense in flat buffers: Adam takes them, and"
        " also moves rows that a batch does not read"
    ),
}
_WORKS = (*(kind.__name__ for kind in ELEMENTWISE), "FusedAdamW")


def scope_problems(
    optimizer: Optimizer,
    named_params: Sequence[tuple[str, nn.Parameter, ParamSpec]],
    mesh: ParallelMesh,
    config: DistributedOptimizerConfig,
) -> list[Problem]:
    """Reasons why a rank does not hold all values that ``optimizer`` reads; arguments as in ``ShardedOptimizer``."""
    kind = type(optimizer).__name__
    if (why := _refusal(optimizer)) is not None:
        return [Problem("optimizer", kind, why, _WORKS)]
    scope = update_scope(optimizer, config.elementwise)
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    remedies = _remedies(mesh, config.shard, [spec for _, param, spec in named_params if id(param) in own], scope)
    if has_train_eval_modes(optimizer):
        wide = config.main_dtype is not None and any(param.dtype != config.main_dtype for _, param, _ in named_params)
        remedies += ["precision='32-true'"] if wide else []
        reason = "its train() and eval() change values that only the optimizer holds here: it needs "
        return [Problem("optimizer", kind, reason + " and ".join(remedies))] if remedies else []
    if scope is UpdateScope.ELEMENT or not remedies:
        return []
    looks = (
        "updates whole parameters"
        if scope is UpdateScope.PARAMETER
        else "is not known to look at one element at a time"
    )
    reason = f"it {looks}, and ranks hold parts: set {' and '.join(remedies)}"
    if scope is UpdateScope.MODEL:
        reason += (
            "; or, if its update of an element depends on that element alone, declare that with"
            f" MegatronStrategy(elementwise_optimizers=[{kind!r}])"
        )
    return [Problem("optimizer", kind, reason, _WORKS)]


def _refusal(optimizer: Optimizer) -> str | None:
    return next((reason for kind, reason in _REFUSED.items() if isinstance(optimizer, kind)), None)


def _remedies(mesh: ParallelMesh, shard: bool, specs: Sequence[ParamSpec], scope: UpdateScope) -> list[str]:
    """Settings with which a rank holds all values that an optimizer reads."""
    whole_model, layout = scope is UpdateScope.MODEL, mesh.layout
    has_experts = any(spec.is_expert for spec in specs)
    # Kinds of parameters whose slices on other ranks the optimizer reads: True for experts, False for all others.
    sliced = {False, has_experts} if whole_model else {spec.is_expert for spec in specs if spec.tp_dim is not None}
    remedies = {
        "distributed_optimizer=False": shard and mesh.dp_cp.size > 1,
        "tp=1": False in sliced and layout.tp > 1,
        "etp=1": True in sliced and mesh.etp.size > 1,
        "ep=1": layout.ep > 1 and (has_experts or whole_model),
        "pp=1": whole_model and layout.pp > 1,
    }
    return [remedy for remedy, needed in remedies.items() if needed]


def optimizer_problems(
    optimizer: Optimizer, named_params: Sequence[tuple[str, nn.Parameter, ParamSpec]], keeps_state: bool = False
) -> list[Problem]:
    """Reasons why the groups of ``optimizer`` are not those of a new optimizer over the model's parameters.

    Args:
        named_params: name, parameter and spec of every parameter of the model.
        keeps_state: True if its present state belongs to the tensors that it will update.
    """
    kind = type(optimizer).__name__
    found: list[Problem] = []
    if not keeps_state and _has_stepped(optimizer):
        reason = (
            "it has already taken steps, and its state belongs to whole parameters: pass a new one, load state later"
        )
        found.append(Problem("optimizer", kind, reason))
    names = {id(param): name for name, param, _ in named_params}
    seen: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        reasons = []
        foreign = sum(param.device.type == "meta" and id(param) not in names for param in group["params"])
        if foreign:
            reason = f"holds {foreign} parameters that other pipeline stages have: make it in configure_optimizers"
            reasons.append(reason)
        for param in group["params"]:
            name = names.get(id(param))
            if name is None:
                if not foreign:
                    reasons.append(f"holds a parameter of shape {tuple(param.shape)} that is not in the model")
            elif id(param) in seen:
                reasons.append(f"holds {name!r}, which param_groups[{seen[id(param)]}] holds too")
            elif param.device.type == "meta":
                reasons.append(f"holds {name!r}, which is on the meta device")
            seen[id(param)] = index
        found += [Problem(f"param_groups[{index}]", kind, reason) for reason in reasons]
    return found


def _has_stepped(optimizer: Optimizer) -> bool:
    return any(group.get("step", 0) for group in optimizer.param_groups) or any(
        state and float(state.get("step", 1)) != 0 for state in optimizer.state.values()
    )


def assign(
    optimizer: Optimizer,
    named_params: Iterable[tuple[str, nn.Parameter, ParamSpec]],
    mesh: ParallelMesh,
    config: DistributedOptimizerConfig,
    reduce_late: Collection[str] = (),
    assigned: Collection[int] = (),
) -> dict[BufferKey, list[OwnedParam]]:
    """Sort the parameters that ``optimizer`` trains into buffers, in order of definition.

    Args:
        named_params: name, parameter and spec of every parameter of the model.
        reduce_late: names of parameters whose gradients still change after backward.
        assigned: identities of the parameters that are in a buffer already.

    Raises:
        ConfigError: with all problems of :func:`scope_problems` and :func:`optimizer_problems`, or for a name in
            ``reduce_late`` that does not exist.
    """
    known = list(named_params)
    found = scope_problems(optimizer, known, mesh, config)
    keeps_state = bool(assigned) or update_scope(optimizer, config.elementwise) is not UpdateScope.ELEMENT
    raise_if_any(found + optimizer_problems(optimizer, known, keeps_state))
    unknown = set(reduce_late) - {name for name, _, _ in known}
    if unknown:
        raise ConfigError([Problem("reduce_late", sorted(unknown), "no parameter of the model has this name")])
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    buffers: dict[BufferKey, list[OwnedParam]] = {}
    for order, (name, param, spec) in enumerate(known):
        if id(param) not in group_of or id(param) in assigned or not param.requires_grad:
            continue
        shared = mesh.tp.size > 1 and spec.tp_dim is None and not spec.is_expert
        key = BufferKey(
            dtype=param.dtype,
            group=group_of[id(param)],
            replicated_over_tp=shared,
            grad_sum_over_tp=shared and spec.grad_sum_over_tp,
            tied_copy=spec.tied_with is not None,
            expert=spec.is_expert and mesh.edp.ranks != mesh.dp_cp.ranks,
            reduce_late=name in reduce_late,
        )
        buffers.setdefault(key, []).append(OwnedParam(name, param, spec, order))
    return buffers
