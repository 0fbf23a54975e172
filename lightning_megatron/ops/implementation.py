"""An op, the versions there are of it, and which of them is taken on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from lightning_megatron.errors import ConfigError, Problem

Function = Callable[..., Any]
WISHES = ("auto", "require", "off")
"""The best version there is; a kernel of the device's own, or nothing; the reference. An op's variants come on top."""

REFERENCE = "reference"


def always() -> None:
    """What a version that nothing is missing for says."""


@dataclass(frozen=True, eq=False)
class Version:
    """One way to compute an op.

    Attributes:
        name: as its makers call it.
        device: type of the device whose own it is; ``None`` for one that every device can run.
        bind: gives the function. What belongs to a vendor is imported here, and nowhere before.
        missing: says why the software of the device lacks it; ``None`` if it is there.
        refuses: says of a call's arguments what this version cannot do with them; ``None`` if it can.
        variant: the wish that it is taken for, and for no other; ``None`` for a version that is taken unasked.
    """

    name: str
    device: str | None
    bind: Callable[[], Function]
    missing: Callable[[], str | None] = always
    refuses: Callable[..., str | None] | None = None
    variant: str | None = None


class Candidate(NamedTuple):
    """A version that a device could have, and why it does not."""

    version: Version
    reason: str | None


class Fallback:
    """A version that cannot do everything: calls beyond it go to the next one, and the first of each kind is noted.

    Args:
        op: name of the op.
        wish: under ``"require"`` such a call is an error.
        function: of the version.
        refuses: see :class:`Version`.
        otherwise: the next version's function.
        other: its name.
        noted: filled with what was refused, and who did it instead.
    """

    def __init__(
        self,
        op: str,
        wish: str,
        function: Function,
        refuses: Callable[..., str | None],
        otherwise: Function,
        other: str,
        noted: dict[str, str],
    ) -> None:
        self._op, self._wish = op, wish
        self._function, self._refuses, self._otherwise = function, refuses, otherwise
        self._other, self._noted = other, noted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op, whoever does it."""
        reason = self._refuses(*args, **kwargs)
        if reason is None:
            return self._function(*args, **kwargs)
        if self._wish == "require":
            raise ConfigError([_cannot_require(self._op, reason)])
        self._noted.setdefault(reason, self._other)
        return self._otherwise(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Choice:
    """The version of an op that one module uses. A module keeps it as an attribute, where the report finds it.

    Attributes:
        op: name of the op.
        version: name of the version.
        why: the reason, in words.
        run: the function.
        fallbacks: calls that the version could not do: why, and which version did.
    """

    op: str
    version: str
    why: str
    run: Function
    fallbacks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Op:
    """One op.

    Attributes:
        name: as users switch it.
        run: computes it by the best version for the device of its first argument.
        reference: states in plain torch what all versions mean.
        versions: the best first.
        default: what happens where nobody wishes anything.
    """

    name: str
    run: Function
    reference: Function
    versions: tuple[Version, ...]
    default: str = "auto"

    @property
    def variants(self) -> tuple[str, ...]:
        """Versions that are taken where they are asked for alone."""
        return tuple(dict.fromkeys(version.variant for version in self.versions if version.variant is not None))

    @property
    def wishes(self) -> tuple[str, ...]:
        """What can be wished of it."""
        return (*WISHES, *self.variants)

    def candidates(self, device: str, wish: str = "auto") -> list[Candidate]:
        """The versions for a type of device, the best first; the reference is always there after them."""
        able = [version for version in self.versions if version.device in (device, None)]
        asked = [version for version in able if version.variant == wish]
        return [Candidate(v, v.missing()) for v in (*asked, *(v for v in able if v.variant is None))]

    def problem(self, device: str, wish: str, unless: str | None = None) -> Problem | None:
        """Why a kernel of the device's own is required in vain; ``None`` if it is not."""
        if wish != "require":
            return None
        own = [candidate for candidate in self.candidates(device) if candidate.version.device == device]
        if not own:
            return _cannot_require(self.name, f"there is no version of it for {device}")
        if all(reason for _, reason in own):
            return _cannot_require(self.name, f"{device}: " + "; ".join(f"{v.name}: {reason}" for v, reason in own))
        return None if unless is None else _cannot_require(self.name, unless)

    def choose(self, device: str, wish: str | None = None, unless: str | None = None) -> Choice:
        """The version for a module.

        Args:
            device: type of device.
            wish: of the user, one of ``wishes``; ``None`` for none. A variant that the device has not is as ``"auto"``.
            unless: why this module cannot use a kernel of the device's own, if it cannot.

        Raises:
            ConfigError: where one is required and there is none.
        """
        wish = wish or self.default
        if wish == "off":
            return Choice(self.name, REFERENCE, "switched off", self.reference)
        problem = self.problem(device, wish, unless)
        if problem is not None:
            raise ConfigError([problem])
        usable, reasons = [], []
        for version, reason in self.candidates(device, wish):
            reason = reason or (unless if version.device == device else None)
            if reason is None:
                usable.append(version)
            else:
                reasons.append(f"{version.name}: {reason}")
        noted: dict[str, str] = {}
        function, name = self.reference, REFERENCE
        for version in reversed(usable):
            bound = version.bind()
            if version.refuses is not None:
                bound = Fallback(self.name, wish, bound, version.refuses, function, name, noted)
            function, name = bound, version.name
        default = f"the best there is for {device}" if usable else f"there is nothing else for {device}"
        return Choice(self.name, name, "; ".join(reasons) or default, function, noted)

    def on(self, device: str) -> Function:
        """The best version for a type of device."""
        return _best(self, device)


@cache
def _best(op: Op, device: str) -> Function:
    return op.choose(device, "auto").run


def _cannot_require(op: str, reason: str) -> Problem:
    return Problem("ops", f"{op}=require", reason, (f"{op}=auto", f"{op}=off"))
