"""Write docs/api.md, the public names and their signatures: ``python docs/api.py``; a test holds that it is up to date.

So a change of a name, an argument or a default shows as a line of a diff, and is made on purpose. New names are added
to docs/names.yaml, from which none is taken away: one that is public no more must be among the deprecated ones.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

import lightning_megatron
from lightning_megatron.tools.cli import main as cli

PAGE = Path(__file__).parent / "api.md"
KEPT = Path(__file__).parent / "names.yaml"
HEAD_OF_KEPT = """\
# Names that are or were public, by module. `python docs/api.py` adds new ones. A name that goes becomes an entry of
# lightning_megatron/deprecation.py first, and leaves this file by hand with the version that drops it.
"""
NAMES = {
    "lightning_megatron": (),
    "lightning_megatron.data": (),
    "lightning_megatron.checkpoint": ("CheckpointError", "Fault", "newest_good", "verify"),
    "lightning_megatron.models.generate": ("generate",),
    "lightning_megatron.ops.fp8": ("Fp8Recipe",),
    "lightning_megatron.recompute": ("recomputed",),
}
"""Public names of each module: the names that documents use; with none given, all of its ``__all__``."""
HEAD = """\
<!-- made from the code by `python docs/api.py` -->
# The public names

What a program may import, with its arguments, their types and defaults; the fields of `TransformerConfig` are its
arguments. Of a class that extends another, only what it adds is listed. Nothing here changes by accident: a test
compares this page with the code.
"""


def public_names() -> dict[str, list[str]]:
    """Public names of each module."""
    return {module: sorted(names or import_module(module).__all__) for module, names in NAMES.items()}


def kept_names() -> dict[str, list[str]]:
    """Entries of docs/names.yaml."""
    found: dict[str, list[str]] = yaml.safe_load(KEPT.read_text()) if KEPT.exists() else {}
    return found


def names_page() -> str:
    """docs/names.yaml as it must be: what it has, and new names."""
    kept, now = kept_names(), public_names()
    every = {module: sorted({*kept.get(module, ()), *now.get(module, ())}) for module in dict.fromkeys([*now, *kept])}
    return HEAD_OF_KEPT + yaml.safe_dump(every, sort_keys=False)


def page() -> str:
    """docs/api.md as it must be."""
    parts = [HEAD]
    for name, names in public_names().items():
        module = import_module(name)
        texts = [_text(each, getattr(module, each)) for each in names]
        parts.append(f"\n## `{name}`\n\n" + "\n".join(f"```text\n{text}\n```\n" for text in texts))
    parts.append("\n## Commands\n\n`fit`, `validate`, `test` and `predict` take LightningCLI's options.\n\n")
    parts.append("\n".join(f"- `lightning-megatron {name}`: {options}" for name, options in _commands()) + "\n")
    return "".join(parts)


def _text(name: str, thing: Any) -> str:
    if not inspect.isclass(thing):
        return _signature(name, thing) if inspect.isfunction(thing) else f"{name} = {thing}"
    if name != thing.__name__:
        return f"{name} = {thing.__name__}"
    parent = next((base for base in thing.__mro__[1:] if _is_known(base)), object)
    head = f"class {name}" + ("" if parent is object else f"({parent.__name__})")
    is_made = _is_ours(_owner(thing, "__init__")) and not getattr(thing, "_is_protocol", False)
    init = _signature("", thing) if is_made else ""
    return "\n".join([head + (f": {init}" if init else ""), *_members(thing)])


def _is_known(kind: type) -> bool:
    """True for a class of another package, and for a public one of ours."""
    return not _is_ours(kind) or hasattr(lightning_megatron, kind.__name__)


def _members(kind: type) -> Iterator[str]:
    for name in sorted({name for base in kind.__mro__ if _is_ours(base) for name in vars(base)}):
        first = [base for base in kind.__mro__ if name in vars(base)][-1]
        if name.startswith("_") or (first is not kind and _is_known(first)):
            continue
        member = inspect.getattr_static(kind, name)
        if isinstance(member, classmethod | staticmethod):
            yield f"    {_signature(name, getattr(kind, name))}"
        elif inspect.isfunction(member):
            yield f"    {_signature(name, member)}"
        elif isinstance(member, property):
            returned = inspect.signature(member.fget).return_annotation  # type: ignore[arg-type]
            yield f"    {name}: {returned}"


def _owner(kind: type, name: str) -> type:
    return next(base for base in kind.__mro__ if name in vars(base))


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "lightning_megatron"


def _signature(name: str, thing: Any) -> str:
    """On lines of their own where there are many arguments, so that a diff shows which one has changed."""
    signature = inspect.signature(thing)
    arguments = [_argument(parameter) for parameter in signature.parameters.values()]
    for kind, mark in ((inspect.Parameter.POSITIONAL_ONLY, "/"), (inspect.Parameter.KEYWORD_ONLY, "*")):
        places = [n for n, parameter in enumerate(signature.parameters.values()) if parameter.kind == kind]
        if mark == "/" and places:
            arguments.insert(places[-1] + 1, mark)
        elif places and not any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
            arguments.insert(places[0] + arguments.count("/"), mark)
    returned = signature.return_annotation
    arrow = "" if returned in (inspect.Signature.empty, None, "None") else f" -> {_name(returned)}"
    line = f"{name}({', '.join(arguments)}){arrow}"
    if len(line) <= 100:
        return line
    lines = "".join(f"        {argument},\n" for argument in arguments)
    return f"{name}(\n{lines}    ){arrow}"


def _argument(parameter: inspect.Parameter) -> str:
    text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_name(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = parameter.default
        text += f" = {default.__qualname__ if callable(default) else re.sub(r' at 0x[0-9a-f]+', '', repr(default))}"
    return text


def _name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _commands() -> Iterator[tuple[str, str]]:
    for name, command in cli._COMMANDS.items():
        if command.module == cli._TRAINER:
            yield name, command.purpose
            continue
        said = StringIO()
        with redirect_stdout(said):
            cli.main([name, "--help"])
        options = dict.fromkeys(re.findall(r"--[a-z][\w-]*", said.getvalue()))
        options.pop("--help", None)
        yield name, ", ".join(f"`{option}`" for option in options) or "no options"


if __name__ == "__main__":
    PAGE.write_text(page())
    KEPT.write_text(names_page())
