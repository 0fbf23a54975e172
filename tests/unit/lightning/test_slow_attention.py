"""A warning, at the start, of attention that no kernel of the device computes; and none where one does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tiny import tiny_llama

from lightning_megatron import ParallelLayout
from lightning_megatron import device as devices
from lightning_megatron.lightning.validation.slow import warn_of_slow
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel


def told(kind: devices.DeviceKind, dtype: torch.dtype, cp: str | None = None, **fields: Any) -> list[str]:
    """Warnings about a model, with two context-parallel ranks where ``cp`` names their communication."""
    layout = ParallelLayout() if cp is None else ParallelLayout(cp=2, cp_comm_type=cp)
    with torch.device("meta"):
        model = GPTModel(tiny_llama(**fields), ParallelMesh(layout.resolve(1 if cp is None else 2))).to(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_slow(model, kind)
    return [str(each.message) for each in caught]


BLOCKS = "attention is computed block by block in fp32, far slower than by a kernel of "


@pytest.mark.parametrize("cp", ["p2p", "all_gather"])
def test_parts_in_fp32_on_cuda_are_told_with_the_precision_that_mends_it(cp: str) -> None:
    why = "torch.float32; with precision='bf16-mixed' the flash kernel takes it"
    assert told(devices.CUDA, torch.float32, cp) == [f"{BLOCKS}cuda: {why}"]
    assert told(devices.CUDA, torch.bfloat16, cp) == []


def test_parts_on_gaudi_are_told_with_the_communication_that_mends_it() -> None:
    assert told(devices.HPU, torch.bfloat16, "p2p") == [f"{BLOCKS}hpu: cp_comm_type='a2a' takes the kernel"]
    assert told(devices.HPU, torch.bfloat16, "a2a") == []


def test_scores_that_no_kernel_computes_are_told_with_their_field() -> None:
    without = "for which there is none; only a model without it takes the kernel"
    found = told(devices.CUDA, torch.bfloat16, attention_softcap=50.0)
    assert found == [f"{BLOCKS}cuda: attention_softcap=50, {without}"]
    found = told(devices.CUDA, torch.bfloat16, position_embedding="alibi")
    assert found == [f"{BLOCKS}cuda: position_embedding='alibi', {without}"]


@pytest.mark.parametrize("kind", [devices.CPU, devices.CUDA, devices.HPU])
def test_plain_attention_is_never_told(kind: devices.DeviceKind) -> None:
    assert told(kind, torch.float32) == []
    assert told(devices.CPU, torch.float32, "p2p") == []
