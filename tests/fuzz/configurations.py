"""Random configurations, right and wrong: what is impossible is a ``ConfigError``, and nothing else is ever raised.

    python tests/fuzz/configurations.py 2000

Every argument of the public classes is drawn, mostly with values that mean something and now and then with one of
another type; then everything that was accepted is handed to the check that runs before processes are started.
"""

from __future__ import annotations

import inspect
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_megatron import (
    ConfigError,
    ExpertTelemetry,
    GPTModule,
    KillSwitch,
    LlamaModule,
    MegatronDataModule,
    MegatronPrecision,
    MegatronStrategy,
    MixtralModule,
    ParallelLayout,
    Throughput,
    TransformerConfig,
    UploadCheckpoints,
    VerifyCheckpoint,
)
from lightning_megatron.data import DataError, IndexedDatasetWriter
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.optim.loss_scale import DynamicLossScale

NAN, INF = float("nan"), float("inf")
WRONG: Sequence[Any] = (
    *(None, "1", "x", "", b"1", 1.5, NAN, INF, -INF, -1, 0, 10**30, True, False, 1 + 1j),
    *([], [1], [None], (), {}, {"x": None}, {1: 2}, set(), object(), int, Path("x"), torch.tensor(1), np.int64(2)),
)
SIZES = (1, 1, 1, 2, 3, 4)
MODEL: Mapping[str, Sequence[Any]] = {
    "num_layers": (1, 2, 4, 5),
    "hidden_size": (8, 16, 20),
    "num_attention_heads": (2, 4),
    "vocab_size": (40, 41),
    "max_position_embeddings": (16, 8),
    "ffn_hidden_size": (0, 16, 24),
    "num_query_groups": (0, 1, 2),
    "head_dim": (0, 4, 5),
    "norm": ("layernorm", "rmsnorm", "batchnorm"),
    "activation": ("gelu", "swiglu", "relu", "gelu_tanh", "silu"),
    "position_embedding": ("learned", "rope", "none"),
    "rope_scaling": (None, None, {"factor": 4.0}, {"factor": 0.0}, {"fctor": 1.0}),
    "num_experts": (0, 0, 2, 4),
    "moe_layers": ((), (0,), [1], (9,)),
    "moe_router_score": ("softmax", "sigmoid"),
    "moe_router_topk": (1, 2, 5),
    "moe_token_dispatcher": ("alltoall", "allgather"),
    "moe_capacity_factor": (0.0, 1.0),
    "moe_capacity_bins": (0, 0, 1, 4),
    "hidden_dropout": (0.0, 0.1, 1.0),
    "attention_dropout": (0.0, 0.1),
    "vocab_multiple": (4, 128),
}
STRATEGY: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("tp", "pp", "cp", "ep", "vpp"), SIZES),
    "etp": (None, None, 1, 2),
    "sequence_parallel": (None, True, False),
    "micro_batch_size": (None, 1, 2, 3),
    "pipeline_schedule": (None, None, "1f1b", "gpipe", "interleaved", "zero-bubble", "1f1"),
    "cp_comm_type": ("p2p", "all_gather", "a2a", "ring"),
    "first_stage_layers": (None, None, 1, 0),
    "last_stage_layers": (None, None, 1, 3),
    **dict.fromkeys(("count_embedding", "count_loss", "recompute_shard_saved", "async_save"), (False, False, True)),
    "pipeline_layout": (None, None, None, "Et|tL", "E(t", "t*1000000L"),
    "distributed_optimizer": (True, False),
    "elementwise_optimizers": (None, ["torch.optim.Muon"], ["nowhere.Lion"], [torch.optim.SGD]),
    "main_grads_dtype": (None, "fp32", "bf16", "auto", "fp16"),
    "grad_reduce_dtype": (None, "fp32", "bf16", "fp16"),
    "bucket_size": (None, 10, 10_000),
    "recompute": (None, None, "full", "selective", ["mlp"], ["mlp", "core"], "moe"),
    "recompute_method": ("uniform", "block"),
    "recompute_num_layers": (1, 1, 2),
    "compile": (False, False, False, "eager", "eagr"),
    "ops": (None, None, "attention=off", {"attention": "off"}, {"attention": "on"}, "x=y", {"attention": False}),
    "fp8": (None, None, Fp8Recipe(), Fp8Recipe(linears=("fc3",)), Fp8Recipe(margin="1", linears=None)),  # type: ignore[arg-type]
    "process_group_backend": (None, None, "gloo", "nccl", "bogus"),
    "timeout": (timedelta(minutes=1), timedelta(0)),
    "may_differ": (None, ["code.*"], "code.*"),
    "max_memory": (None, None, "80GB", "8 kB", 2**40, "much"),
}
MODULE: Mapping[str, Sequence[Any]] = {
    "config": ("llama-tiny", "gpt-tiny", "mixtral-tiny", "lama-tiny", {"num_layers": 2}, {"n_layer": 2}),
    "lr": (1e-3, 0.0),
    "min_lr": (None, 1e-4, 1.0),
    "warmup_steps": (0, 2),
    "decay_steps": (None, 2, 10),
    "lr_schedule": ("constant", "cosine", "wsd", "linaer"),
    "betas": ((0.9, 0.95), [0.9, 0.99], (0.9,), (0.9, 1.0), (NAN, 0.1)),
    "overrides": (),
}
LAYOUT: Mapping[str, Sequence[Any]] = {
    **{name: STRATEGY[name] for name in ("tp", "pp", "cp", "ep", "vpp", "etp", "sequence_parallel", "cp_comm_type")},
    "dp": (None, 1, 2),
}
CALLBACKS: Mapping[Callable[..., Any], Mapping[str, Sequence[Any]]] = {
    Throughput: {"window": (None, 2)},
    ExpertTelemetry: {"every_n_steps": (1, 50), "directory": (None, "pictures", Path("pictures"))},
    KillSwitch: {"path": (None, "stop", Path("stop")), "check_every": (0, 1.5), "signals": (("SIGTERM",), ["SIGFOO"])},
    VerifyCheckpoint: {},
    UploadCheckpoints: {},
}


@dataclass
class Drawn:
    """One configuration; what was refused is ``None`` or the default."""

    strategy: MegatronStrategy
    module: GPTModule
    data: Any
    trainer: dict[str, Any]


class Fuzz:
    """Draws configurations and counts how they were answered.

    Args:
        folder: where a small corpus is written.
    """

    def __init__(self, folder: Path) -> None:
        self.answers: Counter[str] = Counter()
        self.corpus = str(folder / "corpus")
        with IndexedDatasetWriter(self.corpus, np.uint16) as writer:
            for _ in range(40):
                writer.add_document(np.arange(30) % 40, [30])
        (folder / "broken.idx").write_bytes(b"MMIDIDX")
        (folder / "broken.bin").touch()
        paths = (self.corpus, Path(self.corpus), [self.corpus], [0.7, self.corpus, 0.3, self.corpus])
        broken = (str(folder / "nowhere"), [1.0, str(folder / "broken")], [-1, self.corpus], [], [0.3, 0.7])
        self.data: Mapping[str, Sequence[Any]] = {
            "data_path": (*paths, *broken),
            "seq_length": (8, 8, 6, 16, 64),
            "batch_size": (4, 2, 3),
            "split": ("90,10,0", "1", "969,30,1", "1,x", "0,0"),
            **dict.fromkeys(("train_samples", "val_samples", "test_samples"), (None, 16, 0)),
            "num_workers": (0,),
            "tokenizer_type": (None, None, "NullTokenizer", "GPT2BPETokenizer", "nltk"),
            "tokenizer_model": (None, str(folder / "nowhere")),
            "cache_dir": (None, str(folder), folder),
            "val_data_path": (None, None, self.corpus, broken[0]),
            "test_data_path": (None, None, self.corpus),
        }

    def drawn(self, random: Random, wrong: float, owner: Any, values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Some arguments of a class."""
        given = {}
        for name, parameter in list(inspect.signature(owner).parameters.items()):
            if name == "overrides":
                continue
            needed = parameter.default is parameter.empty
            if random.random() < wrong:
                given[name] = random.choice(WRONG)
            elif needed or (name in values and random.random() < 0.3):
                given[name] = random.choice(values.get(name, (parameter.default,)))
        return given

    def build(self, owner: Callable[..., Any], given: Mapping[str, Any], otherwise: Any = None) -> Any:
        """An instance, or what is taken where the arguments are refused; anything else is a fault of ours."""
        try:
            made = owner(**given)
        except (ConfigError, DataError):
            self.answers["refused"] += 1
            return otherwise
        except Exception as error:
            raise AssertionError(f"{getattr(owner, '__name__', owner)}(**{given!r}): {error!r}") from error
        self.answers["accepted"] += 1
        return made

    def draw(self, seed: int, wrong: float | None = None) -> Drawn:
        """One configuration of every class."""
        random = Random(seed)
        wrong = random.choice((0.0, 0.0, 0.02, 0.1)) if wrong is None else wrong
        self.build(ParallelLayout, self.drawn(random, wrong, ParallelLayout, LAYOUT))
        self.build(MegatronPrecision, self.drawn(random, wrong, MegatronPrecision, {"precision": ("16-mixed", "16")}))
        self.build(DynamicLossScale, self.drawn(random, wrong, DynamicLossScale, {"scale": (0.5, 8.0)}))
        sizes = self.drawn(random, wrong, TransformerConfig, MODEL)
        self.build(TransformerConfig, sizes)
        kind = random.choice((GPTModule, LlamaModule, MixtralModule))
        given = self.drawn(random, wrong, kind, {**MODULE, "loss_reduction": ("sample", "token")})
        given.setdefault("config", "llama-tiny")
        some = random.random() < 0.5
        overrides = {name: value for name, value in sizes.items() if some and name not in given}
        small = {"num_layers": 2, "hidden_size": 16, "vocab_size": 40}
        module = self.build(kind, {**given, **overrides}, None) or LlamaModule("llama-tiny", **small)
        strategy = self.build(MegatronStrategy, self.drawn(random, wrong, MegatronStrategy, STRATEGY), None)
        data = self.build(MegatronDataModule, self.drawn(random, wrong, MegatronDataModule, self.data))
        if data is None or random.random() < 0.1:
            data = DataLoader(range(16), batch_size=random.choice((1, 2, 4)))  # type: ignore[arg-type]
        callback = random.choice(list(CALLBACKS))
        made = self.build(callback, self.drawn(random, wrong, callback, CALLBACKS[callback]))
        trainer: dict[str, Any] = {
            "callbacks": [] if made is None else [made],
            "accumulate_grad_batches": random.choice(
                (1, 1, 1, 2, *((0, -1, 1.5, True) if random.random() < wrong else ()))
            ),
            "gradient_clip_val": random.choice(
                (None, None, 0.5, *((-1, NAN, -INF, True) if random.random() < wrong else ()))
            ),
            "precision": random.choice(("32-true", "32-true", "bf16-mixed", "bf16-true")),
            "devices": random.choice((1, 2, 2, 4, 8, 12)),
        }
        return Drawn(strategy or MegatronStrategy(), module, data, trainer)

    def check(self, drawn: Drawn) -> bool:
        """True if a whole configuration passes the checks before launch."""
        quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}

        def checked() -> bool:
            trainer = Trainer(strategy=drawn.strategy, enable_checkpointing=False, **quiet, **drawn.trainer)
            drawn.strategy.check(drawn.module, drawn.data, trainer=trainer)
            return True

        return bool(self.build(checked, {}, otherwise=False))


def main(count: int) -> None:
    """Try so many seeds."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    passed = 0
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        for seed in range(count):
            try:
                passed += fuzz.check(fuzz.draw(seed))
            except BaseException:
                print(f"seed {seed}", file=sys.stderr)
                raise
    print(f"{count} configurations: {passed} would be launched; constructors and checks: {dict(fuzz.answers)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
