"""Which optimizers can work on what a rank holds, and which parameters go into which buffer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.buffers.buffer import BufferKey, OwnedParam
from lightning_megatron.optim.reach import ELEMENTWISE, Reach, Vouched, has_modes, reach_of
from lightning_megatron.params import ParamSpec

_WORKS = (*(kind.__name__ for kind in ELEMENTWISE), "FusedAdamW")


def reach_problems(
    optimizer: Optimizer,
    named_params: Sequence[tuple[str, nn.Parameter, ParamSpec]],
    mesh: ParallelMesh,
    *,
    shard: bool,
    main_dtype: torch.dtype | None,
    elementwise: Sequence[Vouched] = (),
) -> list[Problem]:
    """What ``optimizer`` looks at, and a rank does not hold; arguments as of ``ShardedOptimizer``."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        reason = "it runs its closure several times a step, and gradients are averaged over ranks once a step"
        return [Problem("optimizer", kind, reason, _WORKS)]
    reach = reach_of(optimizer, elementwise)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    cuts = _cuts(mesh, shard, [spec for _, param, spec in named_params if id(param) in held], reach)
    if has_modes(optimizer):
        wide = main_dtype is not None and any(param.dtype != main_dtype for _, param, _ in named_params)
        cuts += ["precision='32-true'"] if wide else []
        reason = "its train() and eval() change values that only the optimizer holds here: it needs "
        return [Problem("optimizer", kind, reason + " and ".join(cuts))] if cuts else []
    if reach is Reach.ELEMENT or not cuts:
        return []
    looks = "updates whole parameters" if reach is Reach.PARAMETER else "is not known to look at one element at a time"
    reason = f"it {looks}, and ranks hold parts: set {' and '.join(cuts)}"
    if reach is Reach.MODEL:
        reason += (
            "; or, if its update of an element depends on that element alone, say so with"
            f" MegatronStrategy(elementwise_optimizers=[{kind!r}])"
        )
    return [Problem("optimizer", kind, reason, _WORKS)]


def _cuts(mesh: ParallelMesh, shard: bool, specs: Sequence[ParamSpec], reach: Reach) -> list[str]:
    """Settings with which a rank holds all that an optimizer looks at."""
    whole_model = reach is Reach.MODEL
    by_tp = whole_model or any(spec.tp_dim is not None and not spec.is_expert for spec in specs)
    experts = [spec for spec in specs if spec.is_expert]
    by_etp = whole_model or any(spec.tp_dim is not None for spec in experts)
    layout = mesh.layout
    cuts = {
        "distributed_optimizer=False": shard and mesh.dp_cp.size > 1,
        "tp=1": by_tp and layout.tp > 1,
        "etp=1": by_etp and mesh.etp.size > 1 and bool(experts),
        "ep=1": layout.ep > 1 and bool(experts or whole_model),
        "pp=1": whole_model and layout.pp > 1,
    }
    return [remedy for remedy, needed in cuts.items() if needed]


def optimizer_problems(
    optimizer: Optimizer, named_params: Sequence[tuple[str, nn.Parameter, ParamSpec]], keeps_state: bool = False
) -> list[Problem]:
    """What keeps the groups of ``optimizer`` from being those of a new optimizer of the model's parameters.

    Args:
        optimizer: the user's.
        named_params: name, parameter and spec of everything in the model.
        keeps_state: whether what it has in its state now is of what it will go on to work on.
    """
    kind = type(optimizer).__name__
    found: list[Problem] = []
    has_stepped = any(group.get("step", 0) for group in optimizer.param_groups) or any(
        state and float(state.get("step", 1)) != 0 for state in optimizer.state.values()
    )
    if has_stepped and not keeps_state:
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
    *,
    shard: bool = True,
    main_dtype: torch.dtype | None = None,
    elementwise: Sequence[Vouched] = (),
    known_already: Collection[int] = (),
) -> dict[BufferKey, list[OwnedParam]]:
    """Sort the parameters that ``optimizer`` trains into buffers, in order of definition.

    Args:
        optimizer: the user's.
        named_params: name, parameter and spec of everything in the model.
        mesh: of this rank.
        hold: names of parameters whose gradients something else still changes after backward.
        shard: whether each of the ranks that share a parameter's gradient updates one share of it.
        main_dtype: of what is updated; ``None`` for that of the parameters.
        elementwise: optimizers that the user calls element-wise.
        known_already: identities of the parameters that lie in a buffer.

    Raises:
        ConfigError: with everything that :func:`reach_problems` and :func:`optimizer_problems` find, or a name in
            ``hold`` that does not exist.
    """
    known = list(named_params)
    found = reach_problems(optimizer, known, mesh, shard=shard, main_dtype=main_dtype, elementwise=elementwise)
    keeps_state = bool(known_already) or reach_of(optimizer, elementwise) is not Reach.ELEMENT
    raise_if_any(found + optimizer_problems(optimizer, known, keeps_state))
    unknown = set(hold) - {name for name, _, _ in known}
    if unknown:
        raise ConfigError([Problem("hold", sorted(unknown), "no parameter of the model has this name")])
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    buffers: dict[BufferKey, list[OwnedParam]] = {}
    for order, (name, param, spec) in enumerate(known):
        if id(param) not in group_of or id(param) in known_already or not param.requires_grad:
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
