"""Importing it makes torch know the device, and HCCL."""

from simulated_hpu.native_extension import native

native()

import habana_frameworks.torch.core  # noqa: E402
import habana_frameworks.torch.distributed.hccl  # noqa: E402
import habana_frameworks.torch.hpu  # noqa: E402, F401
