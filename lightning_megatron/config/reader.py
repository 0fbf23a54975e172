"""Reader of other programs' configurations, which collects every fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import Problem, divisors, is_whole, nearest_to, raise_if_any

_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    dict: ((dict,), "a mapping"),
    list: ((list, tuple), "a list"),
}
"""Types that a file may hold in place of a default, and a name for them, by the type of the default."""


class ConfigReader:
    """Reader of another program's configuration that collects every value our model has no counterpart for.

    A value of another type than the other program's own is a fault: a number in quotes is no number. Null is a fault,
    too, unless the other program takes it for its default.

    Args:
        config: the contents of ``config.json``, or of another program's arguments.
        source: words for it in messages.
        nulls: True if null stands for the default everywhere, as it does among the arguments of a command line.
    """

    def __init__(
        self, config: Mapping[str, Any], source: str = "Hugging Face configuration", *, nulls: bool = False
    ) -> None:
        self._config, self._source, self._nulls = config, source, nulls
        self._read: set[str] = set()
        self._problems: list[Problem] = []

    def __getitem__(self, name: str) -> Any:
        """The value of a field, which must exist."""
        self._read.add(name)
        return self._config[name]

    def has(self, name: str) -> bool:
        """True if the field is there, and not null."""
        return self._config.get(name) is not None

    def has_read(self, name: str) -> bool:
        """True if the field has been read."""
        return name in self._read

    def required(self, name: str) -> int:
        """A required whole number; if it is missing, 0, and a fault is recorded."""
        self._read.add(name)
        value = self._config.get(name)
        if value is None:
            self.refuse(name, None, f"missing in the {self._source}")
        elif not is_whole(value, at_least=0):
            self.refuse(name, value, f"must be a whole number in the {self._source}")
        else:
            return int(value)
        return 0

    def get(self, name: str, default: Any, *, null: bool = False) -> Any:
        """A field, or the other program's default if it is left out.

        Args:
            default: the other program's default; the field must be of the same type. ``None`` allows any.
            null: True if null in the file stands for the default too.
        """
        self._read.add(name)
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
        """A field that our model can reproduce only for some values; records a fault for others."""
        value = self.get(name, default, null=null)
        if value not in allowed:
            self.refuse(name, value, reason, tuple(allowed))
        return value

    def refuse(self, name: str, value: Any, reason: str, allowed: tuple[Any, ...] = ()) -> None:
        """Record a value that our model cannot reproduce."""
        self._problems.append(Problem(name, value, reason, allowed))

    def refuse_unread(self, reason: str) -> None:
        """Record every field that has not been read."""
        for name, value in self._config.items():
            if name not in self._read:
                self.refuse(name, value, reason)

    def take_over(self, part: ConfigReader, name: str) -> None:
        """Record the faults of a part of the configuration, under its name."""
        self._problems += [replace(problem, argument=f"{name}.{problem.argument}") for problem in part._problems]

    def finish(self) -> None:
        """Raise an error with every recorded fault.

        Raises:
            ConfigError: if there was any.
        """
        raise_if_any(self._problems)


def refuse_uneven_heads(reader: ConfigReader, model: str) -> None:
    """Refuse a ``hidden_size`` that is no multiple of the heads: ours allows it with ``head_dim``, theirs does not."""
    heads, hidden = reader["num_attention_heads"], reader["hidden_size"]
    if hidden % heads:
        reason = f"{model} takes only divisors of hidden_size={hidden}, even if head_dim is given"
        reader.refuse("num_attention_heads", heads, reason, nearest_to(heads, divisors(hidden)))
