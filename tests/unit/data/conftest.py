from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data import IndexedDatasetWriter

WriteCorpus = Callable[..., Path]


@pytest.fixture
def write_corpus(tmp_path: Path) -> WriteCorpus:
    """``write_corpus(lengths, name)`` writes a pair whose tokens count up from 0 and returns its prefix."""

    def write(lengths: Sequence[int], name: str = "corpus") -> Path:
        prefix = tmp_path / name
        prefix.parent.mkdir(parents=True, exist_ok=True)
        start = 0
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for length in lengths:
                writer.add_document(np.arange(start, start + length), [length])
                start += length
        return prefix

    return write
