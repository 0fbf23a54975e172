"""Conversion between shards and whole tensors, to compare any layout with the size-1 model.

All functions read :class:`~lightning_megatron.params.ParamSpec` and know no layer. Those that take a mesh are
collective: all ranks that share a parameter call them together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_megatron.comm.collectives import all_gather, all_reduce
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.params import ParamSpec, ShardRanks, named_specs


def whole(local: Tensor, spec: ParamSpec, mesh: ParallelMesh) -> Tensor:
    """Gather the whole tensor of which this rank holds the shard ``local``, without padding.

    Raises:
        AssertionError: if a tensor that all ranks should hold whole differs between them.
    """
    joined = local.detach()
    if not spec.sharded_dims(mesh.shard_ranks):
        pieces = all_gather(joined.unsqueeze(0), mesh.tp)
        for rank, piece in enumerate(pieces):
            assert torch.equal(piece, pieces[0]), f"tp rank {rank} holds another value than tp rank 0: {spec}"
    for dim, axis in ((spec.tp_dim, mesh.etp if spec.is_expert else mesh.tp), (spec.ep_dim, mesh.ep)):
        if dim is not None:
            joined = torch.cat(all_gather(joined.unsqueeze(0), axis).unbind(0), dim=dim)
            joined = joined.narrow(dim, 0, spec.global_shape[dim])
    return joined.clone()


def local_slice(full: Tensor, spec: ParamSpec, local_shape: tuple[int, ...], ranks: ShardRanks) -> Tensor:
    """Shard of a whole tensor that the rank at ``ranks`` holds; padding is zero."""
    box = spec.local_box(local_shape, ranks)
    out = full.new_zeros(local_shape)
    source = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
    out[tuple(slice(size) for size in box.sizes)] = full.detach()[source]
    return out


def whole_parameters(model: nn.Module, mesh: ParallelMesh) -> dict[str, Tensor]:
    """Gather every parameter of the whole model, by global name."""
    return {name: whole(param, spec, mesh) for name, param, spec in named_specs(model)}


def whole_gradients(model: nn.Module, mesh: ParallelMesh, *, sum_over_tp: bool = True) -> dict[str, Tensor]:
    """Gather every gradient of the whole model, by global name; partial gradients are summed first.

    Each replica of an expert sees the tokens of some ranks, so its gradient is summed over the expert-data axis.

    Args:
        model: model after ``backward``; a parameter without gradient counts as one with a zero gradient.
        mesh: mesh of the model.
        sum_over_tp: True to sum gradients of different parts of the sequence (``ParamSpec.grad_sum_over_tp``), as the
            optimizer does; else rank 0's part is returned.

    Raises:
        AssertionError: if a gradient that needs no sum differs between ranks.
    """
    found = {}
    for name, param, spec in named_specs(model):
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        if spec.is_expert:
            found[name] = whole(all_reduce(grad, mesh.edp), spec, mesh)
        elif not spec.grad_sum_over_tp:
            found[name] = whole(grad, spec, mesh)
        elif sum_over_tp:
            found[name] = all_reduce(grad, mesh.tp)
        else:
            found[name] = all_gather(grad.unsqueeze(0), mesh.tp)[0]
    return found


@torch.no_grad()
def load_whole(model: nn.Module, tensors: Mapping[str, Tensor], mesh: ParallelMesh) -> None:
    """Copy to every parameter of ``model`` its shard of a whole tensor (of the size-1 model, for example)."""
    for name, param, spec in named_specs(model):
        param.copy_(local_slice(tensors[name], spec, tuple(param.shape), mesh.shard_ranks))


def differences(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, rtol: float = 1e-5, atol: float = 1e-6
) -> dict[str, str]:
    """Descriptions of the tensors of two models that are not close, by name; empty if all are.

    Args:
        ours: tensors by name.
        reference: tensors of the reference model, by name.
        rtol: largest difference allowed, relative to the *largest* element of the reference: a sum of many terms is
            exact to the size of its terms, not of its result.
        atol: largest difference allowed in any case.
    """
    wrong = {name: "missing" for name in reference.keys() - ours.keys()}
    wrong |= {name: "not in the reference" for name in ours.keys() - reference.keys()}
    for name in ours.keys() & reference.keys():
        a, b = ours[name].double(), reference[name].double()
        if a.shape != b.shape:
            wrong[name] = f"shape {tuple(a.shape)} is not {tuple(b.shape)}"
        elif a.numel():
            largest = (a - b).abs().max().item()
            allowed = atol + rtol * b.abs().max().item()
            if not largest <= allowed:  # NaN is wrong too
                wrong[name] = f"off by {largest:.3g}, allowed {allowed:.3g}"
    return dict(sorted(wrong.items()))


def assert_same(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Assert that :func:`differences` is empty."""
    wrong = differences(ours, reference, rtol=rtol, atol=atol)
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
