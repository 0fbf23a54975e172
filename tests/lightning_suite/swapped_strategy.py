"""A pytest plugin that gives Lightning's own tests another strategy: ``Trainer()`` on one CPU becomes ours.

With ``--one-file`` it is the one that saves a checkpoint as one file.

Only where a test leaves the strategy to the Trainer, on one process of the CPU: what asks for a strategy, an
accelerator or several processes keeps what it asks for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_megatron import MegatronStrategy

_ONE_CPU = {
    "strategy": ("auto",),
    "accelerator": ("auto", "cpu"),
    "devices": ("auto", 1, "1"),
    "num_nodes": (1,),
}


def _is_for_one_cpu(arguments: dict[str, Any]) -> bool:
    return all(
        any(type(arguments[name]) is type(value) and arguments[name] == value for value in values)
        for name, values in _ONE_CPU.items()
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-file", action="store_true", help="checkpoints are single files, not directories")


@pytest.fixture(autouse=True)
def _swapped(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[None]:
    arguments: dict[str, Any] = {"save_distributed_checkpoint": False} if request.config.getoption("--one-file") else {}
    stock = Trainer.__init__
    signature = inspect.signature(stock)
    swapped = 0

    @functools.wraps(stock)
    def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        nonlocal swapped
        try:
            given = signature.bind(self, *args, **kwargs)
        except TypeError:  # the Trainer's own text is expected
            return stock(self, *args, **kwargs)
        given.apply_defaults()
        if _is_for_one_cpu(given.arguments):
            kwargs["strategy"] = MegatronStrategy(**arguments)
            swapped += 1
            record_property("swapped", swapped)
        return stock(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:  # not the fixture, whose end is then later than tests' own fixtures ask
        patch.setattr(Trainer, "__init__", init)
        yield
