"""Cards that a job may take, on doubles of the device's module: Gaudi's software counts all cards of a node."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron import ConfigError, HPUAccelerator
from lightning_megatron import device as devices


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node of eight cards, of which a job may take some."""
    module = type("Module", (), {"device_count": staticmethod(lambda: 8), "is_available": staticmethod(lambda: True)})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(devices, "hpu_available", lambda: True)

    def limit(text: str | None) -> None:
        if text is None:
            monkeypatch.delenv(devices.VISIBLE, raising=False)
        else:
            monkeypatch.setenv(devices.VISIBLE, text)

    return limit


@pytest.mark.parametrize(
    ("text", "count"), [(None, 8), ("4,5,6,7", 4), ("0, 1", 2), ("3", 1), ("0,1,2,3,4,5,6,7,8,9", 8)]
)
def test_auto_takes_the_cards_that_the_job_may_take(node: Any, text: str | None, count: int) -> None:
    node(text)
    assert HPUAccelerator.auto_device_count() == count
    assert HPUAccelerator.parse_devices(count) == count


@pytest.mark.parametrize(
    ("text", "asked", "words"),
    [
        ("4,5,6,7", 8, "devices=8: HABANA_VISIBLE_MODULES=4,5,6,7 permits 4; nearest valid: 4, auto"),
        (None, 9, "devices=9: the node has 8; nearest valid: 8, auto"),
    ],
)
def test_more_cards_than_that_are_refused(node: Any, text: str | None, asked: int, words: str) -> None:
    node(text)
    with pytest.raises(ConfigError) as refused:
        HPUAccelerator.parse_devices(asked)
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["all", "", "0,", "0,x", "-1", "2,2"])
def test_what_gaudis_software_cannot_read_is_refused(node: Any, text: str) -> None:
    node(text)
    with pytest.raises(ConfigError, match="HABANA_VISIBLE_MODULES="):
        HPUAccelerator.auto_device_count()


def test_the_log_tells_the_card_of_each_rank() -> None:
    cards = [{"ID": "0", "HLS_MODULE_ID": "4", devices.VISIBLE: "4,5"}, {"ID": "1", devices.VISIBLE: "4,5"}]
    told = "rank 0: 0, 4; rank 1: 1, unset (ID, HLS_MODULE_ID); HABANA_VISIBLE_MODULES=4,5"
    assert devices.describe_cards(cards) == told


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ([4, 5], "nearest valid: 2, with HABANA_VISIBLE_MODULES=4,5 in the environment"),
        ([0, 3], "2, with HABANA_VISIBLE_MODULES=0,1 in the environment, 2, with HABANA_VISIBLE_MODULES=2,3"),
        ([1, 2, 3], "2, with HABANA_VISIBLE_MODULES=0,1"),
        ([4, 5, 6, 7], "nearest valid: 4, with HABANA_VISIBLE_MODULES=4,5,6,7 in the environment"),
    ],
)
def test_a_list_of_cards_is_answered_with_sets_that_work(asked: list[int], nearest: str) -> None:
    with pytest.raises(ConfigError, match="devices=") as refused:
        HPUAccelerator.parse_devices(asked)
    assert nearest in str(refused.value)
