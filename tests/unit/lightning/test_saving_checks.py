"""Checks before training of everything that a save could not do, and plain forms of values that have one."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import ConfigError, MegatronStrategy, UploadCheckpoints
from lightning_megatron.checkpoint.formats.meta import is_plain
from lightning_megatron.checkpoint.formats.plain import plain
from lightning_megatron.lightning.callbacks import upload_checkpoints
from lightning_megatron.lightning.launch.launcher import launch_problems
from lightning_megatron.lightning.validation.saving import address_problems


class Colour(enum.Enum):
    RED = "red"
    ODD = object()


@dataclasses.dataclass
class Size:
    width: int
    folder: Path


Pair = collections.namedtuple("Pair", "a b")


def a_function() -> None: ...


PLAIN = [
    (Path("a/b"), "a/b"),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.str_("x"), "x"),
    (Colour.RED, "red"),
    (Colour.ODD, "ODD"),
    (Size(2, Path("x")), {"width": 2, "folder": "x"}),
    (argparse.Namespace(a=Path("x"), b=[1]), {"a": "x", "b": [1]}),
    (datetime.date(2026, 1, 2), "2026-01-02"),
    (datetime.datetime(2026, 1, 2, 3), "2026-01-02T03:00:00"),
    (datetime.timedelta(minutes=1), 60.0),
    (collections.defaultdict(list, a=[Path("x")]), {"a": ["x"]}),
    (Pair(1, Path("x")), (1, "x")),
    (frozenset({1}), {1}),
    ({Colour.RED: (np.int32(1), [Path("x")])}, {"red": (1, ["x"])}),
    (np.array(["a", "b"]), ["a", "b"]),
    (collections.deque([1, Path("x")]), [1, "x"]),
    (range(3), [0, 1, 2]),
]


@pytest.mark.parametrize(("value", "form"), PLAIN, ids=lambda value: type(value).__name__)
def test_what_has_a_plain_form_gets_it_and_keeps_it(value: Any, form: Any) -> None:
    found = plain({"key": value})["key"]
    assert found == form
    assert type(found) is type(form)
    assert is_plain(found)
    assert plain(found) is found


def test_arrays_become_tensors_and_tensors_dtypes_and_numbers_stay() -> None:
    found = plain({"a": np.arange(3.0), "b": torch.arange(2), "c": torch.bfloat16, "d": None})
    assert torch.equal(found["a"], torch.arange(3.0, dtype=torch.float64))
    assert found["c"] is torch.bfloat16
    assert is_plain(found)


class Module(BoringModel):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(options)


class Stateful(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"ways": [Path("x"), a_function]}


class Later(Callback):
    """Knows its state when it is set up."""

    def state_dict(self) -> dict[str, Any]:
        return {"mesh": self.mesh}  # type: ignore[attr-defined]


def fit(module: LightningModule, folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"default_root_dir": folder, "max_steps": 1, "limit_val_batches": 0, "accelerator": "cpu", "devices": 1}
    ckpt_path = options.pop("ckpt_path", None)
    trainer = Trainer(strategy=MegatronStrategy(), callbacks=list(callbacks), **quiet | options)
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def test_hyper_parameters_and_states_that_cannot_be_saved_are_named_before_the_first_step(tmp_path: Path) -> None:
    bad = {"act": a_function, "kind": BoringModel, "net": torch.nn.Linear(1, 1), "part": functools.partial(a_function)}
    module = Module(lr=1e-3, path=Path("x"), deep={"list": [1, bad.pop("act")]}, **bad)
    with pytest.raises(ConfigError) as error:
        fit(module, tmp_path, Stateful(), Later())
    text = str(error.value)
    assert "Module.hparams='deep.list[1]': a checkpoint holds primitives, containers and tensors, and no " in text
    for name in ("deep", "kind", "net", "part"):
        assert f"save_hyperparameters(ignore=['{name}'])" in text
    assert "Stateful.state_dict()='ways[1]'" in text
    assert len(error.value.problems) == 5
    assert list(tmp_path.iterdir()) == []
    assert fit(module, tmp_path, Stateful(), enable_checkpointing=False).global_step == 1, "nobody saves"


def test_hyper_parameters_with_a_plain_form_are_saved_in_it(tmp_path: Path) -> None:
    names = ["path", "number", "_", "_", "colour", "_", "size", "space", "day"]
    given = {name: value for name, (value, _) in zip(names, PLAIN, strict=False) if name != "_"}
    trainer = fit(Module(**given), tmp_path)
    saved = torch.load(Path(trainer.checkpoint_callback.best_model_path) / "meta.pt", weights_only=True)  # type: ignore[union-attr]
    assert saved["hyper_parameters"] == plain(given)
    assert saved["hyper_parameters"]["size"] == {"width": 2, "folder": "x"}


@pytest.mark.parametrize("address", ["s3://bucket/x", "memory://x", "gs://a", Path("hdfs://a/b"), "file:///tmp/x"])
def test_addresses_are_no_paths(address: Any) -> None:
    (problem,) = address_problems("dirpath", address)
    assert "copy them afterwards" in problem.reason
    assert problem.nearest == (("/tmp/x",) if "file" in str(address) else ())


@pytest.mark.parametrize("path", ["a/b", "/a:b/c", "C:/x", "a b:c", "", "x.ckpt", "lr=1:/x" * 0])
def test_paths_are_no_addresses(path: str) -> None:
    assert address_problems("dirpath", path) == []


def test_remote_folders_are_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # of a Trainer before
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\(dirpath=...\)='memory://bucket/x'") as error:
        fit(BoringModel(), tmp_path, ModelCheckpoint("memory://bucket/x"), ckpt_path="memory://bucket/last.ckpt")
    assert error.value.problems[0].argument == "ckpt_path"
    with pytest.raises(ConfigError, match="default_root_dir='memory://bucket'"):
        fit(BoringModel(), "memory://bucket")  # type: ignore[arg-type]
    trainer = fit(BoringModel(), tmp_path)
    for act in (trainer.save_checkpoint, trainer.strategy.load_checkpoint):
        with pytest.raises(ConfigError, match="memory://bucket/x"):
            act("memory://bucket/x.ckpt")
    assert not (tmp_path / "memory:").exists()


def test_ranks_that_lightning_does_not_see_are_not_each_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    environment = LightningEnvironment()
    kubeflow = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for variables, word in (
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpi4py"),  # without the numbers on its machine
        ({"PMI_SIZE": "2"}, "mpi4py"),
        (kubeflow, "pods"),
    ):
        (problem,) = launch_problems(environment, variables)
        assert "torchrun" in problem.reason
        assert (word in problem.reason) or ("PyTorchJob" in problem.reason)
    for fine in ({}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert launch_problems(environment, fine) == []
    assert launch_problems(TorchElasticEnvironment(), kubeflow) == []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="MPI has started these processes"):
        Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(), logger=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launch_problems(environment, kubeflow) == []


def test_last_says_where_it_looks_if_it_can_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    saver = ModelCheckpoint(save_last="link")
    fit(BoringModel(), tmp_path, saver, logger=CSVLogger(tmp_path))
    words = (
        f"looks in {tmp_path}/lightning_logs/version_1/checkpoints, which is new.*{tmp_path}/.*version_0/.*last.ckpt"
    )
    with pytest.warns(UserWarning, match=words) as warned:
        fit(BoringModel(), tmp_path, ModelCheckpoint(), logger=CSVLogger(tmp_path), ckpt_path="last")
    assert not [w for w in warned if "HINT" in str(w.message)], "Lightning advises what was not the reason"
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(2):
            fixed = ModelCheckpoint(tmp_path / "run", save_last="link")
            trainer = fit(BoringModel(), tmp_path, fixed, logger=CSVLogger(tmp_path), ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "run" / "last.ckpt")
    assert not [w for w in caught if "which is new" in str(w.message)]


# Loggers


class Client:
    """Stand-in for ``logger.experiment`` of MLflow or Weights & Biases, with the public methods that are used."""

    id = "run1"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log_artifacts(self, run_id: str, local_dir: str, artifact_path: str | None = None) -> None:
        self.calls.append((run_id, sorted(p.name for p in Path(local_dir).iterdir())[-1], artifact_path))

    def log_artifact(self, artifact: Any, aliases: list[str] | None = None) -> None:
        self.calls.append((artifact.name, artifact.folders, aliases))


class Stand(CSVLogger):
    """A logger with the argument that Lightning's loggers have."""

    run_id = "run1"

    def __init__(self, folder: Path, log_model: bool | str = False) -> None:
        super().__init__(folder)
        self._log_model = log_model
        self.client = Client()

    @property
    def experiment(self) -> Any:
        return self.client

    def log_metrics(self, *_: Any, **__: Any) -> None: ...
    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...
    def save(self) -> None: ...
    def finalize(self, status: str) -> None:
        self.client.calls.append((status,))


def test_a_logger_that_uploads_files_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Stand\(log_model=...\)=True: it uploads single files.*UploadCheckpoints"):
        fit(BoringModel(), tmp_path, logger=Stand(tmp_path, log_model="all"))
    with pytest.raises(ConfigError, match="logger='Stand': UploadCheckpoints has no logger to upload to"):
        fit(BoringModel(), tmp_path, UploadCheckpoints(), logger=Stand(tmp_path))


class Artifact:
    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.name, self.folders = name, []

    def add_dir(self, local_path: str, name: str | None = None) -> None:
        assert (Path(local_path) / "manifest.json").is_file()
        self.folders.append(name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["MLFlowLogger", "WandbLogger"])
def test_directories_are_uploaded_at_the_end_of_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(upload_checkpoints, kind, Stand)
    monkeypatch.setitem(__import__("sys").modules, "wandb", argparse.Namespace(Artifact=Artifact))
    logger = Stand(tmp_path)
    saver = ModelCheckpoint(tmp_path / "run", filename="{step}", save_last="link")
    fit(BoringModel(), tmp_path, saver, UploadCheckpoints(), logger=logger)
    (uploaded, end) = logger.client.calls
    assert end == ("success",), "before the logger is closed"
    if kind == "MLFlowLogger":
        assert uploaded == ("run1", "meta.pt", "model/checkpoints/step=1")
    else:
        assert uploaded == ("model-run1", ["step=1.ckpt"], ["latest", "best"])
