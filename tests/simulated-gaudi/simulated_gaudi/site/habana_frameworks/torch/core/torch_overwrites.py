"""Functions of torch that the bridge wraps, and their narrower signatures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from simulated_hpu import process_group
from simulated_hpu.settings import settings

from habana_frameworks.torch import hpu

_DESTROY_SECONDS = 60.0
_Function = Callable[..., Any]


def _also_on_hpu(on_host: _Function, on_hpu: _Function) -> _Function:
    @functools.wraps(on_host)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        on_hpu(*args, **kwargs)
        return on_host(*args, **kwargs)

    return wrapped


def _fork_rng(original: _Function) -> _Function:
    @functools.wraps(original)
    def fork_rng(*args: Any, device_type: str = "hpu", **kwargs: Any) -> Any:
        return original(*args, device_type=device_type, **kwargs)

    return fork_rng


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _old_init_process_group(original: _Function) -> _Function:
    def init_process_group(
        backend: str,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
    ) -> None:
        original(backend, init_method, timeout, world_size, rank, store, group_name, **_given(pg_options=pg_options))

    return init_process_group


def _init_process_group(original: _Function) -> _Function:
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: torch.device | None = None,  # taken and not used
    ) -> None:
        original(backend, init_method, timeout, world_size, rank, store, group_name, **_given(pg_options=pg_options))

    return init_process_group


def _old_new_group(original: _Function) -> _Function:
    def new_group(
        ranks: list[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
    ) -> Any:
        return original(ranks, timeout, backend, pg_options)

    return new_group


def _new_group(original: _Function) -> _Function:
    def new_group(
        ranks: list[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: torch.device | None = None,  # taken and not used
    ) -> Any:
        return original(ranks, timeout, backend, pg_options, use_local_synchronization, group_desc)

    return new_group


def _destroy_process_group(original: _Function) -> _Function:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized():
            # Destroying the default group destroys all others; it waits for its own members only.
            leaving = dist.group.WORLD if group is None else group
            assert leaving is not None
            process_group.leave(leaving, leaving.group_name, _DESTROY_SECONDS)
        original(group)

    return destroy_process_group


def overwrite_torch_functions() -> None:
    """Install the wrappers in this process."""
    torch.manual_seed = torch.random.manual_seed = _also_on_hpu(torch.manual_seed, hpu.manual_seed)
    torch.seed = torch.random.seed = _also_on_hpu(torch.seed, hpu.seed)
    torch.random.fork_rng = _fork_rng(torch.random.fork_rng)
    old = settings().is_old
    init, new = (_old_init_process_group, _old_new_group) if old else (_init_process_group, _new_group)
    dist.init_process_group = init(dist.init_process_group)
    dist.new_group = new(dist.new_group)
    dist.destroy_process_group = _destroy_process_group(dist.destroy_process_group)
