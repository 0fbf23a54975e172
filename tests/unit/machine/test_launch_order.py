"""Variables of CUDA and NCCL that a layout sets before the process uses the card."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.device import order_launches

QUEUES, PRIORITY = "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_HIGH_PRIORITY"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, {}),
        ({"tp": 8}, {QUEUES: "1", PRIORITY: "1"}),
        ({"cp": 2}, {PRIORITY: "1"}),
        ({"ep": 8}, {QUEUES: "32", PRIORITY: "1"}),
        ({"tp": 2, "ep": 4}, {QUEUES: "32", PRIORITY: "1"}),
    ],
)
def test_a_layout_sets_queues_and_priority_on_cuda_alone(layout: dict[str, int], expected: dict[str, str]) -> None:
    for kind, wanted in (("cuda", expected), ("hpu", {}), ("cpu", {})):
        variables: dict[str, str] = {}
        order_launches(torch.device(kind), **{"tp": 1, "cp": 1, "ep": 1, **layout}, variables=variables)
        assert variables == wanted


def test_values_of_the_user_stay() -> None:
    variables = {QUEUES: "8", PRIORITY: "0"}
    order_launches(torch.device("cuda"), tp=2, cp=1, ep=1, variables=variables)
    assert variables == {QUEUES: "8", PRIORITY: "0"}
