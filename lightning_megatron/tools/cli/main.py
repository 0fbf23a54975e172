"""``lightning-megatron``: training through LightningCLI, and a small command for each thing around it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple


class _Command(NamedTuple):
    """Module below ``cli`` and purpose of a command."""

    module: str
    purpose: str

    def function(self, name: str) -> Any:
        """Function of the command, which has its name."""
        name = "trainer" if self.module == _TRAINER else name.replace("-", "_")
        return getattr(import_module(f"lightning_megatron.tools.cli.{self.module}"), f"{name}_command")


_TRAINER = "training.trainer"
_COMMANDS = {
    "fit": _Command(_TRAINER, "train, from a YAML recipe or arguments"),
    "validate": _Command(_TRAINER, "one pass over the validation data"),
    "test": _Command(_TRAINER, "one pass over the test data"),
    "predict": _Command(_TRAINER, "run predict_step over data"),
    "train-tokenizer": _Command("data.tokenizer", "a sentencepiece model from text"),
    "preprocess": _Command("data.preprocess", "JSON lines to the token files that training reads"),
    "merge": _Command("data.merge", "merge several pairs of token files into one"),
    "inspect": _Command("data.inspect", "statistics of token files; a document or sample as text"),
    "demo-data": _Command("data.demo", "a corpus, a tokenizer and token files for a first try"),
    "generate": _Command("inference.generate", "continue a text with a checkpoint"),
    "evaluate": _Command("inference.evaluate", "perplexity, cloze tests and lm-eval's tasks"),
    "convert": _Command("convert", "other programs' models to ours, and back"),
    "verify": _Command("verify", "verify a checkpoint, and show what it holds"),
    "why": _Command("why", "find the rank that hung or died first, and its last action"),
    "doctor": _Command("doctor.command", "check that the installed software fits together"),
    "ops": _Command("ops", "the implementation of each op on a device, and why"),
    "recipes": _Command("recipes.command", "the recipes that `--recipe NAME` knows"),
    "launch": _Command("launch.command", "start a recipe under Slurm, Kubernetes, torchrun or mpirun"),
    "plan": _Command("plan.command", "find layouts that fit into memory, and predict their speed"),
    "rehearse": _Command("trials.rehearse", "memory and traffic of ranks of a job, without devices"),
    "parity": _Command("trials.parity", "compare a training in two layouts, number by number"),
    "from-megatron-args": _Command("from_megatron.command", "translate a command line of Megatron into a recipe"),
    "schedule": _Command("schedule", "print, price and draw a pipeline schedule"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``lightning-megatron``; ``None`` for those of this process.

    Returns:
        The exit status: 0, 1 for a failure, 2 for arguments that cannot work, 141 if the output's reader has gone.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in _COMMANDS:
        return _run(words, is_own_process=argv is None)
    if name in ("", "-h", "--help"):
        print(_help(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name == "--version":
        print(f"lightning-megatron {version('lightning-megatron')}")
        return 0
    from difflib import get_close_matches

    near = ", ".join(get_close_matches(name, _COMMANDS) or _COMMANDS)
    print(f"error: {name!r} is not a command; nearest: {near}", file=sys.stderr)
    return 2


def _run(words: list[str], *, is_own_process: bool) -> int:
    """Run the command that the first word names, and give its exit status."""
    command = _COMMANDS[words[0]]
    with _collecting_later(is_own_process=is_own_process):
        function = command.function(words[0])
    # LightningCLI starts the other processes of a job with the words of this process; None tells it to use them.
    arguments = words if command.module == _TRAINER else words[1:]
    try:
        status: int = function(None if is_own_process and arguments is words else arguments)
        sys.stdout.flush()
        if is_own_process and command.module != _TRAINER:
            gc.freeze()  # the remaining objects are ours: no need to scan them at exit
    except BrokenPipeError:  # ``| head`` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        return 128 + signal.SIGPIPE
    except SystemExit as leave:  # a parser has printed its help or an error
        return leave.code if isinstance(leave.code, int) else 2
    return status


@contextmanager
def _collecting_later(*, is_own_process: bool) -> Iterator[None]:
    """Exclude the objects that imports create, which live to the end, from garbage collection.

    Scanning those of torch and Lightning takes seconds, most of them at the end of the process.

    Args:
        is_own_process: True if the process runs this command alone; otherwise nothing changes.
    """
    if not is_own_process or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _help() -> str:
    listed = "\n".join(f"  {name:<19}{command.purpose}" for name, command in _COMMANDS.items())
    return (
        "usage: lightning-megatron COMMAND ...\n\n"
        "Train large transformers with Megatron's parallelism from an ordinary Lightning Trainer.\n\n"
        f"commands:\n{listed}\n\n"
        "lightning-megatron COMMAND --help tells more; --version prints the version."
    )


if __name__ == "__main__":
    sys.exit(main())
