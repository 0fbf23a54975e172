import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data import DataError, IndexedDataset, IndexedDatasetWriter, optimal_dtype
from lightning_megatron.errors import ConfigError

# Two documents: sequences [1, 2, 3] and [] in the first, [500] in the second, uint16. Written by hand.
TOKENS = struct.pack("<4H", 1, 2, 3, 500)
INDEX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<QBQQ", 1, 8, 3, 3)
    + struct.pack("<3i", 3, 0, 1)
    + struct.pack("<3q", 0, 6, 6)
    + struct.pack("<3q", 0, 2, 3)
)


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., Path]:
    def write(index: bytes = INDEX, tokens: bytes = TOKENS) -> Path:
        (tmp_path / "corpus.idx").write_bytes(index)
        (tmp_path / "corpus.bin").write_bytes(tokens)
        return tmp_path / "corpus"

    return write


def replaced(offset: int, data: bytes) -> bytes:
    return INDEX[:offset] + data + INDEX[offset + len(data) :]


def test_reads_bytes_written_by_hand(pair: Callable[..., Path]) -> None:
    dataset = IndexedDataset(pair())
    assert len(dataset) == 3
    assert dataset.dtype == np.uint16
    assert dataset.sequence_lengths.tolist() == [3, 0, 1]
    assert dataset.document_indices.tolist() == [0, 2, 3]
    assert [s.tolist() for s in dataset[0:3]] == [[1, 2, 3], [], [500]]
    assert [s.tolist() for s in dataset[1:]] == [[], [500]]
    assert dataset[-1].tolist() == [500]
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.get(0, 3).tolist() == []


def test_writes_those_bytes(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "out" / "x", np.uint16) as writer:
        writer.add_item([1, 2, 3])
        writer.add_item([])
        writer.end_document()
        writer.add_document(np.array([500]), [1])
    assert (tmp_path / "out" / "x.idx").read_bytes() == INDEX
    assert (tmp_path / "out" / "x.bin").read_bytes() == TOKENS
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["x.bin", "x.crc", "x.idx"]


@pytest.mark.parametrize(("vocab", "dtype"), [(65499, np.uint16), (65500, np.int32), (None, np.int32), (1, np.uint16)])
def test_optimal_dtype(vocab: int | None, dtype: type) -> None:
    assert optimal_dtype(vocab) == dtype


FAULTS: list[tuple[bytes, bytes, str]] = [
    (b"", TOKENS, r"corpus\.idx: not an index file"),
    (b"GARBAGE!!" + INDEX[9:], TOKENS, r"corpus\.idx: not an index file, it starts with b'GARBAGE!!'"),
    (INDEX[:20], TOKENS, r"corpus\.idx: truncated: 20 bytes, the header alone is 34"),
    (replaced(9, struct.pack("<Q", 2)), TOKENS, r"corpus\.idx: index version 2, only version 1 is known"),
    (replaced(17, b"\x2a"), TOKENS, r"corpus\.idx: unknown dtype code 42 \(known: 1 uint8, .*8 uint16\)"),
    (INDEX[:-1], TOKENS, r"corpus\.idx: truncated: 93 bytes, 3 sequences and 3 document bounds take 94"),
    (INDEX + b"\x00", TOKENS, r"corpus\.idx: 1 bytes too many"),
    (INDEX + b"\x00\x00\x00", TOKENS, r"corpus\.idx: a multimodal index \(3 mode bytes"),
    (replaced(34, struct.pack("<i", -3)), TOKENS, r"corpus\.idx: sequence 0 has the negative length -3"),
    (replaced(46, struct.pack("<q", -6)), TOKENS, r"corpus\.idx: a sequence starts at an impossible byte"),
    (replaced(46, struct.pack("<q", 1)), TOKENS, r"corpus\.idx: a sequence starts at an impossible byte"),
    (replaced(86, struct.pack("<q", 2)), TOKENS, r"corpus\.idx: 3 sequences, but the last document ends at sequence 2"),
    (replaced(70, struct.pack("<q", 1)), TOKENS, r"corpus\.idx: the document bounds do not rise from 0"),
    (replaced(78, struct.pack("<q", 4)), TOKENS, r"corpus\.idx: the document bounds do not rise from 0"),
    (replaced(46, struct.pack("<3q", 2, 0, 0)), TOKENS, r"sequence 0 starts at byte 2, and those before it end at 0"),
    (replaced(34, struct.pack("<i", 2)), TOKENS, r"sequence 1 starts at byte 6, and those before it end at 4"),
    (INDEX, TOKENS + b"\x00\x00", r"corpus\.bin: 10 bytes, but its index says 8 \(4 tokens\)"),
    (INDEX, TOKENS[:-1], r"corpus\.bin: 7 bytes, but its index says 8 \(4 tokens\)"),
]


@pytest.mark.parametrize(("index", "tokens", "text"), FAULTS)
def test_faulty_pairs_are_refused(pair: Callable[..., Path], index: bytes, tokens: bytes, text: str) -> None:
    prefix = pair(index, tokens)
    with pytest.raises(DataError, match=text):
        IndexedDataset(prefix)


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_a_missing_half_names_both_paths(pair: Callable[..., Path], missing: str) -> None:
    prefix = pair()
    Path(f"{prefix}.{missing}").unlink()
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    assert f"{prefix}.{missing} not found" in str(caught.value)
    assert f"both {prefix}.idx and {prefix}.bin" in str(caught.value)


def test_a_missing_pair_names_both_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.idx and .*no\.bin not found; give the path without"):
        IndexedDataset(tmp_path / "no")


@pytest.mark.parametrize(("given", "named"), [("corpus", "corpus_text_document"), ("test_text_documnt", "test_text_d")])
def test_a_missing_pair_names_the_one_beside_it(tmp_path: Path, given: str, named: str) -> None:
    for name in ("a_text_document", "corpus_text_document", "test_text_document"):
        (tmp_path / f"{name}.idx").touch()
    with pytest.raises(DataError, match=f"give the path without .bin and .idx; beside it: {named}"):
        IndexedDataset(tmp_path / given)


def test_reads_outside_of_the_data(pair: Callable[..., Path]) -> None:
    dataset = IndexedDataset(pair())
    with pytest.raises(IndexError, match="has 3 sequences, there is no number 3"):
        dataset[3]
    with pytest.raises(IndexError, match="has 3 sequences, there is no number -4"):
        dataset[-4]
    with pytest.raises(IndexError, match="sequence 0 has 3 tokens, there are no 3 from token 1 on"):
        dataset.get(0, 1, 3)
    with pytest.raises(IndexError, match="a step of 2 is not"):
        dataset[::2]


def test_pickling_reopens_the_map(pair: Callable[..., Path]) -> None:
    dataset = IndexedDataset(pair())
    data = pickle.dumps(dataset)
    assert len(data) < 500
    copy = pickle.loads(data)
    assert copy[0].tolist() == [1, 2, 3]
    assert copy.prefix == dataset.prefix


def test_an_empty_pair(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.end_document()
    dataset = IndexedDataset(tmp_path / "x")
    assert len(dataset) == 0
    assert dataset.document_indices.tolist() == [0, 0]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
            writer.add_item([1])
            assert [p.name.split(".tmp")[0] for p in tmp_path.iterdir()] == ["x.bin"]
            assert not (tmp_path / "x.bin").exists()
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_an_older_pair_alone(pair: Callable[..., Path]) -> None:
    prefix = pair()
    with pytest.raises(DataError), IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_item([70000])
    assert Path(f"{prefix}.idx").read_bytes() == INDEX
    assert Path(f"{prefix}.bin").read_bytes() == TOKENS
    assert len(list(prefix.parent.iterdir())) == 2


def test_writer_faults(tmp_path: Path, pair: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"dtype='complex128': an index file has no code for it; .*uint16"):
        IndexedDatasetWriter(tmp_path / "x", np.complex128)
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16)
    with pytest.raises(DataError, match=r"x: token 65536 does not fit uint16; .*optimal_dtype"):
        writer.add_item([0, 65536])
    with pytest.raises(DataError, match=r"x: token -1 does not fit uint16"):
        writer.add_item(np.array([-1]))
    with pytest.raises(DataError, match="a document of 2 tokens with lengths that sum to 3"):
        writer.add_document([1, 2], [3])
    writer.abort()
    with (
        pytest.raises(DataError, match=r"tokens are uint16, those of .*y are int32"),
        IndexedDatasetWriter(tmp_path / "y", np.int32) as other,
    ):
        other.add_index(pair())


documents = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=4), max_size=3), max_size=5)


@settings(max_examples=30)  # each writes eight files
@given(first=documents, second=documents)
def test_merging_equals_writing_all(
    tmp_path_factory: pytest.TempPathFactory, first: list[list[list[int]]], second: list[list[list[int]]]
) -> None:
    directory = tmp_path_factory.mktemp("merge")
    for name, content in (("first", first), ("second", second), ("all", first + second)):
        with IndexedDatasetWriter(directory / name, np.uint16) as writer:
            for document in content:
                for sequence in document:
                    writer.add_item(sequence)
                writer.end_document()
    with IndexedDatasetWriter(directory / "merged", np.uint16) as writer:
        writer.add_index(directory / "first")
        writer.add_index(directory / "second")
    for ending in ("bin", "idx"):
        assert (directory / f"merged.{ending}").read_bytes() == (directory / f"all.{ending}").read_bytes()
    dataset = IndexedDataset(directory / "all")
    assert [s.tolist() for s in dataset[:]] == [s for d in first + second for s in d]
