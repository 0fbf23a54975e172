"""Launchers: the processes of a job start after its configuration has been checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron import device as devices
from lightning_megatron.comm.loopback import LoopbackPort
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.lightning.comparison.places import check_places, places_of
from lightning_megatron.lightning.compat._private import Launcher, SubprocessScriptLauncher, TunerExit, with_other_path
from lightning_megatron.lightning.environments.mpi import MpirunEnvironment
from lightning_megatron.lightning.launch.children import Children
from lightning_megatron.lightning.run_state.last_checkpoint import refuse_missing
from lightning_megatron.lightning.stopping.signals import handed_on

_DERIVE_THE_ADDRESS = (SLURMEnvironment, LSFEnvironment, MPIEnvironment, MpirunEnvironment)


@dataclass(frozen=True)
class LaunchCalls:
    """Calls of a launcher into the strategy.

    Attributes:
        check: called with everything handed to ``trainer.fit`` (module, loaders, data module); raises to stop.
        note_error: called with the error that a run ends in, before Lightning's ``on_exception`` hooks; it returns True
            if all ranks have failed together.
        begin: called by all ranks of a fit with the Trainer and ``ckpt_path``; its result replaces ``ckpt_path``.
        compare: called by all ranks, once they have started, with the Trainer and everything handed to it.
        port: rendezvous port of this machine's ranks, bound before another process is started.
    """

    check: Callable[..., None]
    note_error: Callable[[BaseException], bool]
    begin: Callable[[Trainer, Any], Any]
    compare: Callable[..., None]
    port: LoopbackPort


class CheckedLauncher(SubprocessScriptLauncher):
    """Lightning's launcher, with a check of the whole configuration before it starts a process.

    Args:
        cluster_environment: cluster environment of the Trainer.
        num_processes: processes on this node.
        num_nodes: nodes of the job.
        device: device of this process.
        calls: calls into the strategy.

    Attributes:
        children: processes that this one has launched, if any.

    Raises:
        ConfigError: if another launcher has started processes that Lightning does not see.
    """

    is_interactive_compatible = True  # with one process; :func:`script_problems` refuses several

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        device: torch.device,
        calls: LaunchCalls,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        raise_if_any(launch_problems(cluster_environment))
        self._device, self._calls = device, calls
        self.children: Children | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Check the configuration, start the other processes, and run ``function``."""
        self._calls.check(*args, *kwargs.values(), trainer=trainer)
        look_at_files([*args, *kwargs.values()], trainer)
        raise_if_any(script_problems(self.num_processes))
        keep_compiled_recipes(self._device, trainer)
        devices.drop_card(self._device)

        def compared(*args: Any, **kwargs: Any) -> Any:
            self._calls.compare(trainer, *args, *kwargs.values())
            return run_begun(function, trainer, self._calls, *args, **kwargs)

        if self.num_processes == 1 and self.num_nodes == 1:
            return compared(*args, **kwargs)  # no process to start: no variables are set, no thread watches
        share_cores(self.num_processes)  # before the others start, which inherit the variable
        with handed_on(self.kill):
            try:
                return super().launch(compared, *args, trainer=trainer, **kwargs)
            except TunerExit:  # no error: all ranks leave the run with it
                raise
            except BaseException as error:
                together = self._calls.note_error(error)
                if self.children is not None and together:
                    self.children.let_end()
                elif self.children is not None and isinstance(error, Exception | SystemExit):
                    self.children.end()
                raise
            finally:
                self._calls.port.free()

    def _call_children_scripts(self) -> None:
        if self.num_nodes == 1:
            self._calls.port.take(lambda: self.cluster_environment.main_port)
        super()._call_children_scripts()
        # Lightning's observer kills this process as soon as one of these fails, and does nothing with an empty list.
        first_rank = self.cluster_environment.node_rank() * self.num_processes
        self.children, self.procs = Children(self.procs, first_rank), []

    def kill(self, signum: int) -> None:
        """Send a signal to the processes that this one has launched."""
        if self.children is not None:
            self.children.send(signum)


class JoinedLauncher(Launcher):
    """A launcher that starts nothing, for processes that torchrun, Slurm or MPI has started.

    With ``derives_address`` the cluster environment derives the rendezvous address by itself.
    """

    is_interactive_compatible = True

    def __init__(self, calls: LaunchCalls, num_processes: int, device: torch.device, derives_address: bool) -> None:
        self._calls, self.num_processes = calls, num_processes
        self._device, self._derives_address = device, derives_address

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Compare the ranks, check the configuration, and run ``function``."""
        if self._derives_address:  # else the launcher's own address may look like the bridge's
            devices.drop_default_address(self._device)
        try:
            self._calls.compare(trainer, *args, *kwargs.values())
            self._calls.check(*args, *kwargs.values(), trainer=trainer)
            look_at_files([*args, *kwargs.values()], trainer)
            keep_compiled_recipes(self._device, trainer)
            share_cores(self.num_processes)
            return run_begun(function, trainer, self._calls, *args, **kwargs)
        except TunerExit:  # no error: all ranks leave the run with it
            raise
        except BaseException as error:
            self._calls.note_error(error)
            raise

    def kill(self, signum: Any) -> None:
        """Do nothing: this launcher has started no process."""


def launcher_of(
    environment: ClusterEnvironment, num_processes: int, num_nodes: int, device: torch.device, calls: LaunchCalls
) -> Launcher:
    """The launcher for an environment; :class:`CheckedLauncher` explains the arguments."""
    if environment.creates_processes_externally:
        return JoinedLauncher(calls, num_processes, device, isinstance(environment, _DERIVE_THE_ADDRESS))
    return CheckedLauncher(environment, num_processes, num_nodes, device, calls)


def look_at_files(objects: Sequence[object], trainer: Trainer | None) -> None:
    """Verify that the checkpoint exists and that the run's folders can be written, before long work begins."""
    refuse_missing(objects)
    check_places(places_of(trainer, objects), is_first=trainer is not None and trainer.is_global_zero)


def share_cores(num_processes: int) -> None:
    """Let torch compute on this process's share of the cores, unless the user has given a number of threads."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.get_num_threads() in (cores, cores // 2):  # torch's own choice: all cores, of hyper-threads every second
        torch.set_num_threads(min(torch.get_num_threads(), max(1, cores // num_processes)))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


def keep_compiled_recipes(device: torch.device, trainer: Trainer | None) -> None:
    """Let the device's compiler keep its results in the job's folder, before a process uses the device."""
    folder = None if trainer is None else devices.keep_recipes(device, trainer.default_root_dir)
    if folder is not None:
        rank_zero_info(f"compiled recipes are kept in {folder}; PT_HPU_RECIPE_CACHE_CONFIG names another folder")


def run_begun(
    function: Callable[..., Any], trainer: Trainer | None, calls: LaunchCalls, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function; in a fit, the ranks first agree on the checkpoint to resume from."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING:
        return function(*args, **kwargs)
    given = with_other_path(function, args, kwargs, partial(calls.begin, trainer))
    return function(*given.args, **given.kwargs)


def script_problems(processes: int) -> list[Problem]:
    """The fault of launching several processes without a script that the others could run."""
    is_session = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    is_script = sys.modules["__main__"].__spec__ is not None or os.path.isfile(sys.argv[0])
    if processes == 1 or (is_script and not is_session):
        return []
    here = "a notebook or an interactive session" if is_session else "python -c, or a program from stdin,"
    start = f"python train.py`, or `torchrun --nproc-per-node {processes} train.py"
    reason = f"each process runs the script, and {here} has none: write it to a file, and start `{start}`"
    return [Problem("devices", processes, reason, (1,))]


def launch_problems(environment: ClusterEnvironment | None, variables: Mapping[str, str] = os.environ) -> list[Problem]:
    """The fault of ranks that Lightning does not see, since another launcher has started them.

    Each of them would start a whole job of its own.
    """
    if not isinstance(environment, LightningEnvironment) or environment.creates_processes_externally:
        return []
    torchrun = "torchrun --nnodes=NODES --nproc-per-node=DEVICES --node-rank=NODE --master-addr=HOST script.py"
    for name in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(variables.get(name) or 1) > 1:
            reason = (
                "MPI has started these processes, but does not say which of them share a machine, and each would start "
                f"a job of its own: pip install mpi4py, or start one process a machine and in it `{torchrun}`"
            )
            return [Problem(name, variables[name], reason)]
    if "RANK" in variables and int(variables.get("WORLD_SIZE") or 1) > 1:
        reason = (
            "this process has a RANK (of a PyTorchJob?) but no LOCAL_RANK, so Lightning takes it for a "
            f"job of its own: start `{torchrun}` in it, with NODES=$WORLD_SIZE, NODE=$RANK and HOST=$MASTER_ADDR, or, "
            "with one device a process, give the Trainer plugins=[KubeflowEnvironment()] and num_nodes=WORLD_SIZE"
        )
        return [Problem("RANK", variables["RANK"], reason)]
    return []
