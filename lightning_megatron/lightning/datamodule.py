"""Megatron's data in a LightningDataModule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.arguments import Check, OneOf, at_least, checked
from lightning_megatron.config.layout import BatchShape
from lightning_megatron.data import build_gpt_datasets, build_tokenizer
from lightning_megatron.data.build import (
    DataPath,
    SampleDataset,
    file_problems,
    parse_data_path,
    parse_split,
    share_problems,
)
from lightning_megatron.data.fingerprint import (
    Fingerprint,
    data_fingerprint,
    fingerprint_problems,
    tokenizer_fingerprint,
)
from lightning_megatron.data.resumable_loader import ResumableDataLoader
from lightning_megatron.data.sampler import MegatronSampler
from lightning_megatron.data.tokenizers import TOKENIZER_TYPES, Tokenizer
from lightning_megatron.errors import ConfigError, DataError, Problem, problems_of, raise_if_any
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy

ELSEWHERE = {
    "micro_batch_size": "it is an argument of the strategy",
    "global_batch_size": "it is batch_size x dp x accumulate_grad_batches (of the Trainer)",
    "valid_data_path": "val_data_path",
    "data_cache_path": "cache_dir",
    "data_prefix": "data_path",
}
"""Our arguments, or what to do instead, by the names of Megatron and NeMo."""


def readable(argument: str) -> Check:
    """Rule for data paths that is checked before the files are opened."""
    return Check(lambda path: [] if path is None else problems_of(parse_data_path, path, argument))


class MegatronDataModule(LightningDataModule):
    """Training, validation and test samples from Megatron's ``.bin`` / ``.idx`` files.

    Ranks of one data-parallel replica read the same samples. The order depends on the data, the seed, the number of
    samples drawn (so give ``train_samples`` where a run may be prolonged) and the global batch alone, and a checkpoint
    in mid-epoch resumes at the next sample. It contains a fingerprint of the data, and ``fit`` refuses other data.

    Args:
        data_path: prefix of a pair of files, a list of prefixes, or ``[weight, prefix, ...]``; only for training if
            ``val_data_path`` or ``test_data_path`` is given.
        seq_length: tokens of a sample.
        batch_size: samples of one batch of one data-parallel replica.
        split: shares of the documents for training, validation and test, if ``data_path`` is for all three.
        train_samples: samples to draw for training, over as many epochs of the data as needed; ``None`` means as many
            as ``Trainer(max_steps=...)`` consumes, or one epoch of the data without it.
        val_samples: samples to draw for validation; ``None`` means one epoch of its share, in a weighted blend until
            the first of its members is used up.
        test_samples: samples to draw for test; ``None`` as for ``val_samples``.
        seed: seed of the order of samples.
        num_workers: number of processes that load samples.
        cache_dir: directory of the index files; ``None`` means beside the data.
        tokenizer_type: Megatron's name of the tokenizer that the data was made with, to check ids and sizes.
        tokenizer_model: file or directory of the tokenizer.
        eod_mask_loss: leave end-of-document tokens out of the loss; needs the tokenizer.
        reset_position_ids: let positions begin anew after each document; needs the tokenizer. As in Megatron-LM,
            attention still crosses the end of a document.
        allow_other_data: let ``fit`` resume a checkpoint that was trained on other data, with other shares or weights,
            in another order, or with another tokenizer; it skips as many samples as were consumed.
        vocab_file: vocabulary of GPT-2's or BERT's tokenizer, instead of ``tokenizer_model``.
        merge_file: merges of GPT-2's tokenizer.
        val_data_path: data of validation, read whole.
        test_data_path: data of tests, read whole.

    Raises:
        ConfigError: for arguments that cannot work.
    """

    @checked(
        ELSEWHERE,
        data_path=readable("data_path"),
        val_data_path=readable("val_data_path"),
        test_data_path=readable("test_data_path"),
        split=Check(partial(problems_of, parse_split)),
        seq_length=at_least(1),
        batch_size=at_least(1),
        train_samples=at_least(0),
        val_samples=at_least(0),
        test_samples=at_least(0),
        num_workers=at_least(0),
        seed=at_least(0),
        tokenizer_type=OneOf(TOKENIZER_TYPES),
    )
    def __init__(
        self,
        data_path: DataPath,
        seq_length: int,
        batch_size: int = 1,
        split: str = "969,30,1",
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        tokenizer_type: str | None = None,
        tokenizer_model: str | os.PathLike[str] | None = None,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        allow_other_data: bool = False,
        vocab_file: str | os.PathLike[str] | None = None,
        merge_file: str | os.PathLike[str] | None = None,
        val_data_path: DataPath | None = None,
        test_data_path: DataPath | None = None,
    ) -> None:
        super().__init__()
        self.data_path, self.val_data_path, self.test_data_path = data_path, val_data_path, test_data_path
        self.seq_length, self.batch_size, self.split, self.seed = seq_length, batch_size, split, seed
        self.samples = (train_samples, val_samples, test_samples)
        self.num_workers, self.cache_dir = num_workers, _path(cache_dir)
        self.eod_mask_loss, self.reset_position_ids = eod_mask_loss, reset_position_ids
        self.allow_other_data = allow_other_data
        self.tokenizer: Tokenizer | None = None
        self._tokenizer_model = tokenizer_model or vocab_file
        if tokenizer_type is not None:
            vocab, merges = _path(vocab_file), _path(merge_file)
            self.tokenizer = build_tokenizer(
                tokenizer_type, _path(tokenizer_model), vocab_file=vocab, merge_file=merges
            )
        self._datasets: tuple[SampleDataset | None, ...] = (None, None, None)
        self._train_loader: ResumableDataLoader | None = None
        self._saved_place: dict[str, Any] | None = None
        self._fingerprint: Fingerprint | None = None
        raise_if_any(self._problems())

    def _problems(self) -> list[Problem]:
        found = []
        for name in ("eod_mask_loss", "reset_position_ids"):
            if getattr(self, name) and self.tokenizer is None:
                reason = "needs to know the end-of-document token: give tokenizer_type and tokenizer_model"
                found.append(Problem(name, True, reason, (False,)))
        return found

    @property
    def _paths(self) -> dict[str, DataPath]:
        """Data paths by the argument that gives them."""
        paths = {
            "data_path": self.data_path,
            "val_data_path": self.val_data_path,
            "test_data_path": self.test_data_path,
        }
        return {argument: path for argument, path in paths.items() if path is not None}

    def data_problems(self) -> list[Problem]:
        """Missing or faulty files and empty shares; the strategy calls this before it starts processes."""
        found = [problem for argument, path in self._paths.items() for problem in file_problems(path, argument)]
        if found or len(self._paths) > 1:
            return found
        wanted = zip(("train_samples", "val_samples", "test_samples"), self.samples, strict=True)
        return share_problems(self.data_path, self.split, dict(wanted))

    @property
    def batch_shape(self) -> BatchShape:
        """Sizes that layouts and models are checked against."""
        vocab = None if self.tokenizer is None else self.tokenizer.vocab_size
        return BatchShape(self.batch_size, seq_length=self.seq_length, vocab_size=vocab)

    @property
    def global_batch_size(self) -> int:
        """Samples of one batch of all replicas."""
        return self.batch_size * self._dp[1]

    def prepare_data(self) -> None:
        """Build the index files, on one process of each node; all then map them into memory."""
        self._build()

    def setup(self, stage: str) -> None:
        """Open the data."""
        self._datasets = self._build()

    def _build(self) -> tuple[SampleDataset | None, ...]:
        train, val, test = self.samples
        if train is None and self.trainer is not None and self.trainer.max_steps > 0:
            train = self.trainer.max_steps * self.trainer.accumulate_grad_batches * self.global_batch_size
        whole = self.val_data_path is not None or self.test_data_path is not None
        return build_gpt_datasets(
            None if whole else self.data_path,
            train_data_path=self.data_path if whole else None,
            valid_data_path=self.val_data_path,
            test_data_path=self.test_data_path,
            seq_length=self.seq_length,
            num_samples=(train, val, test),
            split=self.split,
            seed=self.seed,
            cache_dir=self.cache_dir,
            eod_id=None if self.tokenizer is None else self.tokenizer.eod,
            eod_mask_loss=self.eod_mask_loss,
            reset_position_ids=self.reset_position_ids,
        )

    @property
    def _dp(self) -> tuple[int, int]:
        """Number of this rank's share of the data, and the number of shares."""
        strategy = None if self.trainer is None else self.trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            return strategy.data_parallel_rank, strategy.data_parallel_size
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _loader(self, dataset: SampleDataset | None) -> Any:
        if dataset is None:
            return []
        rank, size = self._dp
        sampler = MegatronSampler(
            len(dataset),
            batch_size=self.batch_size,
            dp_rank=rank,
            dp_size=size,
            drop_last=len(dataset) >= self.batch_size * size,
        )
        return ResumableDataLoader(
            dataset, batch_sampler=sampler, num_workers=self.num_workers, persistent_workers=self.num_workers > 0
        )

    def train_dataloader(self) -> Any:
        """Batches of ``{"tokens", "labels", "loss_mask", "position_ids"}``, each ``[batch_size, seq_length]``."""
        loader = self._loader(self._datasets[0])
        if isinstance(loader, ResumableDataLoader):
            self._train_loader = loader
            if self._saved_place is not None:
                loader.load_state_dict(self._saved_place)
        return loader

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the training data: equal for two runs that read the same samples in the same order."""
        if self._fingerprint is None:
            tokenizer = self.tokenizer and tokenizer_fingerprint(self.tokenizer, self._tokenizer_model)
            self._fingerprint = {
                "data_path": data_fingerprint(self.data_path, split=self.split if len(self._paths) == 1 else "1"),
                "seq_length": self.seq_length,
                "seed": self.seed,
                "tokenizer": tokenizer,
                "eod_mask_loss": self.eod_mask_loss,
                "reset_position_ids": self.reset_position_ids,
            }
        return self._fingerprint

    def facts(self) -> dict[str, Any]:
        """Everything that samples depend on, which must be equal on all ranks of a job."""
        try:
            read: Any = self.fingerprint
            held_out = {
                argument: data_fingerprint(path, split="1")
                for argument, path in self._paths.items()
                if argument != "data_path"
            }
        except (OSError, ConfigError, DataError) as error:
            read, held_out = f"cannot be read: {type(error).__name__}", {}
        names = ("train_samples", "val_samples", "test_samples")
        samples = dict(zip(names, self.samples, strict=True))
        return {"batch_size": self.batch_size, **samples, "fingerprint": read, **held_out}

    def state_dict(self) -> dict[str, Any]:
        """Fingerprint of the data and position of training in it; equal on all ranks.

        Lightning saves a loader's position too, but loses it if the loader is created before the checkpoint is read:
        ``estimated_stepping_batches`` in ``configure_optimizers`` is enough for that.
        """
        if self._train_loader is None:
            return {}
        place = {**self._train_loader.state_dict(), "unfinished": self._epoch_is_unfinished}
        samples = len(self._train_loader.dataset)  # type: ignore[arg-type]
        return {
            "train": place,
            "train_samples": samples,
            "global_batch_size": self.global_batch_size,
            "fingerprint": self.fingerprint,
        }

    @property
    def _epoch_is_unfinished(self) -> bool:
        """True if the epoch has batches left: Lightning counts an epoch that ``max_steps`` cut off as done."""
        return self.trainer is not None and not self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position, before or after the loader is created.

        Raises:
            ConfigError: if training would continue with other data, naming every difference.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        if not self.allow_other_data:
            self._compare_data(state_dict)
        self._saved_place = state_dict.get("train")
        if self._train_loader is not None and self._saved_place is not None:
            self._train_loader.load_state_dict(self._saved_place)

    def _compare_data(self, saved: Mapping[str, Any]) -> None:
        if found := fingerprint_problems(saved.get("fingerprint", {}), self.fingerprint):
            reason = "the checkpoint was trained on other data; True goes on with today's, after as many samples"
            raise ConfigError([*found, Problem("allow_other_data", False, reason, (True,))])
        dataset = self._datasets[0]
        if dataset is not None and len(dataset) != saved.get("train_samples", len(dataset)):
            rank_zero_warn(
                f"{len(dataset)} samples are drawn for training now, and {saved['train_samples']} were before: they may"
                " come in another order, and some twice. Give train_samples a number that lasts for all runs"
            )

    def val_dataloader(self) -> Any:
        """Batches of the validation share; none if it is empty."""
        return self._loader(self._datasets[1])

    def test_dataloader(self) -> Any:
        """Batches of the test share; none if it is empty."""
        return self._loader(self._datasets[2])

    def predict_dataloader(self) -> Any:
        """Batches of the test share."""
        return self.test_dataloader()


def _path(given: str | os.PathLike[str] | None) -> str | None:
    return None if given is None else os.fspath(given)
