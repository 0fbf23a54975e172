"""Kernels among which torch may choose for attention on CUDA, and their order: asked without a card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_megatron.config.score_rule import ScoreRule
from lightning_megatron.context_parallel.attention import core_attention
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.core.attention_call import AttentionCall
from lightning_megatron.ops.flash import kernel_order
from lightning_megatron.ops.flash.kernel_order import kernels_for
from lightning_megatron.ops.registry import Ops

ALL = {"cudnn", "flash", "efficient", "math"}


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_order, "capability", lambda device_type: (9, 0))


def allowed() -> set[str]:
    on = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return {name for name, is_on in zip(("cudnn", "flash", "efficient", "math"), on, strict=True) if is_on}


def first() -> int:
    return int(torch._C._get_sdp_priority_order()[0])


@pytest.mark.parametrize("given", [{"masked": True}, {"varied": True}], ids=str)
def test_cudnn_is_left_out_with_a_mask_and_for_lengths_that_vary(given: dict[str, bool], hopper: None) -> None:
    """Its backward gave NaN with a mask (torch#196678), and it makes a plan for each shape."""
    with kernels_for("cuda", **given):
        assert allowed() == ALL - {"cudnn"}
    assert allowed() == ALL


@pytest.mark.parametrize("warn_only", [False, True])
def test_cudnn_is_left_out_where_deterministic_algorithms_are_asked_for(warn_only: bool, hopper: None) -> None:
    """With warnings alone, Lightning's ``deterministic="warn"``, torch itself would still take it."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    with kernels_for("cuda"):
        assert allowed() == ALL - {"cudnn"}


def test_cudnn_comes_first_on_hopper_and_other_cards_have_torchs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        for capability in ((8, 0), (10, 0), None):
            monkeypatch.setattr(kernel_order, "capability", lambda device_type, found=capability: found)
            with kernels_for("cuda"):
                assert first() == int(SDPBackend.FLASH_ATTENTION)
        monkeypatch.setattr(kernel_order, "capability", lambda device_type: (9, 0))
        with kernels_for("cuda"):
            assert first() == int(SDPBackend.CUDNN_ATTENTION)
        assert first() == int(SDPBackend.FLASH_ATTENTION)


def test_a_kernel_that_the_user_has_switched_off_stays_off(hopper: None) -> None:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        with kernels_for("cuda", masked=True):
            assert allowed() == {"math"}
        with kernels_for("cuda"):
            assert allowed() == {"cudnn", "math"}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), kernels_for("cuda"):
        assert allowed() == {"flash"}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), kernels_for("cuda", masked=True):
        assert allowed() == {"cudnn"}


def test_calls_with_a_mask_or_a_bias_run_without_cudnn(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    """BERT's key mask, a decoder's later queries, T5's bias; and a plain causal call with it."""
    seen: list[set[str]] = []

    def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append(allowed())
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    x = torch.empty(16, 2, 4, 64, dtype=torch.float16)
    mask, bias = torch.ones(2, 16, dtype=torch.bool), x.new_empty(1, 4, 16, 16)
    calls = [
        (AttentionCall(causal=False, key_mask=mask), ALL - {"cudnn"}),
        (AttentionCall(causal=True, key_mask=mask), ALL - {"cudnn"}),
        (AttentionCall(causal=False, bias=bias, rule=ScoreRule(1.0)), ALL - {"cudnn"}),
        (AttentionCall(causal=True), ALL),
    ]
    for call, _ in calls:
        Ops("cuda").choose("attention").run(x, x, x, call)
    assert seen == [expected for _, expected in calls]


@pytest.mark.parametrize("masked", [False, True])
def test_the_choice_breaks_no_graph(masked: bool, hopper: None) -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        with kernels_for("cuda", masked=masked):
            return F.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 4, 8)
    assert torch.equal(torch.compile(attend, backend="eager", fullgraph=True)(q), attend(q))


def test_the_op_report_says_the_order(hopper: None) -> None:
    choice = core_attention(Ops("cuda"), Axis("cp"), "p2p")
    best = "the best there is for cuda"
    kernels = "FLASH_ATTENTION, EFFICIENT_ATTENTION, MATH"
    assert choice.why == f"{best}: the first possible of CUDNN_ATTENTION, {kernels}"
    torch.use_deterministic_algorithms(True)
    assert core_attention(Ops("cuda"), Axis("cp"), "p2p").why == f"{best}: one of {kernels}"
