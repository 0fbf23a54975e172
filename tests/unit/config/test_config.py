"""Properties of all layouts: values that an error calls valid are valid."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.config import transformer
from lightning_megatron.config.layout import BatchShape, ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, multiples_around, nearest_to
from lightning_megatron.layers.norm import NORMS
from lightning_megatron.models.presets import preset
from lightning_megatron.ops.activation import ACTIVATIONS

sizes = st.integers(1, 9)


def fault_of(problem: Problem) -> str:
    """The product that does not divide: the words of a reason before its numbers."""
    return problem.reason.split(" = ")[0]


@settings(max_examples=150, deadline=None)
@given(tp=sizes, pp=sizes, cp=sizes, ep=sizes, etp=sizes, world=st.integers(1, 64))
def test_whatever_is_called_valid_removes_its_problem(tp, pp, cp, ep, etp, world):
    layout = ParallelLayout(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    for problem in layout.problems(world):
        assert problem.nearest, problem
        for value in problem.nearest:
            names = problem.argument.split(" x ")
            values = [value] if len(names) == 1 else map(int, str(value).split(" x "))
            mended = replace(layout, **dict(zip(names, values, strict=True)))
            assert fault_of(problem) not in map(fault_of, mended.problems(world))


@settings(max_examples=150, deadline=None)
@given(tp=sizes, heads=st.integers(1, 12), per_group=st.integers(1, 4), ffn=st.integers(1, 40))
def test_tensor_parallel_sizes_called_valid_suit_the_whole_model(tp, heads, per_group, ffn):
    model = TransformerConfig(2, 8, heads * per_group, 10, 8, head_dim=4, num_query_groups=heads, ffn_hidden_size=ffn)
    for problem in ParallelLayout(tp=tp).problems(model=model):
        for value in problem.nearest:
            assert isinstance(value, int)
            assert ParallelLayout(tp=value).problems(model=model) == []


@given(value=st.integers(1, 100), step=st.integers(1, 16))
def test_multiples_around_a_value(value, step):
    around = multiples_around(value, step)
    assert all(m % step == 0 and m >= step for m in around)
    best = min(abs(value - m) for m in range(step, 200, step))
    assert abs(around[0] - value) == best


def test_nearest_values_come_closest_first_and_the_smaller_of_two_before_the_larger():
    assert nearest_to(5, [1, 2, 4, 6, 8, 6]) == (4, 6, 2)
    assert nearest_to(5, []) == ()


def test_good_configurations_have_no_problems():
    batch = BatchShape(
        batch_size=8, micro_batch_size=2, seq_length=8192, vocab_size=128256, global_batch_size=128,
        accumulate_grad_batches=4,
    )  # fmt: skip
    layout = ParallelLayout(tp=8, pp=4, dp=4, vpp=2)
    assert layout.problems(128, preset("llama3.1-70b"), batch) == []
    assert ParallelLayout(tp=2, sequence_parallel=False).problems(batch=BatchShape(seq_length=7)) == []
    assert ParallelLayout(tp=4, cp=2, ep=8, etp=1).problems(8) == []


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ParallelLayout(), False),
        (ParallelLayout(tp=2), True),
        (ParallelLayout(tp=2, sequence_parallel=False), False),
        (ParallelLayout(sequence_parallel=False), False),
    ],
)
def test_sequence_parallelism_is_on_where_there_is_tensor_parallelism(layout, expected):
    assert layout.uses_sequence_parallel is expected


def test_sizes_derived_from_a_changed_field_are_derived_again():
    tiny = preset("gpt-tiny").replace(hidden_size=96, num_attention_heads=6)
    assert (tiny.ffn_hidden_size, tiny.head_dim, tiny.num_query_groups) == (384, 16, 6)
    llama = preset("llama3.1-8b").replace(hidden_size=2048)
    assert (llama.ffn_hidden_size, llama.head_dim, llama.num_query_groups) == (14336, 64, 8)
    kept = preset("llama3.1-8b").replace(hidden_size=2048, head_dim=128)
    assert kept.head_dim == 128


def test_every_norm_and_activation_that_a_configuration_names_exists():
    assert set(transformer.NORMS) == set(NORMS)
    assert set(transformer.ACTIVATIONS) == set(ACTIVATIONS)


def test_an_error_travels_between_processes_with_its_problems():
    error = ConfigError([Problem("tp", 3, "does not divide", (2, 4)), Problem("pp", 0, "too few")])
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems
    assert str(again) == str(error)
