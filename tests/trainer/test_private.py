"""Names that are not promised: where Lightning or torchmetrics change one, this fails and says which."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichModelSummary
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from lightning.pytorch.strategies import ParallelStrategy
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchmetrics import MeanMetric

from lightning_megatron.checkpoint import model_state, save
from lightning_megatron.lightning._private import (
    MockOptimizer,
    SubprocessScriptLauncher,
    asks_for_upload,
    checkpoint_folder,
    default_store,
    injects_samplers,
    steps_between_saves,
    summary_options,
    training_data,
    with_other_path,
)
from lightning_megatron.lightning.launcher import JoinedLauncher, LaunchCalls
from lightning_megatron.mesh import ParallelMesh


def test_the_launcher_is_made_and_called_as_we_do() -> None:
    made = list(inspect.signature(SubprocessScriptLauncher.__init__).parameters)
    assert made == ["self", "cluster_environment", "num_processes", "num_nodes"]
    called = inspect.signature(SubprocessScriptLauncher.launch).parameters
    assert list(called) == ["self", "function", "args", "trainer", "kwargs"]
    assert called["trainer"].kind is inspect.Parameter.KEYWORD_ONLY


def test_what_fit_launches_takes_the_path_of_a_checkpoint_under_this_name() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    given = with_other_path(trainer._fit_impl, ("module",), {"ckpt_path": "last"}, lambda path: f"run/{path}.ckpt")
    assert given.arguments["ckpt_path"] == "run/last.ckpt"
    assert given.args[0] == "module"


def test_where_a_callback_saves_can_be_asked_for(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", logger=CSVLogger(tmp_path, "runs", version=3))
    assert checkpoint_folder(ModelCheckpoint("run"), trainer) == str(Path("run").absolute())
    assert checkpoint_folder(ModelCheckpoint(), trainer) == str(tmp_path / "runs" / "version_3" / "checkpoints")


def test_a_launcher_can_be_made_that_launches_nothing() -> None:
    called: list[Any] = []
    nothing: Any = lambda *_, **__: None  # noqa: E731
    calls = LaunchCalls(nothing, nothing, lambda trainer, path: path, lambda *given: called.append(given))
    launcher = JoinedLauncher(calls)
    assert launcher.launch(max, 1, 2) == 2
    assert called == [(None, 1, 2)]


def test_loggers_say_that_they_upload() -> None:
    for logger in (MLFlowLogger, WandbLogger):
        assert "self._log_model = log_model" in inspect.getsource(logger.__init__)
    assert asks_for_upload(SimpleNamespace(_log_model="all"))
    assert not asks_for_upload(SimpleNamespace(_log_model=False))
    assert not asks_for_upload(CSVLogger("."))


def test_what_is_trained_on_can_be_asked_for() -> None:
    trainer, data = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), object()
    trainer.fit_loop._data_source.instance = data
    assert training_data(trainer) is data


def test_how_often_is_saved_can_be_asked_for() -> None:
    assert steps_between_saves(ModelCheckpoint(every_n_train_steps=7)) == 7
    assert steps_between_saves(ModelCheckpoint()) == 0


def test_what_a_summary_was_made_with_can_be_asked_for() -> None:
    assert summary_options(RichModelSummary(3, header_style="bold")) == (3, {"header_style": "bold"})


@pytest.mark.parametrize("injects", [True, False])
def test_whether_samplers_are_replaced_can_be_asked_for(injects: bool) -> None:
    module = LightningModule()
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    module.trainer = Trainer(use_distributed_sampler=injects, **options)
    assert injects_samplers(module) is injects


def test_what_stands_for_an_optimizer_that_was_not_returned() -> None:
    assert issubclass(MockOptimizer, torch.optim.Optimizer)
    assert MockOptimizer().step(lambda: None) is None


def test_where_a_tensor_lies_in_a_checkpoint_is_told_in_these_words(tmp_path: Path) -> None:
    mesh = ParallelMesh.single()
    save(tmp_path / "a.ckpt", model_state({"x": torch.zeros(3)}, {}, mesh), {}, mesh)
    metadata = FileSystemReader(tmp_path / "a.ckpt").read_metadata()
    (place,) = metadata.storage_data.values()
    assert place.relative_path == "__0_0.distcp"
    assert place.offset == 0
    assert place.length == (tmp_path / "a.ckpt" / "__0_0.distcp").stat().st_size


def test_the_version_of_a_parameter_counts_what_is_written_into_it_and_not_into_its_buffer() -> None:
    """``optim.buffer`` and ``optim.edits`` look there for weights that somebody wrote between steps."""
    flat, param = torch.zeros(4), torch.nn.Parameter(torch.zeros(2))
    param.data = flat[:2]
    before = param._version
    flat.add_(1)
    param.data.add_(1)
    assert param._version == before
    with torch.no_grad():
        param.add_(1)
    assert param._version > before
    assert flat.tolist() == [3, 3, 1, 1]


def test_an_operator_tells_its_arguments() -> None:
    """``ops.mixture_of_experts`` asks the Gaudi's operator so, whose versions differ in them."""
    assert [argument.name for argument in torch.ops.aten.relu.default._schema.arguments] == ["self"]


class Strategy(ParallelStrategy):
    root_device = None  # type: ignore[assignment]

    def _configure_launcher(self) -> None: ...
    def barrier(self, name: str | None = None) -> None: ...
    def broadcast(self, obj: Any, src: int = 0) -> Any: ...
    def model_to_device(self) -> None: ...
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any: ...


Strategy.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["_layer_sync", "_launcher", "_precision_plugin", "_configure_launcher"])
def test_a_strategy_has(name: str) -> None:
    assert hasattr(Strategy(), name)


@pytest.mark.parametrize("name", ["_fabric", "_trainer"])
def test_a_module_has(name: str) -> None:
    assert getattr(LightningModule(), name) is None


def test_a_metric_shows_what_it_last_returned_and_forgets_what_it_computed() -> None:
    metric = MeanMetric()
    assert metric._forward_cache is None
    metric(2.0)
    assert float(metric._forward_cache) == 2.0
    assert metric._update_count == 1
    metric.compute()
    assert metric._computed is not None
    assert metric.process_group is metric.dist_sync_fn is None
    asked: list[str] = []

    def available() -> bool:
        asked.append("available")
        return True

    def gather(state: Any, group: Any = None) -> list[Any]:
        asked.append("gather")
        return [state, state]

    metric.distributed_available_fn, metric.dist_sync_fn = available, gather
    metric(4.0)
    asked.clear()
    assert float(metric.compute()) == 3.0
    assert asked == ["available", "gather", "gather"]


def test_the_store_of_a_process_group_can_be_asked_for(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default_store().set("key", "value")
        assert default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()
