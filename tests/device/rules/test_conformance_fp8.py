"""Casts to 8-bit floats and their products, in the formats of the card."""

from __future__ import annotations

from collections.abc import Callable

import card
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2)
HPU = torch.ops.hpu


def largest(dtype: torch.dtype) -> float:
    return card.product().largest_e4m3 if dtype == E4M3 else 57344.0


def on_card(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, device="hpu").to(dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_cast_saturates_and_finds_the_largest_magnitude(dtype: torch.dtype) -> None:
    out, amax = HPU.cast_to_fp8_v2(on_card(0.1, -1.0, 1e6), torch.tensor(4.0, device="hpu"), False, True, dtype)
    assert out.dtype == dtype
    assert out.float().tolist()[1:] == [-4.0, largest(dtype)]
    assert out.float().tolist()[0] == pytest.approx(0.4, rel=0.13)
    assert (amax.dtype, amax.shape, float(amax)) == (torch.float32, (), 1e6)
    _, none = HPU.cast_to_fp8_v2(on_card(0.1), None, False, False, dtype)
    assert (none.dtype, none.shape) == (torch.float32, (0,))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_both_formats_in_one_cast(given: torch.dtype) -> None:
    x = on_card(0.1, -1.0, 1000.0, 1e6, dtype=given)
    scales = torch.tensor(8.0, device="hpu"), torch.tensor(2.0, device="hpu")
    wide, fine, amax = HPU.cast_to_fp8_hybrid(x, *scales, False, True)
    assert torch.equal(wide.float(), HPU.cast_to_fp8_v2(x, scales[0], False, False, E5M2)[0].float())
    assert torch.equal(fine.float(), HPU.cast_to_fp8_v2(x, scales[1], False, False, E4M3)[0].float())
    assert (wide.dtype, fine.dtype, float(amax)) == (E5M2, E4M3, float(x.max()))
    *_, none = HPU.cast_to_fp8_hybrid(x)
    assert none.shape == (0,)


def repeated(value: float, cast: Callable[[Tensor], Tensor]) -> Tensor:
    torch.hpu.manual_seed(1)
    return cast(torch.full((4000,), value, device="hpu")).float().cpu()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("value", [18.5, -0.3, 2.0**-17])
def test_stochastic_rounding_keeps_the_mean(dtype: torch.dtype, value: float) -> None:
    found = repeated(value, lambda x: HPU.cast_to_fp8_v2(x, None, True, False, dtype)[0])
    around = found.unique().tolist()
    assert len(around) <= 2
    assert found.mean().item() == pytest.approx(value, abs=0.05 * (max(around) - min(around)) + 1e-5)
    if dtype == E5M2:
        assert len(around) == 2
        wide, fine, _ = HPU.cast_to_fp8_hybrid(torch.full((4000,), value, device="hpu"), None, None, True)
        assert sorted(wide.float().unique().tolist()) == around
        assert len(fine.float().unique()) == 1, "E4M3 is rounded to the nearest number"


@card.simulation  # a real card draws numbers of its own
def test_a_seed_repeats_stochastic_rounding() -> None:
    first, second = (repeated(0.3, lambda x: HPU.cast_to_fp8_v2(x, None, True, False, E5M2)[0]) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: HPU.cast_to_fp8_v2(x.half(), None, False, False, E4M3),
         r"CastToFp8V2 input dtype must be one of \[float, bfloat16, float8_e5m2, float8_e4m3fn\]\."),
        (lambda x: HPU.cast_to_fp8_v2(x.to(E4M3), None, False, True, E4M3), "CastToFp8V2 must have no amax for float8"),
        (lambda x: HPU.cast_to_fp8_v2(x.to(E4M3), None, False, False, E5M2),
         "must have the same dtype for float8, but are Float8_e4m3fn and Float8_e5m2"),
        (lambda x: HPU.cast_to_fp8_hybrid(x.half()), "CastToFp8Hybrid input must be of float or bfloat16 dtype"),
    ],
)  # fmt: skip
def test_what_the_casts_refuse(call: Callable[[Tensor], object], text: str) -> None:
    with card.refuses(RuntimeError, match=text):
        call(torch.ones(16, 16, device="hpu"))


def test_a_product() -> None:
    torch.manual_seed(8)
    a, b, bias = torch.randn(16, 32), torch.randn(48, 32), torch.randn(48)
    scale = torch.tensor(16.0, device="hpu")
    small = [HPU.cast_to_fp8_v2(t.to("hpu"), scale, False, False, E4M3)[0] for t in (a, b)]
    out = HPU.fp8_gemm_v2(
        small[0], False, small[1], True, None, torch.bfloat16, 1 / scale, 1 / scale, bias.to("hpu"), False
    )
    assert out.dtype == torch.bfloat16
    exact = (small[0].float() @ small[1].float().t()).cpu() / 256 + bias
    torch.testing.assert_close(out.float().cpu(), exact, atol=1e-2, rtol=1e-2)
    assert F.cosine_similarity(out.float().cpu().flatten(), (a @ b.t() + bias).flatten(), 0) > 0.99
    # Multiples of 16 are a rule of the Transformer Engine; the operator takes other sizes.
    few = HPU.fp8_gemm_v2(
        small[0][:3, :12].contiguous(), False, small[1][:8, :12].contiguous(), True, None, torch.float32
    )
    assert few.shape == (3, 8)


@card.simulation
@pytest.mark.parametrize(("name", "largest", "product"), [("GAUDI2", 240.0, None), ("GAUDI3", 448.0, 16.0)])
def test_formats_are_those_of_the_product(
    monkeypatch: pytest.MonkeyPatch, name: str, largest: float, product: float | None
) -> None:
    """Both products in one process, as others have a session of their own."""
    from simulated_hpu.ops import fp8
    from simulated_hpu.settings import Settings

    monkeypatch.setattr(fp8, "settings", lambda: Settings("1.24", 8, name))
    cast, _ = HPU.cast_to_fp8_v2(on_card(-1e6), None, False, False, E4M3)
    assert cast.float().tolist() == [-largest]
    a, b = torch.ones(16, 16, device="hpu").to(E5M2), torch.ones(16, 16, device="hpu").to(E4M3)
    if product is None:
        with pytest.raises(RuntimeError, match="Gaudi2 doesnt support mixed input type flavors"):
            HPU.fp8_gemm_v2(a, False, b, False, None, torch.float32)
    else:
        assert float(HPU.fp8_gemm_v2(a, False, b, False, None, torch.float32)[0, 0]) == product


def test_one_format_a_product_on_gaudi_2_and_two_on_gaudi_3() -> None:
    a, b = torch.ones(16, 16, device="hpu").to(E5M2), torch.ones(16, 16, device="hpu").to(E4M3)
    if card.product().multiplies_two_formats:
        assert float(HPU.fp8_gemm_v2(a, False, b, False, None, torch.float32)[0, 0]) == 16.0
    else:
        with card.refuses(RuntimeError, match="Gaudi2 doesnt support mixed input type flavors"):
            HPU.fp8_gemm_v2(a, False, b, False, None, torch.float32)
