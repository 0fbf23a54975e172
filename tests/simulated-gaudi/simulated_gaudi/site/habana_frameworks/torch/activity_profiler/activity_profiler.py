"""torch's profiler with an activity for the device, in the place of torch's own.

As in the bridge, ``torch.profiler.profile`` and ``torch.profiler.ProfilerActivity`` are replaced: code that imported
them earlier keeps classes without the device. The keywords are those of torch 2.6.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from simulated_hpu import calls

_OFF = 'Tensorboard callback for HPU hardware profiling disabled. To enable set "HABANA_PROFILE"'


def register_habana_activity_profiler() -> None:
    """Replace torch's classes, in this process."""
    original: Any = torch.profiler.ProfilerActivity

    class HabanaProfilerActivity(Enum):
        CPU = 1
        CUDA = 2
        HPU = 3

    class habana_profile(torch.profiler.profile):  # noqa: N801 - as in the bridge
        def __init__(
            self,
            *,
            activities: Iterable[Any] | None = None,
            schedule: Callable[[int], Any] | None = None,
            on_trace_ready: Callable[..., Any] | None = None,
            record_shapes: bool = False,
            profile_memory: bool = False,
            with_stack: bool = False,
            with_flops: bool = False,
            with_modules: bool = False,
            experimental_config: Any = None,
            use_cuda: bool | None = None,
        ) -> None:
            activity = HabanaProfilerActivity
            wanted = {activity.CPU, activity.HPU} if activities is None else set(activities)
            if activity.HPU in wanted and os.environ.get("HABANA_PROFILE", "0") == "0":
                raise RuntimeError(_OFF)
            self.hpu_profiling_active = activity.HPU in wanted
            known = {activity.CPU: original.CPU, activity.CUDA: original.CUDA}
            super().__init__(
                activities=[known[each] for each in wanted if each in known],
                schedule=schedule,
                on_trace_ready=on_trace_ready,
                record_shapes=record_shapes,
                profile_memory=profile_memory,
                with_stack=with_stack,
                with_flops=with_flops,
                with_modules=with_modules,
                experimental_config=experimental_config,
                use_cuda=use_cuda,
            )

        def start_trace(self) -> None:
            """Count that the device is traced; nothing of it is recorded."""
            if self.hpu_profiling_active:
                calls.count("profiled_hpu")
            super().start_trace()

    torch.profiler.profile = habana_profile  # type: ignore[assignment, misc]
    torch.profiler.ProfilerActivity = HabanaProfilerActivity  # type: ignore[assignment, misc]


register_habana_activity_profiler()
