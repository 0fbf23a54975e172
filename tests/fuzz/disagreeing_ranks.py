"""Gives one rank of a job something else than the others; every difference must be named before the first step.

A trial is a job of two processes under tp = 2, pp = 2 or dp = 2 in which one rank has another setting, model, data,
environment or code. Both must end with one ``ConfigError`` that says what differs and on which rank, before a step is
taken and before there is a process group that could hang. Jobs whose ranks differ in what may differ must train.

Run: ``python tests/fuzz/disagreeing_ranks.py [--trials 0] [--seed 0]``: all of them, or so many drawn at random.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import queue
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer, TQDMProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import ConfigError, KillSwitch, LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.testing.ports import free_port
from lightning_megatron.testing.workers import PRELOAD

RANKS, STEPS = 2, 2
LAYOUTS: Mapping[str, Mapping[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}}
SIZES: Mapping[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2}
MODEL: Mapping[str, Any] = {**SIZES, "ffn_hidden_size": 24, "vocab_size": 32, "vocab_multiple": 2, "lr": 1e-3}
TRAINER: Mapping[str, Any] = {"max_steps": STEPS, "limit_val_batches": 0, "num_sanity_val_steps": 0}
PATIENCE = 60.0  # seconds


@dataclass(frozen=True)
class Job:
    """All that a rank is given.

    Attributes:
        strategy: arguments.
        trainer: arguments.
        module: arguments.
        data: arguments of the data module.
        environment: variables.
        corpus: which of two files of tokens.
        seed: seed of ``seed_everything``.
        run: method of the Trainer.
        kind: kind of module: ``"llama"``, ``"plain"`` (nothing but torch) or one of its changed versions.
        flags: called before anything else.
    """

    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    module: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    corpus: str = "one"
    seed: int | None = 1
    run: str = "fit"
    kind: str = "llama"
    flags: Callable[[], object] | None = None


@dataclass(frozen=True)
class Case:
    """A difference between ranks.

    Attributes:
        name: what differs.
        other: what one rank is given.
        named: what the error must name; nothing for what may differ.
        layouts: layouts in which it is tried.
        base: what the other rank is given, beside the layout.
        late: named once the model is built, not before the process group is.
    """

    name: str
    other: Job
    named: str = ""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    base: Job = Job()
    late: bool = False


class Plain(LightningModule):
    """Two layers of torch's own, without hyper-parameters."""

    width, slope = 8, 1.0

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self._late = late
        self.net: nn.Module | None = None if late else self.build()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width), nn.Linear(self.width, 1))

    def configure_model(self) -> None:
        self.net = self.net or self.build()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        return self.net(batch).square().mean() * self.slope

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wide(Plain):
    width = 12


class OtherStep(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 2


class OtherRate(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=float(os.environ.get("RATE", "0.1")))


class WithRank(Plain):
    """Keeps what is of one process alone."""

    def __init__(self, rank: int, device: str, output_dir: str) -> None:
        super().__init__()
        self.save_hyperparameters()


class Rows(Dataset[Tensor]):
    def __init__(self, count: int = 16) -> None:
        self.rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Printer(Callback):
    """Somebody's own, on one rank."""


KINDS: dict[str, Callable[..., LightningModule]] = {
    **{"llama": lambda **given: LlamaModule("llama-tiny", **{**MODEL, **given}), "plain": Plain, "wide": Wide},
    **{"step": OtherStep, "rate": OtherRate, "late": lambda: Plain(late=True), "late wide": lambda: Wide(late=True)},
    "rank": WithRank,
}


def _settings(part: str, **values: tuple[Any, str]) -> list[Case]:
    return [
        Case(f"{part}: {name}={value!r}", Job(**{part: {name: value}}), named)  # type: ignore[arg-type]
        for name, (value, named) in values.items()
    ]


def _model() -> list[Case]:
    values: dict[str, Any] = {"num_layers": 4, "vocab_size": 48, "ffn_hidden_size": 32, "hidden_size": 32}
    values |= {"hidden_dropout": 0.1, "attention_dropout": 0.1, "norm_epsilon": 1e-3, "rope_theta": 100.0}
    values |= {"num_attention_heads": 4, "norm": "layernorm", "activation": "gelu", "init_std": 0.1}
    values |= {"max_position_embeddings": 64, "tie_embeddings": True, "add_bias_linear": True, "vocab_multiple": 4}
    values |= {"lr": 1e-2, "min_lr": 1e-5, "warmup_steps": 1, "lr_schedule": "cosine", "weight_decay": 0.2}
    values |= {"betas": (0.9, 0.9), "eps": 1e-6, "decay_steps": 5}
    return _settings("module", **{name: (value, name) for name, value in values.items()})


def _strategy() -> list[Case]:
    values: dict[str, Any] = {"micro_batch_size": 1, "distributed_optimizer": False, "overlap_grad_reduce": False}
    values |= {
        "overlap_param_gather": False,
        "main_grads_dtype": "auto",
        "grad_reduce_dtype": "bf16",
        "bucket_size": 100,
        "recompute": "full",
    }
    values |= {"ops": "rms_norm=off", "async_save": True, "save_on_signal": False, "compile": "eager"}
    values |= {"process_group_backend": "gloo", "timeout": timedelta(seconds=PATIENCE + 1), "may_differ": ["code.*"]}
    values |= {"broadcast_predictions": False, "sequence_parallel": False}
    cases = _settings("strategy", **{name: (value, f"strategy.{name}") for name, value in values.items()})
    layouts = [("tp2", {"tp": 1}, "tp"), ("tp2", {"tp": 1, "cp": 2}, "cp"), ("pp2", {"pp": 1}, "pp")]
    layouts += [("dp2", {"tp": 2}, "tp"), ("dp2", {"pp": 2}, "pp"), ("pp2", {"pipeline_schedule": "gpipe"}, "schedule")]
    cases += [Case(f"layout: {other}", Job(strategy=other), named, (layout,)) for layout, other, named in layouts]
    return cases


def _trainer() -> list[Case]:
    values: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    values |= {"max_steps": 3, "limit_train_batches": 1, "val_check_interval": 0.5, "log_every_n_steps": 7}
    values |= {"max_epochs": 1, "check_val_every_n_epoch": 2, "gradient_clip_algorithm": "value", "overfit_batches": 1}
    cases = _settings("trainer", **{name: (value, f"trainer.{name}") for name, value in values.items()})
    made: dict[str, Callable[[], Callback]] = {
        "EarlyStopping": partial(EarlyStopping, "train_loss"),
        "ModelCheckpoint": partial(ModelCheckpoint, every_n_train_steps=1),
        "Timer": partial(Timer, timedelta(hours=1)),
        "KillSwitch": KillSwitch,
    }
    cases += [
        Case(f"callbacks: {name}", Job(trainer={"callbacks": [make]}), "trainer.callbacks")
        for name, make in made.items()
    ]
    patient = Job(trainer={"callbacks": [partial(EarlyStopping, "train_loss", patience=9)]})
    usual = Job(trainer={"callbacks": [made["EarlyStopping"]]})
    cases.append(Case("callbacks: patience", patient, "EarlyStopping.patience", base=usual))
    cases.append(Case("function: validate", Job(run="validate"), "trainer.function"))
    return cases


def _surroundings() -> list[Case]:
    cases = _settings("data", seq_length=(4, "seq_length"), batch_size=(4, "batch_size"), seed=(5, "seed"))
    cases += _settings("data", split=("50,40,10", "split"), train_samples=(12, "train_samples"))
    cases += [
        Case("data: other tokens of one length", Job(corpus="other"), "fingerprint"),
        Case("data: a longer file", Job(corpus="longer"), "fingerprint"),
        Case("data: a file that is not there", Job(corpus="nowhere"), "fingerprint"),
        Case("seed_everything(2)", Job(seed=2), "PL_GLOBAL_SEED"),
        Case("no seed_everything", Job(seed=None), "PL_GLOBAL_SEED"),
        Case("a variable of ours", Job(environment={"LIGHTNING_MEGATRON_X": "1"}), "LIGHTNING_MEGATRON_X"),
        Case("PT_HPU_LAZY_MODE", Job(environment={"PT_HPU_LAZY_MODE": "0"}), "PT_HPU_LAZY_MODE"),
        Case("determinism", Job(flags=_deterministic), "torch.deterministic_algorithms"),
        Case("matrix products", Job(flags=_fast_products), "torch.float32_matmul_precision"),
        Case("default dtype", Job(flags=_double), "torch.default_dtype"),
        Case("a version of a library", Job(flags=_older_library), "code.numpy"),
    ]
    plain = Job(kind="plain")
    dp = {"layouts": ("dp2", "tp2")}
    cases += [
        Case("a wider module", Job(kind="wide"), "module.net.0.weight", base=plain, **dp),  # type: ignore[arg-type]
        Case("another class", Job(kind="step"), "module.class", base=plain, **dp),  # type: ignore[arg-type]
        Case("another method", Job(kind="plain", flags=_other_method), "code.Plain", base=plain, **dp),  # type: ignore[arg-type]
        Case("a wider model, built late", Job(kind="late", flags=_widen), "model.net.0.weight", ("dp2", "tp2"),
             base=Job(kind="late"), late=True),
        Case("lr in configure_optimizers", Job(kind="rate", environment={"RATE": "0.2"}), "optimizers.0.defaults.lr",
             ("dp2", "tp2"), base=Job(kind="rate"), late=True),
        Case("a checkpoint on one rank", Job(run="resume"), "trainer.resumes_from", ("dp2", "tp2")),
    ]  # fmt: skip
    return cases


def _allowed() -> list[Case]:
    printing = Job(trainer={"callbacks": [Printer, TQDMProgressBar]})
    return [
        Case("nothing", Job()),
        Case("what prints", printing),
        Case("where it runs", Job(kind="rank", module={"rank": 1, "device": "cpu:1", "output_dir": "b"}),
             layouts=("dp2",), base=Job(kind="rank", module={"rank": 0, "device": "cpu:0", "output_dir": "a"})),
        Case("a copy of the data", Job(corpus="copy")),
        Case("workers and the cache of indices", Job(data={"cache_dir": "cache"})),
        Case("data shared out by hand", Job(kind="plain", data={"rows": 16}), layouts=("dp2",),
             base=Job(kind="plain", data={"rows": 32})),
        Case("allowed by name", Job(module={"lr": 1e-2}, strategy={"may_differ": ["module.*", "optimizers.*", "s*"]}),
             base=Job(strategy={"may_differ": ["module.*", "optimizers.*", "s*"]})),
    ]  # fmt: skip


def _deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


def _fast_products() -> None:
    torch.set_float32_matmul_precision("high")


def _double() -> None:
    torch.set_default_dtype(torch.bfloat16)


def _older_library() -> None:
    from lightning_megatron.lightning.comparison import code

    known = code._version
    code._version = lambda name: "1.0" if name == "numpy" else known(name)  # type: ignore[assignment]


def _other_method() -> None:
    """Take the class from a copy of this file with another method, as on a machine with another checkout."""
    name, file = Plain.__module__, Path(tempfile.mkdtemp()) / "disagreeing_ranks.py"
    file.write_text(Path(__file__).read_text().replace("square().mean()", "abs().mean()", 1))
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    KINDS["plain"] = module.Plain


def _widen() -> None:
    Plain.width = 12


def cases() -> list[Case]:
    """All differences that must be named."""
    return [*_model(), *_strategy(), *_trainer(), *_surroundings()]


def _corpora(folder: Path) -> None:
    for name, shift, count in (("one", 0, 40), ("copy", 0, 40), ("other", 1, 40), ("longer", 0, 41)):
        (folder / name).mkdir()
        with IndexedDatasetWriter(folder / name / "tokens", np.uint16) as writer:
            for _ in range(count):
                writer.add_document((np.arange(30) + shift) % 32, [30])


def _rank(job: Job, layout: str, rank: int, port: int, folder: Path, told: Any) -> None:
    """One rank; tells how it ended."""
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(RANKS), **job.environment}
    if job.flags is not None:
        job.flags()
    if job.seed is not None:
        seed_everything(job.seed, verbose=False)
    begun = time.monotonic()
    trainer = None
    try:
        limit = timedelta(seconds=PATIENCE)
        strategy = MegatronStrategy(**{"timeout": limit, **LAYOUTS[layout], **job.strategy})
        callbacks = [make() for make in job.trainer.get("callbacks", ())]
        options = {**TRAINER, **job.trainer, "callbacks": callbacks, "default_root_dir": folder}
        silent = {"logger": False, "enable_progress_bar": any(isinstance(c, TQDMProgressBar) for c in callbacks)}
        silent |= {"enable_model_summary": False, "accelerator": "cpu", "devices": RANKS}
        silent["enable_checkpointing"] = any(isinstance(c, ModelCheckpoint) for c in callbacks)
        trainer = Trainer(strategy=strategy, **silent, **options)
        module = KINDS[job.kind](**job.module)
        if job.kind == "llama":
            path = str(folder.parent / job.corpus / "tokens")
            given = {"seq_length": 8, "batch_size": 2, "split": "80,10,10", **job.data}
            if "cache_dir" in given:
                given["cache_dir"] = folder / given["cache_dir"]
            data: dict[str, Any] = {"datamodule": MegatronDataModule(path, **given)}
        else:
            data = {"train_dataloaders": DataLoader(Rows(job.data.get("rows", 16)), batch_size=2)}
            trainer._accelerator_connector.use_distributed_sampler = "rows" not in job.data
        if job.run == "resume":
            trainer.fit(module, **data, ckpt_path=folder / "nowhere.ckpt")
        else:
            getattr(trainer, job.run)(module, **data)
        ending = "trained"
    except ConfigError as error:
        ending = str(error)
    except BaseException as error:
        ending = f"{type(error).__name__}: {error}"
    steps = 0 if trainer is None else trainer.global_step
    told.put((rank, ending, steps, dist.is_initialized(), time.monotonic() - begun))
    told.close()
    told.join_thread()
    os._exit(0)


def trial(case: Case, layout: str, odd: int, scratch: Path) -> tuple[str, float]:
    """One job.

    Args:
        case: what differs.
        layout: a key of ``LAYOUTS``.
        odd: the rank that differs.
        scratch: where files may be.

    Returns:
        What all ranks said, and the seconds until the last had.

    Raises:
        AssertionError: if anything is not as it should be.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch))
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "lightning_megatron.data"])
    told: Any = context.Queue()
    port = free_port()
    jobs = [case.other if rank == odd else case.base for rank in range(RANKS)]
    jobs = [replace(job, strategy={**job.strategy}) for job in jobs]
    arguments = [(job, layout, rank, port, folder, told) for rank, job in enumerate(jobs)]
    processes = [context.Process(target=_rank, args=given, daemon=True) for given in arguments]
    for process in processes:
        process.start()
    try:
        answers = {answer[0]: answer[1:] for answer in (told.get(timeout=2 * PATIENCE) for _ in processes)}
    except queue.Empty:
        raise AssertionError((case.name, layout, "no answer")) from None
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    what = (case.name, layout, odd, answers)
    endings = {ending for ending, *_ in answers.values()}
    assert len(endings) == 1, what
    (ending,) = endings
    if not case.named:
        assert ending == "trained", what
        return ending, max(seconds for *_, seconds in answers.values())
    assert all(part in ending for part in ("in the configuration", "on rank 0, but", "on rank 1")), what
    assert case.named in ending.split("\n  - may_differ=")[0], what
    for _, steps, grouped, _ in answers.values():
        assert steps == 0, what
        assert not grouped or case.late, what
    return ending, max(seconds for *_, seconds in answers.values())


def run(trials: int, seed: int, scratch: Path, tell: Callable[[str], None] = print) -> tuple[int, int, list[float]]:
    """All trials, or so many of them; how many were named, how many trained, and the seconds of each."""
    _corpora(scratch)
    dice = random.Random(seed)
    wanted = [(case, layout) for case in [*cases(), *_allowed()] for layout in case.layouts]
    if trials:
        dice.shuffle(wanted)
        wanted = wanted[:trials]
    named, trained, times = 0, 0, []
    for case, layout in wanted:
        ending, seconds = trial(case, layout, dice.randrange(RANKS), scratch)
        named, trained = named + bool(case.named), trained + (not case.named)
        times.append(seconds)
        differences = [line.strip(" -") for line in ending.splitlines()[1:] if not line.startswith("  - may_differ=")]
        tell(f"{layout:4} {case.name:45} {seconds:4.1f} s  {'; '.join(differences) or ending}")
    return named, trained, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trials", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        named, trained, times = run(options.trials, options.seed, Path(scratch))
        print(f"{len(cases())} differences in {named} jobs, all named before the first step, the slowest after "
              f"{max(times):.1f} s; {trained} jobs that may differ trained")  # fmt: skip


if __name__ == "__main__":
    main()
