import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer

from lightning_megatron import MegatronDataModule
from lightning_megatron.data import BlendedDataset, DataError, GPTDataset, IndexedDataset, blend, build_gpt_datasets
from lightning_megatron.data.build import parse_data_path, parse_split
from lightning_megatron.errors import ConfigError

WriteCorpus = Callable[..., Path]


def naive_order(weights: Sequence[float], size: int, limits: Sequence[int]) -> list[tuple[int, int]]:
    """The rule, step by step, in IEEE doubles."""
    drawn = [0] * len(weights)
    order = []
    for k in range(size):
        behind = [
            w * float(max(k, 1)) - float(c) if c < limit else -np.inf
            for w, c, limit in zip(weights, drawn, limits, strict=True)
        ]
        best = behind.index(max(behind))
        order.append((best, drawn[best]))
        drawn[best] += 1
    return order


@pytest.mark.parametrize("few", [0, 100])
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), size=st.integers(0, 300))
def test_weighted_order(few: int, weights: list[float], size: int) -> None:
    shares = blend.normalized(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "_FEW", few)
        chosen, sample = blend.weighted_order(shares, size)
    assert (chosen.dtype, sample.dtype) == (np.int16, np.int64)
    assert list(zip(chosen.tolist(), sample.tolist(), strict=True)) == naive_order(shares, size, [size] * len(weights))


@pytest.mark.parametrize("few", [0, 100])
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(sum))
def test_exhaustive_order(few: int, sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "_FEW", few)
        chosen, sample = blend.exhaustive_order(sizes)
    shares = [size / sum(sizes) for size in sizes]
    order = list(zip(chosen.tolist(), sample.tolist(), strict=True))
    assert order == naive_order(shares, sum(sizes), sizes)
    assert sorted(order) == [(i, k) for i, size in enumerate(sizes) for k in range(size)]


def test_ties_take_the_first() -> None:
    assert blend.weighted_order([0.5, 0.5], 6)[0].tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("split", "spans"),
    [
        ("1,1,0", ((0.0, 0.5), (0.5, 1.0), None)),
        ("100", ((0.0, 1.0), None, None)),
        ("0,3,1", (None, (0.0, 0.75), (0.75, 1.0))),
        ("50/25/25", ((0.0, 0.5), (0.5, 0.75), (0.75, 1.0))),
    ],
)
def test_split(split: str, spans: tuple[object, ...]) -> None:
    assert parse_split(split) == spans


@pytest.mark.parametrize("split", ["", "0,0,0", "1,2,3,4", "a,b", "9,-1,1", "nan,1", "1.2.3,1", "inf"])
def test_faulty_split(split: str) -> None:
    with pytest.raises(ConfigError, match=r"split='.*': must be one to three numbers.*nearest valid: 969,30,1"):
        parse_split(split)


def test_data_path() -> None:
    assert parse_data_path("a b").prefixes == ("a b",)
    assert parse_data_path(["a", "b"]).weights is None
    assert parse_data_path(["a", "b", Path("c")]).prefixes == ("a", "b", "c")
    assert parse_data_path([0.3, "a", "7", "b"]).weights == (0.3, 7.0)
    for wrong in ([], [0.3, "a", 0.7], [0.3, "a", "b", "c"]):
        with pytest.raises(ConfigError, match=r"data_path=\[.*is a prefix, a list of prefixes, or a list of weight"):
            parse_data_path(wrong)
    for weight in (0, -1, "nan", "inf"):
        with pytest.raises(ConfigError, match="every weight must be a positive number"):
            parse_data_path([weight, "a", 1, "b"])


def test_splits_are_disjoint_and_whole(write_corpus: WriteCorpus) -> None:
    train, valid, test = build_gpt_datasets(write_corpus([10] * 20), seq_length=5, split="12,6,2")
    seen = [d.index.documents.tolist() for d in (train, valid, test) if isinstance(d, GPTDataset)]
    assert [len(s) for s in seen] == [12, 6, 2]
    assert sorted(i for s in seen for i in s) == list(range(20))
    assert sorted(seen[0]) == list(range(12))


def test_at_least_the_samples_asked_for(write_corpus: WriteCorpus) -> None:
    built = build_gpt_datasets(write_corpus([10] * 20), seq_length=5, split="12,6,2", num_samples=(1000, 33, 0))
    assert len(built[0] or []) >= 1000
    assert len(built[1] or []) >= 33
    assert built[2] is None


def test_one_path_for_each_split(write_corpus: WriteCorpus) -> None:
    a, b, c = write_corpus([50], "a"), write_corpus([70], "b"), write_corpus([90], "c")
    train, valid, test = build_gpt_datasets(
        train_data_path=[3.0, str(a), 1.0, str(b)],
        valid_data_path=[1.0, c],
        seq_length=5,
        num_samples=(40, None, None),
    )
    assert isinstance(train, BlendedDataset)
    assert len(train) == 40
    numbers = [train.locate(i)[0] for i in range(40)]
    assert numbers.count(0) == 30
    assert isinstance(valid, GPTDataset), "one prefix is read as it is, whatever its weight"
    assert len(valid) == 17
    assert test is None


def test_build_faults(write_corpus: WriteCorpus) -> None:
    a, b = write_corpus([50] * 9, "a"), write_corpus([70], "b")
    with pytest.raises(ConfigError, match="either one data_path for all splits or one a split, not none"):
        build_gpt_datasets(seq_length=4)
    with pytest.raises(ConfigError, match="either one data_path for all splits or one a split, not both"):
        build_gpt_datasets(a, train_data_path=b, seq_length=4)
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*seq_length=0(.|\n)*takes three numbers"):
        build_gpt_datasets(a, seq_length=0, num_samples=(1, 2))
    with pytest.raises(DataError, match=r"a: the valid part has no tokens \(0 of 9 sequences\); give it a larger"):
        build_gpt_datasets(a, seq_length=4, num_samples=(1, 1, 1))
    with pytest.raises(DataError, match=r"nowhere\.idx and .*nowhere\.bin not found"):
        build_gpt_datasets(a.parent / "nowhere", seq_length=4)


def test_a_weighted_blend_without_a_number_lasts_until_a_member_is_used_up(write_corpus: WriteCorpus) -> None:
    a, b, empty = write_corpus([50] * 9, "a"), write_corpus([70], "b"), write_corpus([0], "empty")
    whole = {"seq_length": 4, "split": "1"}
    (long, short), weights = [build_gpt_datasets(p, **whole)[0] for p in (a, b)], {"a": 3, "b": 2}  # type: ignore[arg-type]
    assert long is not None
    assert short is not None
    blend, *_ = build_gpt_datasets([weights["a"], a, weights["b"], b, 1, empty], **whole)  # type: ignore[arg-type]
    assert isinstance(blend, BlendedDataset)
    drawn = Counter(blend.locate(i) for i in range(len(blend)))
    assert max(drawn.values()) == 1
    by_member = Counter(number for number, _ in drawn)
    assert len(short) - 1 <= by_member[1] <= len(short) < len(long)
    assert by_member[0] / by_member[1] == pytest.approx(1.5, rel=0.1)


def test_members_without_samples_are_left_out_of_unweighted_blends(write_corpus: WriteCorpus) -> None:
    a, b = write_corpus([50] * 10, "a"), write_corpus([70], "b")
    train, valid, test = build_gpt_datasets([a, b], seq_length=5, split="8,2,0")
    assert isinstance(train, BlendedDataset)
    assert isinstance(valid, BlendedDataset)
    assert (len(train), len(valid)) == (79 + 13, 19)
    assert test is None


def test_a_blend_takes_what_its_weights_say(write_corpus: WriteCorpus) -> None:
    members = [GPTDataset(IndexedDataset(write_corpus([n], f"{n}")), seq_length=4) for n in (41, 81)]
    blended = BlendedDataset(members, [1, 3], 12)
    assert [blended.locate(i)[0] for i in range(12)].count(1) == 9
    assert blended[0]["tokens"].tolist() == members[1][0]["tokens"].tolist()
    assert len(BlendedDataset(members)) == 30
    with pytest.raises(DataError, match="big: the train blend takes 30 samples, it has 20; lower its weight"):
        BlendedDataset(members, [1, 3], 40, names=["small", "big"])


@pytest.mark.parametrize(("rest", "samples"), [(60, 50), (60, 10), (8, 10), (10, 1000), (40, 1)])
def test_few_samples_of_many_members_are_drawn_in_megatrons_order(
    write_corpus: WriteCorpus, rest: int, samples: int
) -> None:
    big, path = 0.9, write_corpus([4001])
    weights = [big, *[(1 - big) / rest] * rest]
    built, *_ = build_gpt_datasets(
        train_data_path=[part for weight in weights for part in (weight, path)],
        seq_length=4,
        num_samples=(samples, 0, 0),
    )
    assert isinstance(built, BlendedDataset)
    assert samples <= len(built) <= samples + rest + 1
    drawn = [built.locate(item) for item in range(len(built))]
    shares = blend.normalized(weights)
    assert drawn == naive_order(shares, len(built), [len(built)] * len(shares))
    assert {len(built[item]["tokens"]) for item in range(len(built))} == {4}


def test_blend_cache_and_pickle(write_corpus: WriteCorpus, tmp_path: Path) -> None:
    members = [GPTDataset(IndexedDataset(write_corpus([n], f"{n}")), seq_length=4) for n in (4001, 8001)]
    blended = BlendedDataset(members, [1, 3], 1000, cache_dir=tmp_path / "blend")
    files = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "blend").iterdir()}
    assert len(files) == 3
    again = BlendedDataset(members, [1, 3], 1000, cache_dir=tmp_path / "blend")
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "blend").iterdir()} == files
    turned = BlendedDataset(members, [3, 1], 1000, cache_dir=tmp_path / "blend")
    assert [turned.locate(i) for i in range(1000)] == naive_order([0.75, 0.25], 1000, [1000, 1000])
    packed = pickle.dumps(again)
    assert len(packed) < 6000
    assert [pickle.loads(packed).locate(i) for i in range(50)] == [blended.locate(i) for i in range(50)]


def test_blend_faults(write_corpus: WriteCorpus) -> None:
    member = GPTDataset(IndexedDataset(write_corpus([41])), seq_length=4)
    with pytest.raises(ConfigError, match=r"weights=\[1, 2\]: 1 data sets need 1 weights"):
        BlendedDataset([member], [1, 2], 5)
    with pytest.raises(ConfigError, match=r"weights=\[0\]: every weight must be a positive number"):
        BlendedDataset([member], [0], 5)
    with pytest.raises(ConfigError, match="weights need a number of samples to share out"):
        BlendedDataset([member], [1])
    with pytest.raises(ConfigError, match="a blend has 1 to 32767 data sets"):
        BlendedDataset([])


def test_weights_whose_sum_is_no_number() -> None:
    with pytest.raises(ConfigError, match="and so their sum: leave out what is not to be read"):
        parse_data_path([1e308, "a", 1e308, "b"])


def test_a_list_without_weights_has_no_more_samples_than_training_is_to_end_after(write_corpus: WriteCorpus) -> None:
    paths = [str(write_corpus([33], name)) for name in "ab"]
    data = MegatronDataModule(paths, seq_length=8, split="1,0,0", train_samples=9)
    data.trainer = Trainer(accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"train_samples=9: a data_path without weights is read once, and has 8"):
        data.setup("fit")
