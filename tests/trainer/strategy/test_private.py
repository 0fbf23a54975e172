"""Names that are not promised: where Lightning or torchmetrics change one, this fails and says which."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichModelSummary
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.imports import RequirementCache
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchmetrics import MeanMetric

import lightning_megatron
from lightning_megatron.checkpoint import model_state, save
from lightning_megatron.comm.loopback import LoopbackPort
from lightning_megatron.lightning.compat._private import (
    CHECKED,
    PRIVATE_NAMES,
    MockOptimizer,
    PrivateName,
    SubprocessScriptLauncher,
    asks_for_upload,
    checkpoint_folder,
    default_store,
    injects_samplers,
    mark_updated,
    set_shown_value,
    shown_value,
    steps_between_saves,
    summary_depth,
    trainer_argument,
    trainer_of,
    training_data,
    with_other_path,
)
from lightning_megatron.lightning.launch.launcher import JoinedLauncher, LaunchCalls
from lightning_megatron.mesh import ParallelMesh

PACKAGE = Path(lightning_megatron.__file__).parent
DOCUMENTED = {"_exit", "_fields", "_replace"}  # os._exit, and the methods of named tuples
TABLE = {entry.name: entry for entry in PRIVATE_NAMES}


@cache
def sources() -> dict[str, ast.Module]:
    """Modules by their path in the package."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"


def touched(tree: ast.Module) -> Iterator[str]:
    """Private names that a module reads off something, imports, or spells in a ``getattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_megatron"):
            yield from filter(is_private, [name.name for name in node.names] + (node.module or "").split("."))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            word = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and is_private(word):
                yield str(word)


def defined(tree: ast.Module) -> Iterator[str]:
    """Private names that a module gives to things of its own, ``_megatron_...`` on objects of others too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if own or node.attr.startswith("_megatron_"):
                yield node.attr


def lightnings(name: str) -> Iterator[tuple[str, type]]:
    """Private names of Lightning's classes that classes of ours inherit from."""
    module = resolve_name("lightning_megatron." + name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    for ours in vars(module).values():
        if isinstance(ours, type) and ours.__module__ == module.__name__:
            for base in ours.__mro__:
                if base.__module__.startswith("lightning."):
                    for word in set(re.findall(r"(?:self\.|def )(_[a-z]\w*)", inspect.getsource(base))):
                        yield word, ours


def test_every_private_name_that_the_package_touches_is_in_the_table() -> None:
    own = {path: set(defined(tree)) for path, tree in sources().items()}
    ours = set().union(*own.values()) - TABLE.keys()
    unknown = [
        f"{path}: {name}"
        for path, tree in sources().items()
        for name in sorted(set(touched(tree)) - ours - own[path] - DOCUMENTED)
        if name not in TABLE or path not in TABLE[name].users
    ]
    assert not unknown, f"add these to PRIVATE_NAMES in lightning/compat/_private.py: {unknown}"


def test_no_private_name_of_ours_hides_one_of_lightnings() -> None:
    hidden = set()
    for path, tree in sources().items():
        if path.startswith("lightning/"):
            own = set(defined(tree))
            hidden |= {
                f"{path}: {ours.__name__}.{name}" for name, ours in lightnings(path) if name in own - TABLE.keys()
            }
    assert not hidden


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=lambda entry: entry.name)
def test_the_library_still_has(entry: PrivateName) -> None:
    if "from 2.6 on" in entry.reason and not RequirementCache("lightning>=2.6"):
        pytest.skip(entry.reason)
    owner = resolve_name(entry.owner)
    there = hasattr(owner, entry.name) or re.search(rf"\b{entry.name}\b", inspect.getsource(owner))
    library = entry.owner.split(".")[0]
    assert there, f"{entry.owner}.{entry.name} is gone; last seen in {CHECKED.get(library, CHECKED['python'])}"


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=lambda entry: entry.name)
def test_the_table_says_who_touches(entry: PrivateName) -> None:
    for user in entry.users:
        assert entry.name in {*touched(sources()[user]), *defined(sources()[user])}, f"{user} has no {entry.name}"


class OwnTrainer(Trainer):
    def __init__(self, **options: Any) -> None:
        super().__init__(logger=False, enable_checkpointing=False, **options)


def test_what_a_trainer_is_asked_for_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a subclass of the Trainer, and where Lightning takes the default from the environment."""
    asked: list[Any] = []

    class AskedError(Exception): ...

    class Asking(Strategy):
        @property
        def _accelerator(self) -> None:
            asked.append(trainer_argument("accelerator"))
            raise AskedError

        @_accelerator.setter
        def _accelerator(self, accelerator: Any) -> None: ...

    for kind in (Trainer, OwnTrainer):
        for options in ({}, {"accelerator": "cpu"}):
            with pytest.raises(AskedError):
                kind(strategy=Asking(), **options)
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "tpu")
    with pytest.raises(AskedError):
        Trainer(strategy=Asking())
    assert asked == ["auto", "cpu", "auto", "cpu", "tpu"]
    assert trainer_argument("accelerator") is None


def test_a_trainer_or_none() -> None:
    module = LightningModule()
    assert trainer_of(None) is trainer_of(module) is None
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert trainer_of(module) is module.trainer


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
    calls = LaunchCalls(
        nothing, nothing, lambda trainer, path: path, lambda *given: called.append(given), LoopbackPort()
    )
    launcher = JoinedLauncher(calls, 1, torch.device("cpu"), derives_address=False)
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
    assert summary_depth(RichModelSummary(3)) == 3


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
    assert shown_value(metric) is None
    metric(2.0)
    assert float(shown_value(metric)) == 2.0
    set_shown_value(metric, torch.tensor(5.0))
    assert float(shown_value(metric)) == 5.0
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
    mark_updated(metric)
    assert metric._update_count == 3
    assert asked == ["available", "gather", "gather"]


def test_the_store_of_a_process_group_can_be_asked_for(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default_store().set("key", "value")
        assert default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()
