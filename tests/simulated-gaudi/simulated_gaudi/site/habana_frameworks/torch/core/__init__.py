"""Steps of the lazy mode; importing it registers ``torch.hpu`` and wraps the same torch functions as the real one."""

import os

import torch
from simulated_hpu import ops
from simulated_hpu.native_extension import native
from simulated_hpu.settings import settings

from habana_frameworks.torch import hpu
from habana_frameworks.torch.core.step_closure import add_step_closure, iter_mark_step, mark_step
from habana_frameworks.torch.core.torch_overwrites import overwrite_torch_functions
from habana_frameworks.torch.core.weight_sharing import enable_weight_sharing

ops.define()
torch._register_device_module("hpu", hpu)
native().announce()
overwrite_torch_functions()
if settings().is_lazy:
    enable_weight_sharing()
os.environ.setdefault("HABANA_PROFILE", "profile_api_light")

__all__ = ["add_step_closure", "iter_mark_step", "mark_step"]
