"""Collectives and their gradients against the same arithmetic on the stacked tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.comm import collectives as comm
from lightning_megatron.comm.p2p import start_receive, start_rotation, start_send
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.layers import ColumnParallelLinear
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.params import ParamSpec, named_specs
from lightning_megatron.testing.parity import (
    assert_same,
    differences,
    load_whole,
    local_slice,
    whole,
    whole_gradients,
    whole_parameters,
)

R = 4


def tensors(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """One of small integers for each rank: sums are exact, so comparisons are bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 9, shape, generator=generator).float() for _ in range(R)]


def halves(x: Tensor, rank: int, dim: int) -> Tensor:
    return x.chunk(R, dim)[rank]


Pair = tuple[
    Callable[[Tensor, Axis], Tensor], Callable[[list[Tensor], int], Tensor], Callable[[list[Tensor], int], Tensor]
]
PAIRS: dict[str, Pair] = {  # function; what it gives on a rank; the gradient it gives on a rank
    "copy_to_region": (comm.copy_to_region, lambda x, r: x[r], lambda g, r: sum(g)),  # type: ignore[arg-type,return-value]
    "reduce_from_region": (comm.reduce_from_region, lambda x, r: sum(x), lambda g, r: g[r]),  # type: ignore[arg-type,return-value]
    "gather_sequence": (comm.gather_sequence, lambda x, r: torch.cat(x), lambda g, r: halves(sum(g), r, 0)),  # type: ignore[arg-type]
    "reduce_scatter_sequence": (
        comm.reduce_scatter_sequence,
        lambda x, r: halves(sum(x), r, 0),  # type: ignore[arg-type]
        lambda g, r: torch.cat(g),
    ),
    "gather_features": (comm.gather_features, lambda x, r: torch.cat(x, -1), lambda g, r: halves(g[r], r, -1)),
    "split_features": (comm.split_features, lambda x, r: halves(x[r], r, -1), lambda g, r: torch.cat(g, -1)),
}


def tp_axis() -> Axis:
    return ParallelMesh.create(ParallelLayout(tp=R), torch.device("cpu")).tp


def check_pairs() -> list[str]:
    tp = tp_axis()
    wrong = []
    for name, (function, forward, backward) in PAIRS.items():
        inputs = tensors((8, 3, 4), seed=1)
        x = inputs[tp.rank].clone().requires_grad_()
        out = function(x, tp)
        upstreams = tensors(tuple(out.shape), seed=2)
        out.backward(upstreams[tp.rank])
        assert x.grad is not None
        if not torch.equal(out, forward(inputs, tp.rank)):
            wrong.append(f"{name}: forward")
        if not torch.equal(x.grad, backward(upstreams, tp.rank)):
            wrong.append(f"{name}: backward")
        if not torch.equal(x.detach(), inputs[tp.rank]):
            wrong.append(f"{name}: changed its input")
    return wrong


def test_collectives_and_their_gradients(ranks):
    assert ranks(R, check_pairs) == [[]] * R


def check_plain() -> None:
    tp = tp_axis()
    inputs = tensors((8, 3), seed=3)
    mine = inputs[tp.rank].t().contiguous().t()  # not contiguous
    assert torch.equal(comm.all_reduce(mine, tp), sum(inputs))  # type: ignore[arg-type]
    assert torch.equal(comm.all_reduce_max(mine, tp), torch.stack(inputs).amax(0))
    assert torch.equal(comm.all_gather(mine, tp), torch.cat(inputs))
    assert torch.equal(comm.reduce_scatter(mine, tp), halves(sum(inputs), tp.rank, 0))  # type: ignore[arg-type]
    assert torch.equal(mine, inputs[tp.rank])
    pending = comm.start_all_reduce(mine, tp)
    assert torch.equal(pending.wait(), pending.wait())
    with pytest.raises(ValueError, match="reduce-scatter over tp: 3 rows do not split over 4 ranks"):
        comm.reduce_scatter(torch.zeros(3), tp)
    with pytest.raises(ValueError, match="dimension 1 of length 3 does not split over tp=4"):
        comm.local_shard(mine, tp, 1)
    send = start_send(mine, tp, (tp.rank + 1) % R)
    received = start_receive((8, 3), torch.float32, torch.device("cpu"), tp, (tp.rank - 1) % R).wait()
    send.wait()
    assert torch.equal(received, inputs[tp.rank - 1])


def test_plain_collectives_change_no_input_and_refuse_what_does_not_split(ranks):
    ranks(R, check_plain)


def rotated(transposed: bool) -> tuple[list[list[tuple[str, int]]], list[int]]:
    """Messages that this rank issues together while its number goes round, and the numbers that arrive."""
    layout, together, real = ParallelLayout(cp=dist.get_world_size()), [], dist.batch_isend_irecv
    cp = ParallelMesh.create(layout, torch.device("cpu")).cp

    def batch(messages: list[dist.P2POp]) -> list[dist.Work]:
        together.append([(message.op.__name__, message.peer) for message in messages])
        return real(messages)

    x, seen = torch.full((3, 2), cp.rank), []
    with patch.object(dist, "batch_isend_irecv", batch):
        for _ in range(cp.size):
            x = start_rotation(x.t() if transposed else x, cp).wait()
            seen += x.unique().tolist()
    return together, seen


@pytest.mark.parametrize("transposed", [False, True])
def test_two_ranks_send_and_receive_in_one_call(ranks, transposed):
    """NCCL joins the messages of one call; single ones of a pair would follow each other in its one stream."""
    for rank, (together, seen) in enumerate(ranks(2, rotated, transposed)):
        assert together == [[("isend", 1 - rank), ("irecv", 1 - rank)]] * 2
        assert seen == [1 - rank, rank]


def test_more_ranks_have_a_communicator_for_each_pair(ranks):
    for rank, found in enumerate(ranks(3, rotated, False)):
        assert found == ([], [(rank - step) % 3 for step in (1, 2, 3)])


def check_in_place() -> None:
    tp = tp_axis()
    inputs = tensors((8, 3), seed=2)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole_input = inputs[tp.rank].to(dtype, copy=True).flatten()
        own = comm.local_shard(whole_input, tp)
        comm.start_reduce_scatter_into(own, whole_input, tp).wait()
        total = torch.stack(inputs).sum(0).to(dtype).flatten()
        assert torch.equal(own, comm.local_shard(total, tp))
        gathered = torch.zeros(8, 3, dtype=dtype)
        comm.local_shard(gathered, tp).copy_(comm.local_shard(total.view(8, 3), tp))
        pending = comm.start_all_gather_in_place(gathered, tp)
        assert torch.equal(pending.wait(), total.view(8, 3))
        assert pending.is_done()


def test_flat_buffers_are_scattered_and_gathered_in_place(ranks):
    ranks(R, check_in_place)


SPLITS = {
    "even": [[2] * R] * R,
    "uneven": [[1, 0, 3, 2], [0, 0, 0, 5], [2, 2, 1, 1], [0, 4, 0, 0]],
    "rank 1 gets nothing": [[3, 0, 1, 0], [1, 0, 1, 1], [0, 0, 2, 2], [1, 0, 0, 0]],
    "rank 2 sends nothing": [[1, 2, 3, 4], [4, 3, 2, 1], [0, 0, 0, 0], [1, 1, 1, 1]],
    "nobody sends anything": [[0] * R] * R,
}
"""Rows that each rank (row) sends to each other (column)."""


def check_exchange(dtype: torch.dtype) -> list[str]:
    tp = tp_axis()
    wrong = []
    for name, table in SPLITS.items():
        sent = [torch.randn(sum(row), 3, generator=torch.Generator().manual_seed(r)) for r, row in enumerate(table)]
        sent = [x.to(dtype) for x in sent]
        pieces = [x.split(row) for x, row in zip(sent, table, strict=True)]
        x = sent[tp.rank].clone().requires_grad_()
        out = comm.all_to_all(x, tp, table[tp.rank], [row[tp.rank] for row in table])
        if not torch.equal(out, torch.cat([of_rank[tp.rank] for of_rank in pieces])):
            wrong.append(f"{name}: forward")
        # The receiver of a row weighs it by one more than its rank: the sender can tell where its rows have been.
        out.backward(torch.full_like(out, float(tp.rank + 1)))
        weights = torch.arange(1, R + 1).repeat_interleave(torch.tensor(table[tp.rank]))
        if x.grad is None or not torch.equal(x.grad, weights.to(dtype).unsqueeze(1).expand_as(x)):
            wrong.append(f"{name}: backward")
        if not torch.equal(x.detach(), sent[tp.rank]):
            wrong.append(f"{name}: changed its input")
        if name == "even" and not torch.equal(comm.all_to_all(x, tp), out):
            wrong.append("without splits")
    with pytest.raises(ValueError, match="all-to-all over tp: 3 rows do not split over 4 ranks"):
        comm.all_to_all(torch.zeros(3), tp)
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exchange_and_its_gradients_also_of_pieces_without_rows(ranks, dtype):
    assert ranks(R, check_exchange, dtype) == [[]] * R


def test_on_one_rank_everything_is_the_identity():
    x, alone = torch.randn(3, 5, requires_grad=True), Axis("tp")
    for function, _, _ in PAIRS.values():
        assert function(x, alone) is x
    assert comm.all_reduce(x, alone) is x
    assert comm.all_to_all(x, alone) is x


class Uneven(nn.Module):
    """A column of padded rows and a parameter of which each rank saw a part."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(3, 8, mesh, blocks=2)
        self.scale = nn.Parameter(torch.ones(3))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"scale": ParamSpec((3,), grad_sum_over_tp=True)}


def check_parity_tools() -> None:
    mesh = ParallelMesh.create(ParallelLayout(tp=R), torch.device("cpu"))
    model = Uneven(mesh)
    generator = torch.Generator().manual_seed(1)
    full = {name: torch.randn(spec.global_shape, generator=generator) for name, _, spec in named_specs(model)}
    load_whole(model, full, mesh)
    assert_same(whole_parameters(model, mesh), full, rtol=0.0, atol=0.0)

    model.scale.grad = torch.full((3,), float(mesh.rank))
    gradients = whole_gradients(model, mesh)
    assert gradients["scale"].tolist() == [6.0, 6.0, 6.0]
    assert not gradients["column.weight"].any()
    assert whole_gradients(model, mesh, sum_over_tp=False)["scale"].tolist() == [0.0] * 3

    padded = ParamSpec((5, 2), tp_dim=0)  # slices of 2: the last rank holds nothing but padding
    rows = torch.arange(10.0).view(5, 2)
    mine = local_slice(rows, padded, (2, 2), mesh.shard_ranks)
    assert mine[-1].any() == (mesh.rank < 2)
    assert torch.equal(whole(mine, padded, mesh), rows)
    with pytest.raises(AssertionError, match="tp rank 1 holds another value than tp rank 0"):
        whole(torch.tensor([float(mesh.rank)]), ParamSpec((1,)), mesh)


def test_parity_tools_put_together_what_ranks_hold(ranks):
    ranks(R, check_parity_tools)


def test_differences_name_each_tensor_and_what_is_wrong_with_it():
    right = {"a": torch.tensor([100.0, 1.0]), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(2)}
    ours = {
        "a": torch.tensor([100.0, 1.0005]),
        "b": torch.tensor([1.0, float("nan")]),
        "c": torch.ones(3),
        "e": right["d"],
    }
    assert differences(ours, right) == {
        "b": "off by nan, allowed 1.1e-05",
        "c": "shape (3,) is not (2,)",
        "d": "missing",
        "e": "not in the reference",
    }
    with pytest.raises(AssertionError, match=r"a: off by 0\.0005, allowed 0\.0001"):
        assert_same({"a": ours["a"]}, {"a": right["a"]}, rtol=1e-6)
