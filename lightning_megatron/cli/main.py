"""``lightning-megatron``: training through LightningCLI, and a small command for each thing around it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
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
        "lightning_megatron.cli.tokenizer", "train_tokenizer_command", "a sentencepiece model from text"
    ),
    "preprocess": _Command(
        "lightning_megatron.cli.preprocess", "preprocess_command", "JSON lines to the token files that training reads"
    ),
    "generate": _Command("lightning_megatron.cli.generate", "generate_command", "continue a text with a checkpoint"),
    "convert": _Command(
        "lightning_megatron.cli.convert", "convert_command", "other programs' models to ours, and back"
    ),
    "verify": _Command(
        "lightning_megatron.cli.verify", "verify_command", "is a checkpoint whole, and what was written?"
    ),
    "why": _Command("lightning_megatron.cli.why", "why_command", "which rank hung or died first, and in what?"),
    "doctor": _Command("lightning_megatron.cli.doctor", "doctor_command", "does what is installed here fit together?"),
    "ops": _Command("lightning_megatron.cli.ops", "ops_command", "the implementation of each op on a device, and why"),
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
    function = getattr(import_module(command.module), command.function)
    # LightningCLI starts the other processes of a job with the words of this process; None tells it to use them.
    arguments = words if command.module == _TRAINER else words[1:]
    try:
        status: int = function(None if argv is None and arguments is words else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # ``| head`` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        return 128 + signal.SIGPIPE
    except SystemExit as leave:  # a parser has printed its help or an error
        return leave.code if isinstance(leave.code, int) else 2
    return status


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
