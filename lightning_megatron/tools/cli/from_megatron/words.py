"""Words of a command line of Megatron, read by the table of flags."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_megatron.errors import Problem, nearest_names, raise_if_any
from lightning_megatron.tools.cli.from_megatron.flags import ALWAYS, ONLY, TAKEN, WITHOUT, Flag

_TAKEN: Mapping[str, Flag] = {flag.name: flag for flag in TAKEN}
_LAUNCHERS: Mapping[str, str] = {
    "--nproc_per_node": "processes",
    "--nproc-per-node": "processes",
    "--num_gpus": "processes",
    "--nnodes": "nodes",
    "--num_nodes": "nodes",
}
_HOSTS = ("--hostfile", "--include", "--exclude")
"""Options of deepspeed's launcher that choose machines by a file, so that the line does not give their number."""
_OTHER_SCRIPTS = ("bert", "t5", "ict", "retro", "vision", "vlm", "multimodal", "mamba", "biencoder", "realm", "vit")
_SHELL = re.compile(r"\d?[<>|&;].*")
"""Words with which a shell ends a command or redirects its output."""
_STRAY = "line"
"""Name of the words that belong to no flag."""
_NO_PATTERN = "must be a number, or lists of numbers that are added and repeated"
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


_DEFAULTS = {flag.key: flag.default for flag in reversed(TAKEN) if flag.default is not None}


@dataclass
class CommandLine:
    """A parsed command line.

    Attributes:
        values: values by Megatron's names; those that are not given are missing.
        always: flags for behaviour that is always on here.
        without: flags without a counterpart, with the reason.
        idle: flags that change nothing on this line, with the reason.
        to_fill: places of the recipe that the user must fill in, with the reason.
        written: names of flags as the line has them, by Megatron's names of their values.
        devices: processes on a machine, and machines, if the line begins with a launcher that says so.
    """

    values: dict[str, Any] = field(default_factory=dict)
    always: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    to_fill: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    devices: tuple[int | None, int | None] = (None, None)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an argument, by Megatron's name: the one given, else Megatron's default, else ``default``."""
        return self.values.get(name, _DEFAULTS.get(name, default))

    def flag(self, name: str) -> str:
        """The flag of an argument, given by Megatron's name for it, as the line spells it."""
        return self.written.get(name, "--" + name.replace("_", "-"))


def read_words(text: str) -> CommandLine:
    """Read a command line: flags alone, or a whole line with a launcher and a script.

    Args:
        text: the line, in one or, with backslashes, in several.

    Raises:
        ConfigError: for unexpanded variables of the shell, and invalid values of flags.
    """
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    line, launched = CommandLine(), dict[str, int]()
    problems = _script_problems(words)
    for name, given in _groups(words):
        if unset := [word for word in given if "$" in word]:
            problems.append(Problem(name, unset[0], "is a variable of a shell: let the shell print the line first"))
            continue
        try:
            if of_shell := [word for word in given if _SHELL.fullmatch(word)]:
                raise ValueError(f"{of_shell[0]} is for the shell: leave it out, with all that follows")
            if name in _LAUNCHERS:
                launched[_LAUNCHERS[name]] = _count(given)
            else:
                _read(line, name, given)
        except ValueError as error:
            problems.append(Problem(name, " ".join(given), str(error)))
    raise_if_any(problems)
    if "nodes" in launched or not any(word.partition("=")[0] in _HOSTS for word in words):
        line.devices = launched.get("processes"), launched.get("nodes")
    return line


def _script_problems(words: Sequence[str]) -> list[Problem]:
    """The problem of a script that trains another kind of model, whose flags would be read as a GPT's."""
    script = next((word for word in words if word.endswith(".py")), "")
    folder, _, name = script.rpartition("/")
    parts = re.split("[_.]", name)
    parts += [] if "gpt" in parts else re.split("[/_.]", folder)
    if other := next((kind for kind in _OTHER_SCRIPTS if kind in parts), None):
        reason = f"trains a model of another kind ({other}): lines of pretrain_gpt.py are read"
        return [Problem("script", script, reason)]
    return []


def _count(given: Sequence[str]) -> int:
    if len(given) != 1 or not given[0].isdigit() or int(given[0]) < 1:
        raise ValueError("must be a number of at least 1 here; or leave it out and give --devices")
    return int(given[0])


def _read(line: CommandLine, name: str, given: Sequence[str]) -> None:
    """Add a flag with its values to the line."""
    if name == _STRAY:
        raise ValueError("belongs to no flag")
    if name in _TAKEN:
        flag = _TAKEN[name]
        value, before = _value(flag, given), line.written.get(flag.key, name)
        if before != name and line.values[flag.key] != value:
            raise ValueError(f"is {before} by another name, which says {line.values[flag.key]!r}")
        line.values[flag.key] = value
        line.written[flag.key] = name
    elif name in ALWAYS:
        line.always[name] = ALWAYS[name]
    elif name in ONLY:
        only, reason = ONLY[name]
        if list(given) == [only]:
            line.always[name] = reason
        else:
            line.without[name] = f"{reason}: only {only} is the same here"
    else:
        near = ", ".join(map(str, nearest_names(name, [*_TAKEN, *ALWAYS, *ONLY, *WITHOUT])))
        line.without[name] = WITHOUT.get(name, f"not known here; nearest: {near}")


def _groups(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Flags with their values, and words that belong to none; before the script, only the numbers of devices."""
    script = next((number for number, word in enumerate(words) if word.endswith(".py")), -1)
    found: list[tuple[str, list[str]]] = [(_STRAY if script < 0 else "", [])]
    for number, word in enumerate(words):
        if number == script:
            found.append((_STRAY, []))
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            found.append((name if number > script or name in _LAUNCHERS else "", [value] if equals else []))
        else:
            found[-1][1].append(word)
    return [(name, given) for name, given in found if name and (given or name != _STRAY)]


def _value(flag: Flag, given: Sequence[str]) -> Any:
    if flag.kind in ("switch", "off"):
        if given:
            raise ValueError("takes no value")
        return flag.kind == "switch"
    if flag.kind == "list":
        return list(given)
    if not given:
        raise ValueError("needs a value")
    if flag.kind == "pattern":
        return _pattern_of("".join(given))
    if len(given) > 1:
        raise ValueError("takes one value")
    if flag.kind == "bool":
        if given[0].lower() not in _TRUTH:
            raise ValueError("must be true or false")
        return _TRUTH[given[0].lower()]
    kinds = {"int": int, "float": float, "str": str}
    try:
        return kinds[flag.kind](given[0])
    except ValueError:
        raise ValueError("must be a whole number" if flag.kind == "int" else "must be a number") from None


def _pattern_of(text: str) -> Any:
    """A number, or lists of numbers that are added and repeated, such as ``([0]*1+[1]*2)*4``."""
    try:
        return _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ValueError(_NO_PATTERN) from None


def _pattern(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_pattern(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _pattern(node.left), _pattern(node.right)
        joins = type(left) is type(right) is list and isinstance(node.op, ast.Add)
        repeats = {type(left), type(right)} == {list, int} and isinstance(node.op, ast.Mult)
        if joins or (repeats and max(x for x in (left, right) if isinstance(x, int)) <= 1000):
            return left + right if joins else left * right
    raise ValueError(_NO_PATTERN)
