"""Notes of every rule go into its report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _notes(request: pytest.FixtureRequest) -> Iterator[None]:
    import card  # not earlier: this file may be read before the simulation is on

    with card.notes() as found:
        yield
    if "expected" in found:
        request.node.user_properties.append(("expected", found.pop("expected")))
    if found:
        request.node.user_properties.append(("measured", found))
