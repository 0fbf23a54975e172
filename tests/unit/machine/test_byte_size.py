"""Sizes as users write them, against the definitions of SI (powers of ten) and IEC (powers of two)."""

from __future__ import annotations

import pytest

from lightning_megatron.machine.byte_size import memory_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("3KB", 3_000),
        ("3KiB", 3_072),
        ("500MB", 500_000_000),
        ("1.5 MiB", 1_572_864),
        ("80GB", 80_000_000_000),
        ("80gib", 85_899_345_920),
        (" 2TB ", 2_000_000_000_000),
        ("2TiB", 2_199_023_255_552),
    ],
)
def test_units_are_powers_of_ten_and_with_an_i_of_two(text: str, size: int) -> None:
    assert parse_bytes(text) == memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1e9", "5 gigabytes", "5Gi"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size such as 500MB or 5GB"):
        parse_bytes(text)
