import pickle
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.errors import ConfigError


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, item: int) -> int:
        return item


def global_batches(total: int, dp_size: int, state: dict[str, int] | None = None, **options: Any) -> list[list[Any]]:
    """Samples that all ranks together read, batch by batch."""
    ranks = []
    for rank in range(dp_size):
        sampler = MegatronSampler(total, dp_rank=rank, dp_size=dp_size, **options)
        if state is not None:
            sampler.load_state_dict(state)
        ranks.append(list(sampler))
    assert len({len(r) for r in ranks}) == 1
    return [[i for part in parts for i in part] for parts in zip(*ranks, strict=True)]


@given(
    total=st.integers(8, 60),
    batch=st.integers(1, 2),
    dp=st.sampled_from([1, 2, 4]),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
def test_order_does_not_depend_on_the_ranks(total: int, batch: int, dp: int, shuffle: bool, seed: int) -> None:
    many = global_batches(total, dp, batch_size=batch, shuffle=shuffle, seed=seed)
    one = global_batches(total, 1, batch_size=batch * dp, shuffle=shuffle, seed=seed)
    assert many == one
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist() if shuffle else range(total)
    assert [i for b in one for i in b] == list(order)[: total // (batch * dp) * batch * dp]


@given(
    total=st.integers(16, 60),
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    steps=st.integers(0, 4),
    epoch=st.integers(0, 3),
)
def test_other_ranks_resume_at_the_same_sample(total: int, before: int, after: int, steps: int, epoch: int) -> None:
    sampler = MegatronSampler(total, batch_size=2, dp_rank=before - 1, dp_size=before, shuffle=True, seed=1)
    sampler.set_epoch(epoch)
    done = min(steps, len(sampler))
    sampler.advance(done)
    state = sampler.state_dict()
    assert state == {"epoch": epoch, "consumed_samples": done * 2 * before}
    rest = [i for b in global_batches(total, after, state, batch_size=2, shuffle=True, seed=1) for i in b]
    consumed = done * 2 * before
    if total - consumed < 2 * after:
        epoch, consumed = epoch + 1, 0
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1 + epoch)).tolist()[consumed:]
    assert rest == order[: len(order) // (2 * after) * 2 * after]


def test_last_batch_is_filled() -> None:
    assert global_batches(7, 2, batch_size=2, drop_last=False) == [[0, 1, 2, 3], [4, 5, 6, 0]]
    assert global_batches(2, 4, batch_size=2, drop_last=False) == [[0, 1] * 4]
    assert global_batches(7, 2, batch_size=2) == [[0, 1, 2, 3]]


@given(total=st.integers(1, 60), dp=st.integers(1, 5), batch=st.integers(1, 5))
def test_without_filling_ranks_share_what_is_left(total: int, dp: int, batch: int) -> None:
    samplers = [
        MegatronSampler(total, batch_size=batch, dp_rank=rank, dp_size=dp, drop_last=False, fill="short")
        for rank in range(dp)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert {len(own) for own in batches} == {len(samplers[0])} == {-(-total // (batch * dp))}
    together = [[sample for rank in range(dp) for sample in batches[rank][k]] for k in range(len(samplers[0]))]
    assert [sample for one in together for sample in one] == list(range(total))
    sizes = [[len(own[k]) for own in batches] for k in range(len(samplers[0]))]
    assert all(max(one) - min(one) <= 1 and max(one) <= batch for one in sizes)
    assert all(size == batch for one in sizes[:-2] for size in one)
    if total >= dp and (batch > 1 or total % dp == 0):
        assert all(min(one) > 0 for one in sizes), "no rank is without a sample"
    for k, one in enumerate(together):
        samplers[0].advance()
        assert samplers[0].consumed_samples == sum(map(len, together[: k + 1])), one


@given(total=st.integers(1, 60), dp=st.integers(1, 5), batch=st.integers(1, 5))
def test_an_even_last_batch_has_what_is_left_as_torchs_sampler_shares_it(total: int, dp: int, batch: int) -> None:
    batches = global_batches(total, dp, batch_size=batch, drop_last=False, fill="even")
    read = [sample for one in batches for sample in one]
    assert len(read) == DistributedSampler(Numbers(total), dp, 0).num_samples * dp, "as few samples come twice"
    assert read == [i % total for i in range(len(read))]
    assert all(len(one) == batch * dp for one in batches[:-1])
    assert len(batches[-1]) % dp == 0
    sampler = MegatronSampler(total, batch_size=batch, dp_size=dp, drop_last=False, fill="even")
    sampler.advance(len(batches))
    assert sampler.consumed_samples == total


def test_epochs_differ_and_repeat() -> None:
    sampler = MegatronSampler(20, batch_size=5, shuffle=True, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_sampler_faults() -> None:
    with pytest.raises(ConfigError, match=r"3 problems(.|\n)*batch_size=0(.|\n)*dp_rank=2: must be in 0..1 where dp=2"):
        MegatronSampler(0, batch_size=0, dp_rank=2, dp_size=2)
    with pytest.raises(ConfigError, match=r"fill='none': no such way.*nearest valid: repeat, even, short"):
        MegatronSampler(7, batch_size=1, fill="none")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="7 samples do not fill one global batch of 4 x dp 2; lower it"):
        MegatronSampler(7, batch_size=4, dp_size=2)


def loader(workers: int = 0, **options: Any) -> ResumableDataLoader:
    sampler = MegatronSampler(22, batch_size=2, shuffle=True, seed=5, **options)
    return ResumableDataLoader(Numbers(22), batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def read(batches: Any) -> list[list[int]]:
    return [b.tolist() for b in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_in_the_middle_of_an_epoch(workers: int) -> None:
    whole = loader(workers)
    whole.position.set_epoch(4)
    expected = read(whole)
    assert len(expected) == len(whole) == 11
    stopped = loader(workers)
    stopped.position.set_epoch(4)
    iterator = iter(stopped)
    assert read(islice(iterator, 4)) == expected[:4]
    state = stopped.state_dict()
    assert state == {"epoch": 4, "consumed_samples": 8}, "what the workers prefetched does not count"
    resumed = loader(workers)
    resumed.load_state_dict(state)
    assert len(resumed) == 11
    assert read(resumed) == expected[4:]
    resumed.position.set_epoch(5)
    assert len(read(resumed)) == 11
    assert resumed.state_dict() == {"epoch": 5, "consumed_samples": 22}


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    done = loader()
    read(done)
    state = done.state_dict()
    assert state == {"epoch": 0, "consumed_samples": 22}
    next_epoch = loader()
    next_epoch.position.set_epoch(1)
    resumed = loader()
    resumed.load_state_dict(state)
    assert read(resumed) == read(next_epoch)


def test_lightnings_order_of_calls_is_harmless() -> None:
    """It makes the iterator first, then may restore the state, and names the epoch last."""
    expected = loader()
    expected.position.set_epoch(2)
    batches = read(expected)
    resumed = loader()
    iterator = iter(resumed)
    resumed.load_state_dict({"epoch": 2, "consumed_samples": 6})
    resumed.sampler.set_epoch(2)  # type: ignore[attr-defined]
    assert read(iterator) == batches[3:]
    # A limit ended epoch 1 early; the checkpoint was written after it. Now comes epoch 2, from its start.
    limited = loader()
    limited.load_state_dict({"epoch": 1, "consumed_samples": 6})
    iterator = iter(limited)
    limited.sampler.set_epoch(2)  # type: ignore[attr-defined]
    assert read(iterator) == batches


def test_a_new_iterator_starts_over() -> None:
    data = loader()
    assert read(islice(iter(data), 2)) == read(islice(iter(data), 2))


def test_lightning_need_not_shard_the_data_again() -> None:
    assert isinstance(loader().sampler, DistributedSampler)


def test_iterators_can_be_copied() -> None:
    iterator = iter(loader())
    next(iterator)
    assert len(pickle.loads(pickle.dumps(iterator))) == 11


def test_epochs_after_one_that_a_limit_of_steps_cut_off_have_their_own_orders():
    """Lightning counts such an epoch as done, so that its numbers run ahead of what has been read."""

    def sampler() -> MegatronSampler:
        return MegatronSampler(12, batch_size=4, shuffle=True, seed=3)

    def orders(given: MegatronSampler, epochs: list[int]) -> list[list[int]]:
        found = []
        for epoch in epochs:
            given.set_epoch(epoch)
            for batch in given:
                found.append(batch)
                given.advance()
        return found

    whole = orders(sampler(), [0, 1, 2, 3])
    first, resumed, again = sampler(), sampler(), sampler()
    batches = iter(first)
    assert [next(batches), next(batches)] == whole[:2]
    first.advance(2)
    resumed.load_state_dict({**first.state_dict(), "unfinished": 1})
    assert orders(resumed, [1, 2]) == whole[2:6]
    again.load_state_dict(resumed.state_dict())
    assert orders(again, [3, 4]) == whole[6:]
    assert orders(again, [0, 1]) == whole[:6], "another run"
