"""Shapes and dtypes that ``torch.compile`` gets for the device's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import card
import pytest
import simulated_gaudi as hpu
import torch
from habana_frameworks.torch.utils.internal import is_lazy
from torch import Tensor

HPU = torch.ops.hpu
BF16, F32 = torch.bfloat16, torch.float32


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def sdpa(x: Callable[..., Tensor], p: float) -> Any:
    return HPU.sdpa_fwd(x(2, 4, 6, 8), x(2, 1, 6, 8), x(2, 1, 6, 8), None, p, 0.5, True, "None", None, "left")


def sdpa_recomputed(x: Callable[..., Tensor], p: float) -> Any:
    q, k, v = x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)
    return HPU.sdpa_recomp_fwd(q, k, v, None, p, 0.5, True, True, "fast", None, "left")


def experts(x: Callable[..., Tensor]) -> Any:
    ids, weights = x(5, 1, dtype=torch.int64), x(5, 1)
    lists = [[x(*shape) for _ in range(2)] for shape in ((8, 16), (8, 16), (16, 8))]
    return HPU.mixture_of_experts(x(5, 8), ids, weights, *lists, False, "silu", 0, 1)


def norm_backward(x: Callable[..., Tensor], dtype: torch.dtype) -> Any:
    return HPU.rms_norm_backward(x(3, 8), x(3, 8), x(8), x(3, 1, dtype=dtype), True, 0)


OPERATORS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "rms_norm": lambda x: HPU.rms_norm(x(3, 8), x(8), 1e-5),
    "rms_norm, two dtypes": lambda x: HPU.rms_norm(x(3, 8), x(8, dtype=F32), 1e-5),
    "rotary_pos_embedding": lambda x: HPU.rotary_pos_embedding(x(6, 2, 4, 8), x(6, 1, 1, 8), x(6, 1, 1, 8), None, 0, 0),
    "sdpa_fwd": lambda x: sdpa(x, 0.0),
    "sdpa_recomp_fwd": lambda x: sdpa_recomputed(x, 0.0),
    "sdpa_recomp_fwd, dropout": lambda x: sdpa_recomputed(x, 0.5),
    "cast_to_fp8_v2": lambda x: HPU.cast_to_fp8_v2(x(16, 16), x(1, dtype=F32), False, True, torch.float8_e4m3fn),
    "cast_to_fp8_v2, no amax": lambda x: HPU.cast_to_fp8_v2(x(16, 16), None, True, False, torch.float8_e5m2),
    "cast_to_fp8_hybrid": lambda x: HPU.cast_to_fp8_hybrid(x(16, 16), x(1, dtype=F32), None, True, True),
    "rms_norm_backward": lambda x: HPU.rms_norm_backward(x(3, 8), x(3, 8), x(8), x(3, 1), True, 0),
    "rms_norm_backward, two dtypes": lambda x: HPU.rms_norm_backward(
        x(3, 8), x(3, 8), x(8), x(3, 1, dtype=F32), True, 0
    ),
    "mixture_of_experts": experts,
}


@pytest.mark.skipif(is_lazy(), reason="nothing is compiled in the lazy mode")
@pytest.mark.parametrize("name", list(OPERATORS))
def test_shapes_are_known_without_values(name: str) -> None:
    def kinds(found: Any) -> list[tuple[torch.Size, torch.dtype]]:
        return [(t.shape, t.dtype) for t in (found if isinstance(found, tuple) else (found,))]

    card.reset_calls()
    guessed = OPERATORS[name](lambda *shape, **given: zeros(*shape, **given).to("meta"))
    card.assert_calls({})  # a guess is no call
    assert kinds(guessed) == kinds(OPERATORS[name](lambda *shape, **given: zeros(*shape, **given).to("hpu")))
    assert not card.SIMULATED or len(hpu.calls()) == 1


@pytest.mark.skipif(is_lazy(), reason="nothing is compiled in the lazy mode")
def test_a_graph_with_a_kernel_in_it_stays_whole() -> None:
    def block(x: Tensor, gamma: Tensor) -> Tensor:
        return HPU.rms_norm(x * 2, gamma, 1e-5)[0] + 1

    x, gamma = torch.randn(3, 8).to("hpu"), torch.ones(8).to("hpu")
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, gamma), block(x, gamma))
