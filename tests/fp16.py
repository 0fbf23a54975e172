"""A CPU that trains fp16, as no real one does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lightning_megatron import device as devices
from lightning_megatron.testing.trainer import kind_in_tests


@contextmanager
def a_device_that_trains_fp16() -> Iterator[None]:
    if kind_in_tests() is not devices.CPU:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        able = replace(devices.CPU, supports_fp16_training=True)
        patch.setattr(devices, "CPU", able)
        patch.setattr(devices, "kind_of", lambda device: able)
        yield
