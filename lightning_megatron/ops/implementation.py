"""Implementations of an op, and the selection of one for a device and a mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

from lightning_megatron.errors import ConfigError, Problem

T = TypeVar("T")
Function = Callable[..., Any]
MODES = ("auto", "require", "off")
"""Best available implementation; one made for the device, or an error; the reference. An op may have variants too."""

REFERENCE = "reference"


def available() -> None:
    """Availability check of an implementation that needs no extra software; returns ``None``."""


@dataclass(frozen=True, eq=False)
class Implementation(Generic[T]):
    """One implementation of an op.

    Attributes:
        name: name that the implementation's authors use.
        device: type of the device that it is made for; ``None`` if it runs on every device.
        bind: function that returns the implementation. It imports the vendor's modules, which nothing imports earlier.
        missing: function that returns the reason why the device's software lacks this implementation, or ``None``.
        unsupported: function of a call's arguments that returns the reason why this implementation does not support
            them, or ``None``.
        variant: the mode that selects it; ``None`` for an implementation that ``"auto"`` selects.
        recomputes: True if its backward itself recomputes intermediate results of the forward, so that activation
            recomputation around it would only repeat the forward.
    """

    name: str
    device: str | None
    bind: Callable[[], T]
    missing: Callable[[], str | None] = available
    unsupported: Callable[..., str | None] | None = None
    variant: str | None = None
    recomputes: bool = False


@dataclass(frozen=True, eq=False)
class OpChoice(Generic[T]):
    """The implementation of an op that one module uses. Modules keep it in an attribute, for the op report.

    Attributes:
        op: name of the op.
        implementation: name of the implementation.
        why: reason, in words.
        run: the implementation; a function runs further implementations for calls that it does not support.
        fallbacks: reasons why single calls were not supported, and the implementation that computed them instead.
        candidates: ``unsupported`` and ``recomputes`` of the implementations that ``run`` tries, in order.
    """

    op: str
    implementation: str
    why: str
    run: T
    fallbacks: dict[str, str] = field(default_factory=dict, kw_only=True)
    candidates: tuple[tuple[Callable[..., str | None] | None, bool], ...] = field(default=(), kw_only=True)

    def recomputes(self, *args: Any, **kwargs: Any) -> bool:
        """True if the implementation that a call with these arguments runs has ``recomputes`` set."""
        for unsupported, recomputes in self.candidates:
            if unsupported is None or unsupported(*args, **kwargs) is None:
                return recomputes
        return False


@dataclass(frozen=True, eq=False, kw_only=True)
class Fallback:
    """An implementation that does not support every call; the next implementation runs the unsupported ones.

    Attributes:
        op: name of the op.
        mode: the user's mode. With ``"require"`` an unsupported call is an error.
        preferred: the implementation's function.
        unsupported: function that returns the reason why ``preferred`` does not support a call, or ``None``.
        otherwise: function of the next implementation.
        otherwise_name: name of the next implementation.
        noted: filled with the reason of each fallback, and the name of the implementation that was used.
    """

    op: str
    mode: str
    preferred: Function
    unsupported: Callable[..., str | None]
    otherwise: Function
    otherwise_name: str
    noted: dict[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op by the preferred implementation, or by the next one."""
        reason = self.unsupported(*args, **kwargs)
        if reason is None:
            return self.preferred(*args, **kwargs)
        if self.mode == "require":
            raise ConfigError([_cannot_require(self.op, reason)])
        result = self.otherwise(*args, **kwargs)
        # After the call, so that the innermost fallback for the same reason records the implementation that ran.
        self.noted.setdefault(reason, self.otherwise_name)
        return result


@dataclass(frozen=True, eq=False)
class Op(Generic[T]):
    """A named set of implementations, from which users select by mode.

    Attributes:
        name: name in the user's ``ops=``.
        implementations: all implementations, the best first.
        reference: implementation in plain torch, which defines the result of every other one.
        run: function of tensors that computes the op by the best implementation for the device of its first argument;
            ``None`` if the implementations are no functions of tensors.
        default: mode if the user gives none.
    """

    name: str
    implementations: tuple[Implementation[T], ...]
    reference: T = field(kw_only=True)
    run: T | None = field(default=None, kw_only=True)
    default: str = field(default="auto", kw_only=True)

    @property
    def variants(self) -> tuple[str, ...]:
        """Modes that select an implementation which ``"auto"`` does not."""
        return tuple(dict.fromkeys(each.variant for each in self.implementations if each.variant is not None))

    @property
    def modes(self) -> tuple[str, ...]:
        """All modes."""
        return (*MODES, *self.variants)

    def candidates(self, device: str, mode: str = "auto") -> list[tuple[Implementation[T], str | None]]:
        """Implementations for a type of device, the best first, each with the reason why it is not available there."""
        able = [each for each in self.implementations if each.device in (device, None)]
        asked = [each for each in able if each.variant == mode]
        return [(each, each.missing()) for each in (*asked, *(e for e in able if e.variant is None))]

    def problem(self, device: str, mode: str, unless: str | None = None) -> Problem | None:
        """The reason why ``mode="require"`` cannot be satisfied; ``None`` if it can, and for other modes."""
        if mode != "require":
            return None
        own = [(each, reason) for each, reason in self.candidates(device) if each.device == device]
        if not own:
            return _cannot_require(self.name, f"there is no implementation of it for {device}")
        if all(reason for _, reason in own):
            reasons = "; ".join(f"{each.name}: {reason}" for each, reason in own)
            return _cannot_require(self.name, f"{device}: {reasons}")
        return None if unless is None else _cannot_require(self.name, unless)

    def usable(
        self, device: str, mode: str | None = None, unless: str | None = None
    ) -> tuple[list[Implementation[T]], str]:
        """Implementations that one module can use, the best first, and the reason why better ones are not among them.

        Args:
            device: type of device.
            mode: the user's mode, one of ``modes``; ``None`` for the default. A variant that the device lacks counts as
                ``"auto"``.
            unless: reason why this module cannot use an implementation made for the device, if there is one.

        Raises:
            ConfigError: if one is required and none is usable.
        """
        mode = mode or self.default
        if mode == "off":
            return [], "switched off"
        problem = self.problem(device, mode, unless)
        if problem is not None:
            raise ConfigError([problem])
        found: list[Implementation[T]] = []
        reasons = []
        for each, missing in self.candidates(device, mode):
            reason = missing or (unless if each.device == device else None)
            if reason is None:
                found.append(each)
            else:
                reasons.append(f"{each.name}: {reason}")
        default = f"the best there is for {device}" if found else f"there is nothing else for {device}"
        return found, "; ".join(reasons) or default

    def choose(self, device: str, mode: str | None = None, unless: str | None = None) -> OpChoice[T]:
        """The implementation for one module; arguments and errors as in :meth:`usable`."""
        usable, why = self.usable(device, mode, unless)
        noted: dict[str, str] = {}
        candidates = tuple((each.unsupported, each.recomputes) for each in usable)
        run: Any = self.reference
        name = REFERENCE
        for each in reversed(usable):
            function: Any = each.bind()
            if each.unsupported is not None:
                function = Fallback(
                    op=self.name,
                    mode=mode or self.default,
                    preferred=function,
                    unsupported=each.unsupported,
                    otherwise=run,
                    otherwise_name=name,
                    noted=noted,
                )
            run, name = function, each.name
        return OpChoice(self.name, name, why, run, fallbacks=noted, candidates=candidates)

    def on(self, device: str) -> T:
        """The best implementation for a type of device."""
        return _best(self, device)


@cache
def _best(op: Op[T], device: str) -> T:
    return op.choose(device, "auto").run


def _cannot_require(op: str, reason: str) -> Problem:
    return Problem("ops", f"{op}=require", reason, (f"{op}=auto", f"{op}=off"))
