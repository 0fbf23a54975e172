"""Collectives on tensors of the device: numbers by formula, and the refusals of HCCL."""

from __future__ import annotations

import os
from datetime import timedelta

import card
import pytest
import torch
import torch.distributed as dist
from card import assert_refusal, refusal
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager

HPU = "hpu"


def mine(dtype=torch.float32, value=1.0):
    """``[4]``, filled with the rank's number plus one, times a value."""
    return torch.full((4,), value * (dist.get_rank() + 1), device=HPU).to(dtype)


# Reductions: two ranks hold 1 and 2


def reduced(op, dtype):
    tensor = mine(dtype)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    assert tensor.device.type == HPU
    return tensor.float().unique().tolist()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize(("op", "right"), [("SUM", 3.0), ("MAX", 2.0), ("MIN", 1.0), ("PRODUCT", 2.0)])
def test_all_reduce(ranks, op, right, dtype):
    assert ranks(2, reduced, op, dtype) == [[right]] * 2


def big_integers():
    tensor = torch.tensor([2**24 + 1 + dist.get_rank(), 5], device=HPU)
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_integers_are_reduced_in_fp32(ranks):
    assert 2 * 2**24 + 3 not in ranks(2, big_integers)[0]
    assert ranks(2, big_integers)[0][1] == 10


def averaged(dtype):
    return reduced("AVG", dtype)


def test_the_mean(ranks):
    if card.OLD:
        assert_refusal(ranks(2, refusal, averaged, torch.float32)[1], "Unsupported ReduceOp for HCCL process group")
    else:
        assert ranks(2, averaged, torch.float32) == [[1.5]] * 2
    assert_refusal(ranks(2, refusal, averaged, torch.bool)[0], "Cannot use ReduceOp.AVG with boolean inputs")


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_other_reductions_are_refused(ranks, op):
    assert_refusal(ranks(2, refusal, reduced, op, torch.int32)[0], "Unsupported ReduceOp for HCCL process group")


def reduced_to_one():
    tensor = mine()
    dist.reduce(tensor, 1)
    return tensor.tolist()


def test_reduce(ranks):
    assert ranks(2, reduced_to_one)[1] == [3.0] * 4


def not_contiguous():
    whole = torch.full((2, 3), float(dist.get_rank()), device=HPU)
    dist.all_reduce(whole.t())
    column = torch.full((4, 2), float(dist.get_rank()), device=HPU)
    dist.broadcast(column[:, 1], 1)
    return whole.unique().tolist(), column.tolist()


def test_a_tensor_that_is_not_contiguous_is_copied_and_back(ranks):
    summed, received = ranks(2, not_contiguous)[0]
    assert summed == [1.0]
    assert received == [[0.0, 1.0]] * 4


def scattered(dtype):
    output, world = torch.empty(2, device=HPU, dtype=dtype), dist.get_world_size()
    dist.reduce_scatter_tensor(output, torch.arange(2 * world, device=HPU).to(dtype))
    return output.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_reduce_scatter(ranks, dtype):
    assert ranks(2, scattered, dtype) == [[0, 2], [4, 6]]


def scattered_list():
    output = torch.empty(4, device=HPU)
    dist.reduce_scatter(output, [mine(), mine(value=10.0)])
    return output.tolist()


def test_reduce_scatter_of_a_list(ranks):
    assert ranks(2, scattered_list) == [[3.0] * 4, [30.0] * 4]


def wrong_sizes():
    four, two = torch.ones(4, device=HPU), torch.ones(2, device=HPU)
    return [
        refusal(dist.reduce_scatter_tensor, two, torch.ones(5, device=HPU)),
        refusal(dist.reduce_scatter_tensor, two, four.bfloat16()),
        refusal(dist.all_gather_into_tensor, torch.ones(5, device=HPU), two),
        refusal(dist.all_gather_into_tensor, four, two.bfloat16()),
    ]


def test_sizes_and_types_that_do_not_fit(ranks):
    texts = [
        "input tensor must be the same size as output size times world size",
        "input tensor must be the same type as the output tensor.",
        "output tensor size must be equal to world_size times input tensor size",
        "output tensor must have the same type as input tensor",
    ]
    for said, text in zip(ranks(2, wrong_sizes)[0], texts, strict=True):
        assert_refusal(said, text)


def of_complex_numbers():
    # By the group's own method: the function would hand real numbers on.
    return refusal(dist.group.WORLD.allreduce, [torch.ones(2, device=HPU, dtype=torch.complex64)])


def test_types_it_does_not_know(ranks):
    text = "Input tensor data type is not supported for HCCL process group: "
    assert_refusal(ranks(2, of_complex_numbers)[0], text)


# Moves


def gathered(dtype):
    output = torch.empty(8, device=HPU, dtype=dtype)
    dist.all_gather_into_tensor(output, mine(dtype))
    return output.float().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn], ids=str)
def test_all_gather(ranks, dtype):
    assert ranks(2, gathered, dtype) == [[1.0] * 4 + [2.0] * 4] * 2


def gathered_parts():
    parts = [torch.empty(rank + 1, device=HPU) for rank in range(2)]
    dist.all_gather(parts, torch.full((dist.get_rank() + 1,), float(dist.get_rank()), device=HPU))
    return [part.tolist() for part in parts]


def test_parts_of_all_gather_may_differ_in_size(ranks):
    assert ranks(2, gathered_parts) == [[[0.0], [1.0, 1.0]]] * 2


def exchanged(dtype, uneven):
    rank = dist.get_rank()
    send, receive = ([[1, 2], [3, 1]][rank], [[1, 3], [2, 1]][rank]) if uneven else ([2, 2], [2, 2])
    rows = (torch.arange(sum(send), device=HPU) + 8 * rank).to(dtype)
    output = torch.empty(sum(receive), device=HPU, dtype=dtype)
    dist.all_to_all_single(output, rows, receive, send)
    return output.float().tolist()


EVEN, UNEVEN = [[0, 1, 8, 9], [2, 3, 10, 11]], [[0, 8, 9, 10], [1, 2, 11]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8], ids=str)
def test_all_to_all(ranks, dtype):
    assert ranks(2, exchanged, dtype, False) == EVEN
    assert ranks(2, exchanged, dtype, True) == UNEVEN


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8], ids=str)
def test_all_to_all_of_bytes_is_right_only_where_it_is_even(ranks, dtype):
    even = ranks(2, exchanged, dtype, False)
    assert even == ([torch.tensor(r).float().to(dtype).float().tolist() for r in EVEN])
    uneven = ranks(2, refusal, exchanged, dtype, True)
    card.note("uneven splits of bytes", uneven)  # the real one moves other bytes, the simulation says so
    if card.SIMULATED:
        assert all("moves wrong lengths" in said for said in uneven)


def wrong_splits():
    x = torch.ones(4, device=HPU)
    return refusal(dist.all_to_all_single, torch.empty_like(x), x, [2, 2], [1, 2])


def test_splits_that_do_not_add_up(ranks):
    assert_refusal(ranks(2, wrong_splits)[0], "Split sizes doesn't match total dim 0 size")


def exchanged_lists():
    output = [torch.empty(2, device=HPU) for _ in range(2)]
    dist.all_to_all(output, [mine()[:2] * 10 + peer for peer in range(2)])
    return [part.tolist() for part in output]


def test_all_to_all_of_lists(ranks):
    assert ranks(2, exchanged_lists) == [[[10.0] * 2, [20.0] * 2], [[11.0] * 2, [21.0] * 2]]


def gathered_and_scattered():
    root = dist.get_rank() == 0
    parts = [torch.empty(4, device=HPU) for _ in range(2)] if root else None
    dist.gather(mine(), parts)
    output = torch.empty(4, device=HPU)
    dist.scatter(output, [part * 10 for part in parts] if root else None)
    return output.tolist()


def test_gather_and_scatter(ranks):
    assert ranks(2, gathered_and_scattered) == [[10.0] * 4, [20.0] * 4]


def lists_of_the_wrong_length():
    root = dist.get_rank() == 0
    group, three = dist.group.WORLD, [torch.empty(4, device=HPU) for _ in range(3)]
    to_root, options = dist.GatherOptions(), dist.ScatterOptions()
    to_root.rootRank = options.rootRank = 0
    if root:
        return [
            refusal(group.gather, [three], [mine()], to_root),
            refusal(group.scatter, [mine()], [three], options),
            refusal(group.scatter, [mine()], [], options),
        ]
    return [refusal(group.scatter, [mine()], [three], options)]


def test_what_gather_and_scatter_refuse(ranks):
    on_root, elsewhere = ranks(2, lists_of_the_wrong_length)
    texts = [
        "Output list should be same size as process group",
        "Input list should be same size as process group",
        "Requires a single element list",
    ]
    for said, text in zip(on_root, texts, strict=True):
        assert_refusal(said, text)
    assert_refusal(elsewhere[0], "Requires empty input on non-root")


# Point to point, several at once, groups


def swapped():
    theirs = torch.empty(3, device=HPU, dtype=torch.int8)
    ours, peer = torch.full_like(theirs, dist.get_rank() + 1), 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, ours, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return theirs.tolist()


def test_neighbours_swap(ranks):
    assert ranks(2, swapped) == [[2] * 3, [1] * 3]


def from_anyone():
    return refusal(dist.recv, torch.empty(3, device=HPU))


def test_a_sender_must_be_named(ranks):
    assert_refusal(ranks(2, from_anyone)[0], "ProcessGroupHcclBase does not support recv")


def coalesced():
    a, b = mine(), mine(value=10.0)
    with _coalescing_manager(None, torch.device(HPU), async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    outputs = [torch.empty(8, device=HPU) for _ in range(2)]
    with _coalescing_manager(None, torch.device(HPU)):
        for output, tensor in zip(outputs, (a, b), strict=True):
            dist.all_gather_into_tensor(output, tensor)
    return a[0].item(), b[0].item(), outputs[1].tolist()


def test_several_at_once(ranks):
    assert ranks(2, coalesced) == [(3.0, 30.0, [30.0] * 8)] * 2


def coalescing_by_hand():
    group, device, tensor = dist.group.WORLD, torch.device(HPU), mine()
    first = refusal(group._end_coalescing, device)
    group._start_coalescing(device)
    second = refusal(group._start_coalescing, device)
    work = group.allreduce([tensor])
    before = tensor[0].item()
    group._end_coalescing(device).wait()
    work.wait()
    return first, second, before, tensor[0].item()


def test_a_block_queues_until_its_end(ranks):
    for rank, (first, second, before, after) in enumerate(ranks(2, coalescing_by_hand)):
        assert after == 3.0
        if card.SIMULATED:  # a real card may be quicker than the question
            assert before == rank + 1
        assert_refusal(first, "endCoalescing invoked without startCoalescing")
        assert_refusal(second, "Coalescing is already in progress.")


def asynchronous():
    tensor = mine()
    work = dist.all_reduce(tensor, async_op=True)
    assert work.is_completed()  # asked for it, it waits
    other = dist.all_reduce(mine(), async_op=True)
    return tensor[0].item(), other.get_future().wait()[0][0].item()


def test_work(ranks):
    assert ranks(2, asynchronous) == [(3.0, 3.0)] * 2


def groups():
    hccl = dist.new_group([0, 1], timedelta(seconds=60), "hccl")
    gloo = dist.new_group([0, 1], backend="gloo")
    said = refusal(dist.all_reduce, torch.ones(2), group=hccl)
    on_host, on_device = torch.ones(2), torch.ones(2, device=HPU)
    dist.all_reduce(on_host, group=gloo)
    dist.all_reduce(on_device, group=hccl)
    dist.all_reduce(on_host)  # the default group has both
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()}, group=hccl)
    dist.barrier()
    dist.destroy_process_group(hccl)
    return said, on_host.tolist(), on_device.tolist(), objects


def test_groups_of_one_and_of_both_backends(ranks):
    said, on_host, on_device, objects = ranks(2, groups)[0]
    assert (on_host, on_device) == ([4.0, 4.0], [2.0, 2.0])
    assert objects == [{"rank": 0}, {"rank": 1}]
    assert_refusal(said, "No backend type associated with device type cpu")


def keywords():
    ranks = [0, 1]
    said = []
    for options in ({"use_local_synchronization": False}, {"group_desc": "a"}, {"device_id": None}):
        try:
            dist.new_group(ranks, **options)
        except TypeError as error:
            said.append(str(error))
    try:
        dist.init_process_group("gloo", device_id=torch.device(HPU, 0))
    except (TypeError, ValueError) as error:
        said.append(str(error))
    return said


def test_keywords_of_groups(ranks):
    said = ranks(2, keywords)[0]
    if card.OLD:
        names = ("use_local_synchronization", "group_desc", "device_id", "device_id")
        for text, name in zip([*said, *[card.NOT_REFUSED] * (4 - len(said))], names, strict=True):
            assert_refusal(text, f"unexpected keyword argument '{name}'")
    else:
        assert said == ["trying to initialize the default process group twice!"]


def out_of_order(seconds):
    from simulated_hpu.process_group import leave

    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    first = (a, b)[dist.get_rank()]
    said = refusal(leave, first, "ab"[dist.get_rank()], seconds)
    dist.barrier()
    return said


@card.simulation
def test_groups_are_left_in_one_order(ranks):
    for rank, said in enumerate(ranks(2, out_of_order, 0.5)):
        assert f"rank {rank} destroys group '{'ab'[rank]}'" in said
        assert "only 1 of its 2 members" in said


def trained(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(device)
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-2)
    samples = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(1))[:, dist.get_rank()]
    losses = []
    for sample in samples.to(device):
        loss = parallel(sample).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_data_parallel_training_is_the_hosts(ranks):
    for ours, right in zip(ranks(2, trained, HPU), ranks(2, trained, "cpu"), strict=True):
        assert ours == card.approximately(right, 0.01)


# All cards


def on_all_cards():
    """Every collective of a training step, by formula, and the module of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(total := torch.full((8,), rank + 1.0, device=HPU))
    dist.all_gather_into_tensor(parts := torch.empty(world, device=HPU), torch.full((1,), float(rank), device=HPU))
    dist.reduce_scatter_tensor(share := torch.empty(1, device=HPU), torch.arange(float(world), device=HPU))
    dist.all_to_all_single(turned := torch.empty(world, device=HPU), torch.arange(float(world), device=HPU) + 10 * rank)
    dist.broadcast(root := torch.full((2,), float(rank), device=HPU), world - 1)
    found = [tensor.tolist() for tensor in (total, parts, share, turned, root)]
    return found, os.environ.get("HLS_MODULE_ID")


def test_all_cards_together(ranks):
    world = min(8, torch.hpu.device_count())
    answers = ranks(world, on_all_cards)
    card.note("modules of ranks", [module for _, module in answers])
    for rank, (found, _) in enumerate(answers):
        turned = [10.0 * peer + rank for peer in range(world)]
        total, root = [world * (world + 1) / 2] * 8, [world - 1.0] * 2
        assert found == [total, [float(peer) for peer in range(world)], [float(world * rank)], turned, root]
    if not card.SIMULATED:
        assert len({module for _, module in answers}) == world
