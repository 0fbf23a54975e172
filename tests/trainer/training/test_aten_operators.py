"""A new ATen operator in a training is noticed, and looked up among those that Gaudi's bridge has kernels for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aten_operators import FILE, KNOWN, TRAININGS, called, kept, known, machine

HOW = (
    f"run `python tests/aten_operators.py`, which writes {FILE.name}, look new names up in the bridge's"
    f" scripts/hpu_op.yaml, and add them to {KNOWN.name}: an operator without a kernel there runs on the host in every"
    " step"
)


@pytest.mark.slow
def test_trainings_call_the_operators_that_are_kept(ranks: Callable[..., list[Any]]) -> None:
    """The list is exact for the machine that wrote it; another torch or processor may call others."""
    writer, expected = kept()
    answers = [ranks(size, called, name) for name, (size, *_) in TRAININGS.items()]
    found = {operator for answer in answers for names in answer for operator in names}
    assert found - set(known()) == set(), f"operators of which it is not known that they run on Gaudi: {HOW}"
    if machine() == writer:
        assert (found - expected, expected - found) == (set(), set()), f"new operators, and operators gone: {HOW}"


def test_every_operator_that_is_kept_is_known_to_run_on_gaudi() -> None:
    _, names = kept()
    there = known()
    assert names - there.keys() == set(), HOW
    listed = {name for name, reason in there.items() if not reason}
    parts = {part for reason in there.values() for part in re.findall(r"`(.*?)`", reason)}
    assert parts - listed == set(), "a composite kernel is made of operators that are listed themselves"


def test_what_is_called_composite_is_that_in_torch() -> None:
    kinds = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name, reason in known().items():
        if reason.startswith(("composite", "structured")):
            assert any(has_kernel(f"aten::{name}", kind) for kind in kinds), name
