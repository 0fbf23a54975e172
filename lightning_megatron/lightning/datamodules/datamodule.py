"""Megatron's data in a LightningDataModule."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_megatron.arguments import OneOf, argument_problems, at_least, checked
from lightning_megatron.config.layout import BatchShape
from lightning_megatron.data import build_gpt_datasets
from lightning_megatron.data.batch_ramp import BatchRamp
from lightning_megatron.data.blend_file import separated
from lightning_megatron.data.build import (
    DataPath,
    DataPaths,
    Paths,
    SampleDataset,
    file_problems,
    parse_data_path,
    share_problems,
)
from lightning_megatron.data.fingerprint import (
    Fingerprint,
    data_fingerprint,
    fingerprint_problems,
    tokenizer_fingerprint,
)
from lightning_megatron.data.loading.cut_files import name_cut_files
from lightning_megatron.data.loading.resumable_loader import ResumableDataLoader
from lightning_megatron.data.preprocessing.encode import TokenizerSpec
from lightning_megatron.data.sampler import ConsecutiveEpochs, MegatronSampler
from lightning_megatron.data.tokenizers import TOKENIZER_TYPES, Tokenizer, tokenizer_beside
from lightning_megatron.errors import ConfigError, DataError, Problem, raise_if_any
from lightning_megatron.lightning.datamodules.arguments import COUNTS, DATA_RULES, ELSEWHERE, without_samples
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.lightning.streams.sample_plan import SamplePlan
from lightning_megatron.lightning.validation.samples import count_samples

ONCE: Mapping[str, Any] = {"drop_last": False, "fill": "short"}
"""Every sample once: the last batches are shorter, or empty on a rank that has no sample left."""


class MegatronDataModule(LightningDataModule):
    """Training, validation and test samples from Megatron's ``.bin`` / ``.idx`` files.

    Ranks of one data-parallel replica read the same samples. The order depends on the data, the seed, the number of
    samples drawn (so give ``train_samples`` where a run may be prolonged) and the global batch alone, and a checkpoint
    in mid-epoch resumes at the next sample. It contains a fingerprint of the data, and ``fit`` refuses other data.

    Args:
        data_path: prefix of a pair of files, a list of prefixes (each read once, mixed by length), or
            ``[weight, prefix, ...]``; only for training if ``val_data_path`` or ``test_data_path`` is given. Or a YAML
            or JSON file of these, or one of them under each of ``train``, ``valid`` and ``test``.
        seq_length: tokens of a sample.
        batch_size: samples of one batch of one data-parallel replica.
        split: shares of the documents for training, validation and test, if ``data_path`` is for all three.
        train_samples: samples to draw for training, over as many epochs of the data as needed; ``None`` means
            ``max_epochs`` epochs of the data, shuffled as one, or as many as ``max_steps`` consumes. With neither of
            these, training ends after ``train_samples``; epochs that repeat them have orders of their own. In a job
            that counts samples (by ``global_batch_size``, ``rampup_batch_size``, or a schedule in samples) it is the
            length of training, and giving ``max_steps`` too is an error.
        val_samples: samples to draw for validation; ``None`` means one epoch of its share, in a weighted blend until
            the first of its members is used up.
        test_samples: samples to draw for test; ``None`` as for ``val_samples``.
        seed: seed of the order of samples.
        num_workers: number of processes that load samples.
        cache_dir: directory of the index files; ``None`` means beside the data.
        tokenizer_type: Megatron's name of the tokenizer that the data was made with, to check ids and sizes.
        tokenizer_model: file or directory of the tokenizer; ``None`` takes the one in the folder of the data, if any:
            ``tokenizer.model``, ``tokenizer.json``, ``vocab.txt``, or ``vocab.json`` with ``merges.txt``.
        eod_mask_loss: leave end-of-document tokens out of the loss; needs the tokenizer.
        reset_position_ids: restart positions after each document; needs the tokenizer. As in Megatron-LM,
            attention still crosses the end of a document, unless ``reset_attention_mask`` is given too.
        allow_other_data: let ``fit`` resume a checkpoint that was trained on other data, with other shares or weights,
            in another order, or with another tokenizer; it skips as many samples as were consumed.
        vocab_file: vocabulary of GPT-2's or BERT's tokenizer, instead of ``tokenizer_model``.
        merge_file: merges of GPT-2's tokenizer.
        val_data_path: data of validation, read whole.
        test_data_path: data of tests, read whole.
        global_batch_size: samples of one optimizer step, whatever the number of replicas is, instead of ``batch_size``.
        rampup_batch_size: ramp of the global batch by Megatron-LM's rule: its first size, its increment, and the number
            of samples after which it has its full size.
        reset_attention_mask: keep attention within each document of a sample; needs the tokenizer.

    Raises:
        ConfigError: for arguments that cannot work.
    """

    @checked(
        ELSEWHERE,
        **DATA_RULES,
        seq_length=at_least(1),
        tokenizer_type=OneOf(TOKENIZER_TYPES),
        global_batch_size=at_least(1),
    )
    def __init__(
        self,
        data_path: DataPaths,
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
        global_batch_size: int | None = None,
        rampup_batch_size: Sequence[int] | None = None,
        reset_attention_mask: bool = False,
    ) -> None:
        super().__init__()
        self.sample_plan = SamplePlan(batch_size, train_samples, global_batch_size, rampup_batch_size)
        self.data_path, self.val_data_path, self.test_data_path = separated(data_path, val_data_path, test_data_path)
        self.seq_length, self.split, self.seed = seq_length, split, seed
        self._samples = (train_samples, val_samples, test_samples)
        self.val_samples, self.test_samples = val_samples, test_samples
        self.num_workers, self.cache_dir = num_workers, None if cache_dir is None else os.fspath(cache_dir)
        self.eod_mask_loss, self.reset_position_ids = eod_mask_loss, reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.allow_other_data = allow_other_data
        if tokenizer_type is not None and tokenizer_model is vocab_file is None:
            tokenizer_model = tokenizer_beside(tokenizer_type, Path(parse_data_path(self.data_path).prefixes[0]).parent)
        model, vocab, merges = (None if f is None else os.fspath(f) for f in (tokenizer_model, vocab_file, merge_file))
        self.tokenizer_type, self.tokenizer_model = tokenizer_type, model
        self.vocab_file, self.merge_file = vocab, merges
        self._spec = None if tokenizer_type is None else TokenizerSpec(tokenizer_type, model, vocab, merges)
        self.tokenizer: Tokenizer | None = None if self._spec is None else self._spec.build()
        self._datasets: tuple[SampleDataset | None, ...] = (None, None, None)
        self._train_loader: ResumableDataLoader | None = None
        self._saved_place: dict[str, Any] | None = None
        self._fingerprint: Fingerprint | None = None
        self._ends_training, self._epochs_drawn = False, 1
        self._max_steps, self._samples_drawn = -1, train_samples
        raise_if_any(self.sample_plan.own_problems() + self._problems())

    def _problems(self) -> list[Problem]:
        reason = "needs to know the end-of-document token: give tokenizer_type and tokenizer_model"
        names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask") if self.tokenizer is None else ()
        return [Problem(name, True, reason, (False,)) for name in names if getattr(self, name)]

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
        return found if found or len(self._paths) > 1 else self._share_problems()

    def _share_problems(self) -> list[Problem]:
        return share_problems(self.data_path, self.split, dict(zip(COUNTS, self._samples, strict=True)))

    @property
    def required_tokenizer(self) -> TokenizerSpec | None:
        """Tokenizer that the weights of a run must have been trained with; ``None`` for any."""
        return None if self.allow_other_data else self._spec

    @property
    def packs_documents(self) -> bool:
        """True if samples hold several documents, and attention stays within each."""
        return self.reset_attention_mask

    @property
    def batch_shape(self) -> BatchShape:
        """Sizes that layouts and models are checked against."""
        vocab = None if self.tokenizer is None else self.tokenizer.vocab_size
        dp = None if self.trainer is None else self._dp_size
        return self.sample_plan.shape(dp, seq_length=self.seq_length, vocab_size=vocab)

    @property
    def batch_size(self) -> int:
        """Samples of one batch of one replica, after any ramp; it may be set, as ``BatchSizeFinder`` does."""
        return self.sample_plan.batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        raise_if_any(argument_problems({"batch_size": size}, {"batch_size": int}, {"batch_size": at_least(1)}, {}))
        plan = replace(self.sample_plan, batch_size=size)
        reason = "the number of steps follows from it and train_samples: find it in a run of its own, with max_steps"
        raise_if_any(plan.own_problems() + [Problem("batch_size", size, reason)] * self._ends_training)
        self.sample_plan = plan

    @property
    def global_batch_size(self) -> int:
        """Samples of one batch of all replicas, after any ramp."""
        return self.sample_plan.global_batch(self._dp_size)

    def prepare_data(self) -> None:
        """Build the index files, on one process of each node; all then map them into memory."""
        self._note_steps()
        self._build()

    def setup(self, stage: str) -> None:
        """Open the data; let training end after ``train_samples``, if the Trainer sets no other end."""
        self._note_steps()
        self._datasets = self._build()
        trainer, part = self.trainer, 1 if stage in ("fit", "validate") else 2
        asked = self._paths, self.split, self.seq_length
        if self._datasets[part] is None and (missing := without_samples(part, *asked)) is not None:
            rank_zero_warn(missing)
        if stage == "fit":  # a position belongs to one run
            self._train_loader = self._saved_place = None
            if self._datasets[0] is None:
                raise DataError(without_samples(0, *asked))
        if stage == "fit" and trainer is not None and self.sample_plan.ends(trainer, self._counts_samples):
            raise_if_any(self.sample_plan.missing(len(self._datasets[0] or ())))
            self._ends_training = True
            steps = self.sample_plan.batches(self._dp_size) // trainer.accumulate_grad_batches
            trainer.fit_loop.epoch_loop.max_steps = steps
            rank_zero_info(f"setting training iterations to {steps}")

    def teardown(self, stage: str) -> None:
        """Restore the Trainer's own end of training."""
        if self._ends_training and self.trainer is not None:
            self._ends_training = False
            self.trainer.fit_loop.epoch_loop.max_steps = -1

    def on_exception(self, exception: BaseException) -> None:
        """Call :meth:`teardown`, which Lightning does not do after an error, and name a file that killed a worker."""
        self.teardown("fit")
        name_cut_files(exception, self._datasets)

    @property
    def _counts_samples(self) -> bool:
        """True if anything in this job counts samples."""
        return self.trainer is not None and count_samples((self, self.trainer.lightning_module))

    def _note_steps(self) -> None:
        """Keep the run's number of steps: Lightning's Tuner sets another one while it searches."""
        self._max_steps = -1 if self.trainer is None else self.trainer.max_steps

    @property
    def _samples_wanted(self) -> int | None:
        return self.sample_plan.wanted(self.trainer, self._max_steps, self._dp_size)

    def _build(self) -> tuple[SampleDataset | None, ...]:
        (_, val, test), epochs = self._samples, self.sample_plan.epochs(self.trainer)
        self._samples_drawn = train = self._samples_wanted
        given = self.data_path, self.val_data_path, self.test_data_path
        whole = given[1] is not None or given[2] is not None
        paths = Paths(None, *given, self.split) if whole else Paths(self.data_path, split=self.split)
        datasets, self._epochs_drawn = self._make_datasets(paths, (train, val, test)), 1
        if train is None and epochs and epochs > 1 and (once := datasets[0]) is not None and len(once):
            datasets = (self._make_datasets(paths, (epochs * len(once), 0, 0))[0] or once, *datasets[1:])
            self._epochs_drawn = len(datasets[0] or once) // len(once)
        return datasets

    def _make_datasets(self, paths: Paths, samples: tuple[int | None, ...]) -> tuple[SampleDataset | None, ...]:
        """Data sets of training, validation and test; a subclass has samples of another kind."""
        return build_gpt_datasets(
            paths.shared,
            train_data_path=paths.train,
            valid_data_path=paths.valid,
            test_data_path=paths.test,
            seq_length=self.seq_length,
            num_samples=samples,
            split=paths.split,
            seed=self.seed,
            cache_dir=self.cache_dir,
            eod_id=None if self.tokenizer is None else self.tokenizer.eod,
            eod_mask_loss=self.eod_mask_loss,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
        )

    @property
    def _dp_size(self) -> int:
        """Data-parallel size: number of data shards."""
        strategy = None if self.trainer is None else self.trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            return strategy.data_parallel_size
        return 1 if self.trainer is None else self.trainer.world_size

    @property
    def _dp_rank(self) -> int:
        """Data-parallel rank: index of the data shard that this rank reads."""
        strategy = None if self.trainer is None else self.trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            return strategy.data_parallel_rank
        return 0 if self.trainer is None else self.trainer.global_rank

    def _loader(self, dataset: SampleDataset | None, samples: int | None = None, ramp: BatchRamp | None = None) -> Any:
        total = len(dataset or ()) // self._epochs_drawn if samples is None else samples
        drop_last = samples is not None or total >= self.global_batch_size
        order = self.sample_plan.order(self.trainer, epochs=self._epochs_drawn, seed=self.seed)
        return self._reading(dataset, total, ramp, drop_last=drop_last, **order)

    def _reading(
        self, dataset: SampleDataset | None, total: int | None = None, ramp: BatchRamp | None = None, **order: Any
    ) -> Any:
        if dataset is None:
            return []
        dp, total = self._dp_size, len(dataset) if total is None else total
        size = self.sample_plan.batch_of(dp) if ramp is None else ramp
        kind = ConsecutiveEpochs if "epochs" in order else MegatronSampler
        sampler = kind(total, batch_size=size, dp_rank=self._dp_rank, dp_size=dp, **order)
        return ResumableDataLoader(
            dataset, batch_sampler=sampler, num_workers=self.num_workers, persistent_workers=self.num_workers > 0
        )

    def train_dataloader(self) -> Any:
        """Batches of ``{"tokens", "labels", "loss_mask", "position_ids"}``, each ``[batch_size, seq_length]``."""
        if self._datasets[0] is not None and self._samples_drawn != self._samples_wanted:
            self._datasets = self._build()  # batch_size has been set since
        # A data set may have more samples than asked for: training that ends after ``train_samples`` skips the rest.
        samples = self.sample_plan.train_samples if self._ends_training else None
        loader = self._loader(self._datasets[0], samples, self.sample_plan.ramp(self._dp_size))
        if isinstance(loader, ResumableDataLoader):
            if self._train_loader is not None and not self._train_loader.position.is_restored:
                self._saved_place = None  # outdated: an epoch has begun since it was restored
            self._train_loader = loader
            if self._saved_place is not None:
                loader.load_state_dict(self._saved_place)
        return loader

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the training data: equal for two runs that read the same samples in the same order."""
        if self._fingerprint is None:
            tokenizer = self._spec and self.tokenizer and tokenizer_fingerprint(self.tokenizer, self._spec.file)
            self._fingerprint = {
                "data_path": data_fingerprint(self.data_path, split=self.split if len(self._paths) == 1 else "1"),
                "seq_length": self.seq_length,
                "seed": self.seed,
                "tokenizer": tokenizer,
                **self._sample_options,
            }
        return self._fingerprint

    @property
    def _sample_options(self) -> dict[str, Any]:
        """Arguments that samples depend on beside those of the data, as plain values."""
        options = {"eod_mask_loss": self.eod_mask_loss, "reset_position_ids": self.reset_position_ids}
        return options | ({"reset_attention_mask": True} if self.reset_attention_mask else {})  # lacking in older ones

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
        samples = dict(zip(COUNTS, self._samples, strict=True))
        plan = self.sample_plan
        batches = {"global_batch_size": plan.global_batch_size, "rampup_batch_size": plan.rampup_batch_size}
        given = {name: value for name, value in batches.items() if value is not None}
        return {"batch_size": self.batch_size, **given, **samples, "fingerprint": read, **held_out}

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
            **self.sample_plan.saved(self._dp_size, self._accumulated),
            "fingerprint": self.fingerprint,
            "tokenizer": self._spec and self._spec.absolute(),
        }

    @property
    def _accumulated(self) -> int:
        return 1 if self.trainer is None else self.trainer.accumulate_grad_batches

    @property
    def _epoch_is_unfinished(self) -> bool:
        """True if the epoch has batches left: Lightning counts an epoch that ``max_steps`` cut off as done.

        Where ``train_samples`` is the end of training, a later run may have more of them.
        """
        return self._ends_training or (
            self.trainer is not None and not self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position, before or after the loader is created.

        Raises:
            ConfigError: if training would continue with other data, naming every difference.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        if not self.allow_other_data:
            self._compare_data(state_dict)
            if self._counts_samples:
                raise_if_any(self.sample_plan.resume_problems(state_dict, self._dp_size, self._accumulated))
        self._saved_place = state_dict.get("train")
        if self._train_loader is not None and self._saved_place is not None:
            self._train_loader.load_state_dict(self._saved_place)

    def _compare_data(self, saved: Mapping[str, Any]) -> None:
        if found := fingerprint_problems(saved.get("fingerprint", {}), self.fingerprint):
            reason = "the checkpoint was trained on other data; True continues with today's, after as many samples"
            raise ConfigError([*found, Problem("allow_other_data", False, reason, (True,))])
        dataset = self._datasets[0]
        if dataset is not None and len(dataset) != saved.get("train_samples", len(dataset)):
            rank_zero_warn(
                f"{len(dataset)} samples are drawn for training now, and {saved['train_samples']} were before: they may"
                " come in another order, and some twice. Give train_samples a number that lasts for all runs"
            )

    def val_dataloader(self) -> Any:
        """Batches of the validation share, each sample once."""
        return self._reading(self._datasets[1], **ONCE)

    def test_dataloader(self) -> Any:
        """Batches of the test share, each sample once; none if it is empty."""
        return self._reading(self._datasets[2], **ONCE)

    def predict_dataloader(self) -> Any:
        """Batches of :meth:`test_dataloader`."""
        return self.test_dataloader()
