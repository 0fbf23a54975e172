"""Counters of the software, and torch's profiler with the device in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from habana_frameworks.torch.hpu.metrics import metric_global
from habana_frameworks.torch.utils.internal import is_lazy


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("graph_compilation", {"TotalNumber": int, "TotalTime": int, "AvgTime": (int, float)}),
        ("cpu_fallback", {"TotalNumber": int, "FallbackOps": dict}),
    ],
)
def test_a_metric_is_pairs_of_a_name_and_a_value(name: str, kinds: dict[str, type]) -> None:
    metric = metric_global(name)
    assert metric is not None
    assert metric.name() == name
    found = metric.stats()
    assert isinstance(found, list)
    assert {key: isinstance(value, kinds[key]) for key, value in found if key in kinds} == dict.fromkeys(kinds, True)
    metric.reset()
    assert dict(metric.stats())["TotalNumber"] == 0


def test_an_unknown_metric_is_none() -> None:
    assert metric_global("no_such_metric") is None
    assert torch.hpu.metric_global("cpu_fallback") is metric_global("cpu_fallback")  # type: ignore[attr-defined]


@pytest.mark.skipif(is_lazy(), reason="nothing is compiled in the lazy mode")
def test_single_ops_are_no_graphs_and_compiled_functions_are() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 3 + 1).sum()

    metric = metric_global("graph_compilation")
    assert metric is not None
    x = torch.randn(5, 7).to("hpu").requires_grad_()
    metric.reset()
    right = float(function(x))
    assert dict(metric.stats())["TotalNumber"] == 0
    torch.compiler.reset()
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(function, backend="hpu_backend")
    for _ in range(3):
        loss = compiled(x)
        loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(right, rel=1e-3)
    found = dict(metric.stats())
    assert found["TotalNumber"] in (1, 2), "a backward that only spreads a number may need no graph"
    assert found["TotalTime"] >= found["AvgTime"] > 0


def test_torchs_profiler_has_an_activity_of_the_device() -> None:
    assert [each.name for each in torch.profiler.ProfilerActivity] == ["CPU", "CUDA", "HPU"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.HPU]
    x = torch.randn(4, 4).to("hpu")
    with torch.profiler.profile(activities=activities) as profiler:
        float((x @ x).sum())
    assert any("mm" in event.key for event in profiler.key_averages())
