"""Importing it makes torch know the device, and HCCL, after the checks that the real one makes of its torch."""

from habana_frameworks.torch.requirements import check

check()

from simulated_hpu.native_extension import native  # noqa: E402

native()

import habana_frameworks.torch.activity_profiler  # noqa: E402
import habana_frameworks.torch.core  # noqa: E402
import habana_frameworks.torch.distributed.hccl  # noqa: E402
import habana_frameworks.torch.hpu  # noqa: E402, F401
