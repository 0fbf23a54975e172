"""Steps of the lazy mode; importing it registers ``torch.hpu`` and wraps what the real one wraps of torch."""

import os

import torch

from habana_frameworks.torch import hpu
from habana_frameworks.torch.core.step_closure import add_step_closure, iter_mark_step, mark_step
from habana_frameworks.torch.core.torch_overwrites import overwrite_torch_functions

torch._register_device_module("hpu", hpu)
overwrite_torch_functions()
os.environ.setdefault("HABANA_PROFILE", "profile_api_light")

__all__ = ["add_step_closure", "iter_mark_step", "mark_step"]
