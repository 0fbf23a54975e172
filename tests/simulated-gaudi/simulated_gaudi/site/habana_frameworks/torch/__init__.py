"""Importing it registers the device and HCCL with torch, after the checks of torch that the real package makes."""

from habana_frameworks.torch.requirements import check

check()

from simulated_hpu.native_extension import native  # noqa: E402

native()

import habana_frameworks.torch.activity_profiler  # noqa: E402
import habana_frameworks.torch.core  # noqa: E402
import habana_frameworks.torch.distributed.hccl  # noqa: E402
import habana_frameworks.torch.hpu  # noqa: E402, F401
