"""Configurations of other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_megatron.config import ConfigError, Problem


class Fields:
    """Reads another program's configuration, and collects what we have no counterpart for.

    Args:
        config: the contents of ``config.json``, or whatever else holds it.
        source: what to call it in messages.
    """

    def __init__(self, config: Mapping[str, Any], source: str = "Hugging Face configuration") -> None:
        self._config, self._source = config, source
        self._problems: list[Problem] = []

    def required(self, name: str) -> Any:
        """A field that must be there; 0 where it is not, and the fault noted."""
        if self._config.get(name) is None:
            self._problems.append(Problem(name, None, f"missing in the {self._source}"))
            return 0
        return self._config[name]

    def get(self, name: str, default: Any) -> Any:
        """A field, or what the other program takes where it is left out or null."""
        value = self._config.get(name)
        return default if value is None else value

    def expect(self, name: str, default: Any, allowed: Sequence[Any], reason: str) -> Any:
        """A field of which we know only some values."""
        value = self.get(name, default)
        if value not in allowed:
            self.refuse(name, value, reason, tuple(allowed))
        return value

    def refuse(self, name: str, value: Any, reason: str, allowed: tuple[Any, ...] = ()) -> None:
        """Note a value that we cannot reproduce."""
        self._problems.append(Problem(name, value, reason, allowed))

    def finish(self) -> None:
        """Raise with everything noted.

        Raises:
            ConfigError: if there was anything.
        """
        if self._problems:
            raise ConfigError(self._problems)
