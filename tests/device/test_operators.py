"""ATen operators that trainings call on the device itself, fp16 with a loss scale too, which a CPU does not do."""

from __future__ import annotations

import pytest
import simulated_gaudi as hpu
from aten_operators import TRAININGS, called, known

# The simulated operator of experts differentiates itself, which it cannot do within a dispatch mode.
ALONE = [name for name, (size, *_) in TRAININGS.items() if size == 1 and name != "mixtral allgather"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["", "16-mixed"])
def test_operators_on_the_device_are_known_to_run_on_gaudi(precision: str) -> None:
    hpu.reset_calls()
    names = ALONE if not precision else ["llama bf16-mixed", "gpt with dropout"]
    found = {operator for name in names for operator in called(name, "hpu", precision)}
    assert {"mm", "embedding", "mul.Tensor"} <= found, "backward is seen as well"
    assert sum(hpu.calls().values()) > 0
    assert found - set(known()) == set()
