"""``lightning-megatron from-megatron-args``: a command line of Megatron translated into a recipe."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.tools.cli.common import command_parser, exit_status
from lightning_megatron.tools.cli.from_megatron.habana import SCRIPTS, habana_line
from lightning_megatron.tools.cli.from_megatron.recipe import Devices, recipe_of
from lightning_megatron.tools.cli.from_megatron.words import CommandLine, read_words

_DESCRIPTION = """Translate a command line of Megatron into a recipe for `lightning-megatron fit`, and print it.

Flags of Megatron-LM, of its fork for Gaudi and of Megatron-DeepSpeed are known.
Flags without a counterpart are named with the reason, in the recipe and on the error output; nothing is left out
silently. Defaults are Megatron's. A line may begin with a launcher and a script: the options of torchrun or deepspeed
give the number of devices.
Exit status: 0 if every flag has a counterpart, 1 if some have none or the recipe has a place to fill in, 2 if the line
is invalid."""

_EXAMPLES = """examples:
  lightning-megatron from-megatron-args 'torchrun ... pretrain_gpt.py ...'
  lightning-megatron from-megatron-args --file command.txt --devices 32 > recipe.yaml
  HL_LLAMA_MODEL_SIZE=70 HL_TP=8 ... lightning-megatron from-megatron-args --env llama '--vocab-size 128256'"""


def from_megatron_args_command(argv: Sequence[str]) -> int:
    """Run ``lightning-megatron from-megatron-args`` with these arguments; returns the exit status."""
    parser = command_parser("from-megatron-args", _DESCRIPTION, _EXAMPLES, brief_errors=True)
    parser.add_argument("line", nargs="?", help="the command line, in quotes")
    parser.add_argument("--file", help="file that holds it instead; - is the standard input")
    scripts = "the line that this script of the fork for Gaudi makes of HL_* variables; `line` is appended to it"
    parser.add_argument("--env", choices=SCRIPTS, help=scripts)
    parser.add_argument("--env-file", help="file of `HL_NAME=value` lines in place of the environment")
    parser.add_argument("--devices", type=int, help="devices of the whole job (default: from the launcher's options)")
    options = parser.parse_args(argv)
    return exit_status(lambda: _translate(options), ConfigError)


def _translate(options: argparse.Namespace) -> int:
    line, devices = _line(options), options.devices
    recipe = recipe_of(line, _devices(line, devices))
    import yaml  # at its use: the help of other commands does not wait for it

    print(_head(line) + yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=120), end="")
    for name, reason in line.without.items():
        print(f"no counterpart: {name}: {reason}", file=sys.stderr)
    for name, reason in line.idle.items():
        print(f"no effect: {name}: {reason}", file=sys.stderr)
    for place, reason in line.to_fill.items():
        print(f"to fill in: {place}: {reason}", file=sys.stderr)
    return 1 if line.without or line.to_fill else 0


def _line(options: argparse.Namespace) -> CommandLine:
    if options.env is None:
        raise_if_any([Problem("--env-file", options.env_file, "needs --env")] if options.env_file else [])
        return read_words(_text(options.line, options.file))
    variables = os.environ if options.env_file is None else _variables(options.env_file)
    made = habana_line(options.env, variables)
    more = "" if options.line is None and options.file is None else _text(options.line, options.file)
    line = read_words(f"{made.text} {more}")
    line.without |= made.without
    return line


def _variables(file: str) -> dict[str, str]:
    """Variables of a file: lines with `export` or without it, and comments."""
    words = shlex.split(_text(None, file), comments=True)
    pairs = (word.partition("=")[::2] for word in words if word.startswith("HL_"))
    return dict(pairs)


def _text(given: str | None, file: str | None) -> str:
    if (given is None) == (file is None):
        raise ConfigError([Problem("line", given, "give the command line, or --file, and not both")])
    if file is None:
        return given or ""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("--file", file, f"cannot be read: {error}")]) from None


def _devices(line: CommandLine, given: int | None) -> Devices:
    on_node, nodes = line.devices
    if given is None:
        if on_node is None:
            reason = "is not known: give it, or a line that begins with torchrun --nproc_per_node N"
            raise ConfigError([Problem("--devices", None, reason)])
        return Devices(on_node, nodes or 1)
    raise_if_any([Problem("--devices", given, "must be at least 1")] if given < 1 else [])
    on_node = on_node or min(given, 8)
    if given % on_node:
        near = (given // on_node * on_node or on_node, -(-given // on_node) * on_node)
        raise ConfigError([Problem("--devices", given, f"is no multiple of the {on_node} devices of a machine", near)])
    return Devices(on_node, given // on_node)


def _head(line: CommandLine) -> str:
    lines = ["# From a command line of Megatron, by `lightning-megatron from-megatron-args`."]
    titles = ("To fill in", line.to_fill), ("Without a counterpart", line.without), ("Without an effect", line.idle)
    for title, entries in titles:
        if entries:
            lines += [f"# {title}:", *(f"#   {name}: {reason}" for name, reason in entries.items())]
    return "\n".join(lines) + "\n"
