"""Configurations of other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import ConfigError, Problem, is_whole

_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    dict: ((dict,), "a mapping"),
}
"""By the type of a default: what a file may hold in its place, and what that is called."""


class Fields:
    """Reads another program's configuration, and collects what we have no counterpart for.

    A value of another type than the other program's own is a fault: a number in quotes is no number. So is null, except
    where the other program takes it for its default.

    Args:
        config: the contents of ``config.json``, or whatever else holds it.
        source: what to call it in messages.
        nulls: whether null stands for the default everywhere, as it does among the arguments of a command line.
    """

    def __init__(
        self, config: Mapping[str, Any], source: str = "Hugging Face configuration", *, nulls: bool = False
    ) -> None:
        self._config, self._source, self._nulls = config, source, nulls
        self._problems: list[Problem] = []

    def required(self, name: str) -> int:
        """A whole number that must be there; 0 where it is not, and the fault noted."""
        value = self._config.get(name)
        if value is None:
            self.refuse(name, None, f"missing in the {self._source}")
        elif not is_whole(value, at_least=0):
            self.refuse(name, value, f"must be a whole number in the {self._source}")
        else:
            return int(value)
        return 0

    def get(self, name: str, default: Any, *, null: bool = False) -> Any:
        """A field, or what the other program takes where it is left out.

        Args:
            name: its name.
            default: what is taken; its type is what the field must have. ``None`` takes any.
            null: whether null in the file stands for the default too.
        """
        if name not in self._config:
            return default
        value = self._config[name]
        if value is None and (null or self._nulls or default is None):
            return default
        types, called = _KINDS.get(type(default), ((object,), ""))
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types and called):
            self.refuse(name, value, f"must be {called}")
            return default
        return value

    def expect(self, name: str, default: Any, allowed: Sequence[Any], reason: str, *, null: bool = False) -> Any:
        """A field of which we know only some values."""
        value = self.get(name, default, null=null)
        if value not in allowed:
            self.refuse(name, value, reason, tuple(allowed))
        return value

    def refuse(self, name: str, value: Any, reason: str, allowed: tuple[Any, ...] = ()) -> None:
        """Note a value that we cannot reproduce."""
        self._problems.append(Problem(name, value, reason, allowed))

    def take_over(self, part: Fields, name: str) -> None:
        """Note what is wrong with a part of the configuration, under its name."""
        self._problems += [replace(problem, argument=f"{name}.{problem.argument}") for problem in part._problems]

    def finish(self) -> None:
        """Raise with everything noted.

        Raises:
            ConfigError: if there was anything.
        """
        if self._problems:
            raise ConfigError(self._problems)
