from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.checkpoint.tensors.fragment import Fragment, boxes_of_range, cover_fault
from lightning_megatron.params import Box, ParamSpec, ShardRanks

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def local_shape(whole: tuple[int, ...], tp_dim: int | None, tp: int) -> tuple[int, ...]:
    return tuple(-(-n // tp) if dim == tp_dim else n for dim, n in enumerate(whole))


def local_of(whole: Tensor, spec: ParamSpec, tp: int, tp_rank: int) -> Tensor:
    """The padded local slice of a whole tensor."""
    shape = local_shape(spec.global_shape, spec.tp_dim, tp)
    box = spec.local_box(shape, ShardRanks(tp=tp_rank))
    local = torch.zeros(shape, dtype=whole.dtype)
    local[tuple(slice(0, n) for n in box.sizes)] = whole[slices(box)]
    return local


@st.composite
def sharded(draw: st.DrawFn) -> tuple[ParamSpec, int]:
    shape = draw(shapes)
    tp_dim = draw(st.sampled_from([None, *range(len(shape))]))
    return ParamSpec(shape, tp_dim), draw(st.integers(1, 4)) if tp_dim is not None else 1


@st.composite
def ranges(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    marks = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    return list(zip([0, *marks], [*marks, length], strict=True))


@given(shapes, st.data())
def test_a_range_without_padding_is_cut_into_few_boxes_that_hold_its_elements_in_order(shape, data):
    numbers = torch.arange(prod(shape)).reshape(shape)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    boxes = boxes_of_range(ParamSpec(shape), shape, ShardRanks(), start, end)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert [i for c in boxes for i in numbers[slices(c.box)].flatten().tolist()] == list(range(start, end))
    flat = numbers.flatten()[start:end]
    for c in boxes:
        assert torch.equal(c.view(flat), numbers[slices(c.box)])
        assert c.view(flat).data_ptr() == flat[c.start :].data_ptr(), "a view of the range, not a copy"


@given(sharded(), st.data())
@settings(max_examples=150)
def test_all_cuts_of_all_slices_cover_the_whole_tensor_exactly_once(case, data):
    spec, tp = case
    shape = local_shape(spec.global_shape, spec.tp_dim, tp)
    boxes = []
    for tp_rank in range(tp):
        for start, end in data.draw(ranges(prod(shape))):
            boxes += [c.box for c in boxes_of_range(spec, shape, ShardRanks(tp=tp_rank), start, end)]
    counts = torch.zeros(spec.global_shape, dtype=torch.int)
    for box in boxes:
        counts[slices(box)] += 1
    assert (counts == 1).all()
    assert cover_fault(spec.global_shape, boxes) is None


@given(sharded(), st.integers(1, 4), st.data())
@settings(max_examples=150)
def test_a_tensor_comes_back_bit_equal_through_any_other_cut_and_padding_is_left_alone(case, new_tp, data):
    spec, tp = case
    if spec.tp_dim is None:
        new_tp = 1
    whole = torch.randn(spec.global_shape)
    store = torch.full(spec.global_shape, float("nan"))
    shape = local_shape(spec.global_shape, spec.tp_dim, tp)
    for tp_rank in range(tp):
        flat = local_of(whole, spec, tp, tp_rank).flatten()
        for start, end in data.draw(ranges(prod(shape))):
            piece = flat[start:end]
            for chunk in Fragment.of_flat(piece, spec, shape, ShardRanks(tp=tp_rank), start, write=True).chunks:
                store[slices(chunk.box)] = chunk.data
    assert torch.equal(store, whole)
    shape = local_shape(spec.global_shape, spec.tp_dim, new_tp)
    for tp_rank in range(new_tp):
        flat = torch.zeros(prod(shape))
        for start, end in data.draw(ranges(prod(shape))):
            for chunk in Fragment.of_flat(
                flat[start:end], spec, shape, ShardRanks(tp=tp_rank), start, write=False
            ).chunks:
                chunk.data.copy_(store[slices(chunk.box)])
        assert torch.equal(flat.view(shape), local_of(whole, spec, new_tp, tp_rank))


def test_padding_of_a_vocabulary_is_in_no_box():
    spec = ParamSpec((13, 2), tp_dim=0)  # tp=4: 4 rows each, 3 of the last rank's are padding
    assert [c.box for c in boxes_of_range(spec, (4, 2), ShardRanks(tp=3), 0, 8)] == [Box((12, 0), (1, 2))]
    assert boxes_of_range(spec, (4, 2), ShardRanks(tp=3), 2, 8) == []
    padded = torch.arange(8.0).reshape(4, 2)
    (chunk,) = Fragment.of_local(padded, spec, ShardRanks(tp=3), write=True).chunks
    assert chunk.data.tolist() == [[0.0, 1.0]]


def test_padding_between_rows_is_cut_from_views_too():
    spec = ParamSpec((2, 5), tp_dim=1)  # tp=2: columns 0-2 and 3-4, the last local column of rank 1 is padding
    flat = torch.arange(6.0)
    (chunk,) = Fragment.of_flat(flat, spec, (2, 3), ShardRanks(tp=1), 0, write=True).chunks
    assert chunk.box == Box((0, 3), (2, 2))
    assert chunk.data.tolist() == [[0.0, 1.0], [3.0, 4.0]]


def test_a_tensor_without_elements_keeps_its_name_and_shape():
    assert len(Fragment.of_local(torch.empty(0, 3), ParamSpec((0, 3)), ShardRanks(), write=True).chunks) == 1


@pytest.mark.parametrize(
    ("local", "spec", "words"),
    [
        ((3, 4), ParamSpec((3, 5)), r"\(3, 4\).*\(3, 5\) held whole"),
        ((3, 4), ParamSpec((6, 5), tp_dim=0), r"cut along dimension 0"),
        ((3,), ParamSpec((3, 1)), r"\(3,\)"),
    ],
)
def test_a_local_tensor_that_is_no_slice_is_refused_with_both_shapes(local, spec, words):
    with pytest.raises(ValueError, match=words):
        Fragment.of_local(torch.zeros(local), spec, ShardRanks(), write=True)


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((4, 4), [Box((0, 0), (2, 4))], "8 of 16 elements are written by no rank"),
        ((4, 4), [Box((0, 0), (3, 4)), Box((2, 0), (2, 4))], "two ranks write the same"),
        ((4, 4), [Box((2, 0), (3, 4))], "reaches beyond"),
        ((2**40, 4), [Box((0,), (16,))], "has other dimensions"),
        ((4,), [Box((0,), (4, 1))], "has other dimensions"),
        ((), [Box((), ()), Box((), ())], "same scalar"),
        ((), [], "1 of 1"),
        # as many elements as the tensor has, yet a hole and an overlap
        ((4,), [Box((0,), (2,)), Box((1,), (2,))], "two ranks write the same"),
    ],
)
def test_holes_and_overlaps_are_told(shape, boxes, words):
    assert words in (cover_fault(shape, boxes) or "")
