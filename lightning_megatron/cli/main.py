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
from typing import NamedTuple


class _Command(NamedTuple):
    """Module, function and purpose of a command."""

    module: str
    function: str
    purpose: str


_TRAINER = "lightning_megatron.cli.trainer"
_COMMANDS = {
    "fit": _Command(_TRAINER, "trainer_command", "train, from a YAML recipe or arguments"),
    "validate": _Command(_TRAINER, "trainer_command", "one pass over the validation data"),
    "test": _Command(_TRAINER, "trainer_command", "one pass over the test data"),
    "predict": _Command(_TRAINER, "trainer_command", "run predict_step over data"),
    "train-tokenizer": _Command(
        "lightning_megatron.cli.data.tokenizer", "train_tokenizer_command", "a sentencepiece model from text"
    ),
    "preprocess": _Command(
        "lightning_megatron.cli.data.preprocess",
        "preprocess_command",
        "JSON lines to the token files that training reads",
    ),
    "merge": _Command("lightning_megatron.cli.data.merge", "merge_command", "several pairs of token files as one"),
    "inspect": _Command(
        "lightning_megatron.cli.data.inspect",
        "inspect_command",
        "statistics of token files; a document or sample as text",
    ),
    "demo-data": _Command(
        "lightning_megatron.cli.data.demo", "demo_data_command", "a corpus, a tokenizer and token files for a first try"
    ),
    "generate": _Command(
        "lightning_megatron.cli.inference.generate", "generate_command", "continue a text with a checkpoint"
    ),
    "evaluate": _Command(
        "lightning_megatron.cli.inference.evaluate", "evaluate_command", "perplexity, cloze tests and lm-eval's tasks"
    ),
    "convert": _Command(
        "lightning_megatron.cli.convert", "convert_command", "other programs' models to ours, and back"
    ),
    "verify": _Command(
        "lightning_megatron.cli.verify", "verify_command", "is a checkpoint whole, and what was written?"
    ),
    "why": _Command("lightning_megatron.cli.why", "why_command", "which rank hung or died first, and in what?"),
    "doctor": _Command(
        "lightning_megatron.cli.doctor.command", "doctor_command", "does what is installed here fit together?"
    ),
    "ops": _Command("lightning_megatron.cli.ops", "ops_command", "the implementation of each op on a device, and why"),
    "recipes": _Command(
        "lightning_megatron.cli.recipes.command", "recipes_command", "the recipes that `--recipe NAME` knows"
    ),
    "launch": _Command(
        "lightning_megatron.cli.launch.command",
        "launch_command",
        "a recipe by Slurm, Kubernetes, torchrun, mpirun",
    ),
    "plan": _Command("lightning_megatron.cli.plan.command", "plan_command", "the layout that fits, and how fast it is"),
    "rehearse": _Command(
        "lightning_megatron.cli.trials.rehearse",
        "rehearse_command",
        "memory and traffic of ranks of a job, without devices",
    ),
    "parity": _Command(
        "lightning_megatron.cli.trials.parity", "parity_command", "two layouts side by side: where do the numbers part?"
    ),
    "from-megatron-args": _Command(
        "lightning_megatron.cli.from_megatron.command",
        "from_megatron_command",
        "the recipe that a command line of Megatron stands for",
    ),
    "schedule": _Command(
        "lightning_megatron.cli.schedule", "schedule_command", "print, price and draw a pipeline schedule"
    ),
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
    if name in ("", "-h", "--help"):
        print(_help(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name == "--version":
        print(f"lightning-megatron {version('lightning-megatron')}")
        return 0
    if name not in _COMMANDS:
        from difflib import get_close_matches

        near = ", ".join(get_close_matches(name, _COMMANDS) or _COMMANDS)
        print(f"error: {name!r} is not a command; nearest: {near}", file=sys.stderr)
        return 2
    command = _COMMANDS[name]
    with _collecting_later(is_own_process=argv is None):
        function = getattr(import_module(command.module), command.function)
    # LightningCLI starts the other processes of a job with the words of this process; None tells it to use them.
    arguments = words if command.module == _TRAINER else words[1:]
    try:
        status: int = function(None if argv is None and arguments is words else arguments)
        sys.stdout.flush()
        if argv is None and command.module != _TRAINER:
            gc.freeze()  # what is left is ours, and needs no looking through at the end of the process
    except BrokenPipeError:  # ``| head`` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        return 128 + signal.SIGPIPE
    except SystemExit as leave:  # a parser has printed its help or an error
        return leave.code if isinstance(leave.code, int) else 2
    return status


@contextmanager
def _collecting_later(*, is_own_process: bool) -> Iterator[None]:
    """Leave the objects that imports make, which live to the end, out of garbage collection.

    Looking through those of torch and Lightning takes seconds, most of them at the end of the process.

    Args:
        is_own_process: True if nobody else's objects are there; otherwise nothing changes.
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
    listed = "\n".join(f"  {name:<17}{command.purpose}" for name, command in _COMMANDS.items())
    return (
        "usage: lightning-megatron COMMAND ...\n\n"
        "Train large transformers with Megatron's parallelism from an ordinary Lightning Trainer.\n\n"
        f"commands:\n{listed}\n\n"
        "lightning-megatron COMMAND --help tells more; --version prints the version."
    )


if __name__ == "__main__":
    sys.exit(main())
