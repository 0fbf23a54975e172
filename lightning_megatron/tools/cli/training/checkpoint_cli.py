"""LightningCLI that builds the model from the configuration in a checkpoint."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_megatron.checkpoint import CheckpointError, OpenCheckpoint, open_checkpoint
from lightning_megatron.checkpoint.formats.hf.directory import is_hf_directory
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.lightning.pretrained.config_check import refuse_unfilled_checkpoint
from lightning_megatron.lightning.pretrained.hugging_face import checked_hf_config, hf_module_name
from lightning_megatron.lightning.run_state.hyper_parameters import config_of, module_arguments
from lightning_megatron.lightning.run_state.last_checkpoint import NAMED
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.models.presets import PRESETS
from lightning_megatron.tools.cli.recipes.words import config_words

_FROM_HF = "--model.from_hf"


class CheckpointCLI(LightningCLI):
    """LightningCLI that takes arguments of the model from ``--ckpt_path DIR`` if the user does not give them.

    Arguments on the command line and in files of ``--config`` take precedence. A model of ours without a configuration
    from either is an error: a command should not guess a default.
    """

    _opened: OpenCheckpoint | None = None

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Accept what is used elsewhere: ``launch``'s section, and options that are replaced by files before."""
        parser.add_argument("--cluster", type=dict | None, default=None, help="machines, for `launch`; not read here")
        parser.add_argument(
            "--recipe", type=str | None, default=None, help="a recipe of this package, as with --config"
        )
        small = "cpu, or cpu=N: the recipe's layout on at most 16 or N processes, with a tiny model and random tokens"
        parser.add_argument("--scale", type=str | None, default=None, help=small)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the words, and add arguments of the model from the checkpoint or Hugging Face directory they name."""
        if isinstance(args, dict | Namespace):  # a whole configuration in place of words: all of it is given
            super().parse_arguments(parser, args)
            return
        given = config_words(sys.argv[1:] if args is None else args, os.environ)
        words, from_hf = with_hf_module(given)
        self.config = parser.parse_args(words)
        command = self.config.get("subcommand")
        model = self.config[command].get("model") if command else None
        path = from_hf or (self.config[command].get("ckpt_path") if command else None)
        if model is None or not path or not Path(path).is_dir() or str(path) in NAMED:
            return
        own = parser.parse_args(words, defaults=False)[command].get("model")
        with suppress(CheckpointError):
            self._opened = open_checkpoint(path, check="sizes")
        saved = _arguments(self._opened or path, _class_of(model), own.get("init_args") or {})
        if saved:
            filled = {command: {"model": {"class_path": model.class_path, **saved}}}
            self.config = parser.parse_object(filled, self.config)

    def instantiate_classes(self) -> None:
        """Build the Trainer and the module, and give the strategy the checkpoint that is open."""
        super().instantiate_classes()
        if self._opened is not None and isinstance(self.trainer.strategy, MegatronStrategy):
            self.trainer.strategy.checkpoints.open_once(self._opened)

    def before_instantiate_classes(self) -> None:
        """Refuse a model of ours without a configuration."""
        model = self.config[self.subcommand].get("model") if self.subcommand else None
        if model is None or not issubclass(_class_of(model), GPTModule):
            return
        if model.init_args.get("config") is None:
            reason = (
                "is not given: name a preset or the fields of a configuration, or with --ckpt_path a checkpoint"
                " directory that has it"
            )
            raise ConfigError([Problem("model.config", None, reason, tuple(PRESETS))])


def with_hf_module(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Expand ``--model.from_hf DIR`` into the class of its module and the path of its weights.

    A class or a ``--ckpt_path`` that the user gives takes precedence.

    Returns:
        The words, and the directory, if there is one.

    Raises:
        ConfigError: for a path that is no Hugging Face directory, or a model of an unknown family.
    """
    words = list(words)
    place = next((n for n, word in enumerate(words) if word.partition("=")[0] == _FROM_HF), None)
    if place is None:
        return words, None
    _, joined, path = words[place].partition("=")
    after = words[place + 1 :] if joined else words[place + 2 :]
    path = path if joined else "".join(words[place + 1 : place + 2])
    if not is_hf_directory(path):
        raise ConfigError([Problem("model.from_hf", path, "no Hugging Face directory: it has no config.json")])
    given = {word.partition("=")[0] for word in words}
    chosen = [] if "--model" in given else [f"--model={hf_module_name(path)}"]
    chosen += [] if "--ckpt_path" in given else [f"--ckpt_path={path}"]
    return words[:place] + chosen + after, path


def _class_of(model: Any) -> type:
    """The class that a parsed model names; ``object`` for a function that makes one."""
    module, _, name = model.class_path.rpartition(".")
    found = getattr(import_module(module), name)
    return found if isinstance(found, type) else object


def _arguments(path: str | os.PathLike[str], module_class: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments in a checkpoint that the user has not given, as the parser takes them.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        ConfigError: for a Hugging Face directory with a model that ours cannot reproduce.
    """
    is_ours = issubclass(module_class, GPTModule)
    needs_config = is_ours and "config" not in given
    if is_hf_directory(path):
        return {"init_args": {"config": asdict(checked_hf_config(path))}} if needs_config else {}
    try:
        saved = module_arguments(path)
    except CheckpointError:
        if needs_config:
            raise
        return {}  # loading reports the fault, or supports the older format
    config = config_of(saved) if is_ours else None
    if config is not None:
        refuse_unfilled_checkpoint(open_checkpoint(path, check="sizes"))  # before the model is built
        saved = {name: value for name, value in saved.items() if not hasattr(config, name)} | {"config": asdict(config)}
    return _taken_by(module_class, saved, given)


def _taken_by(module_class: type, saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Saved arguments that the user has not given, and that the class takes, by name or by ``**``."""
    known = inspect.signature(module_class).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    named = {name: value for name, value in saved.items() if name in known and name not in given}
    others = {name: value for name, value in saved.items() if name not in known} if takes_any else {}
    return {"init_args": named} | ({"dict_kwargs": others} if others else {})
