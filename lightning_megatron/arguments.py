"""Checks of arguments by their annotations and by rules that are data, before the arguments are used."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, ParamSpec, Union, get_args, get_origin, get_type_hints

from lightning_megatron.errors import Problem, nearest_names, raise_if_any

P = ParamSpec("P")


class Rule(NamedTuple):
    """Bounds of a value in addition to its type; for numbers, times and lists.

    Attributes:
        text: bounds in words, which follow the type in errors: ``"of at least 1"`` after ``"a whole number"``.
        holds: function that returns True for a value in bounds.
        nearest: values in bounds.
    """

    text: str
    holds: Callable[[Any], bool]
    nearest: tuple[object, ...] = ()


class OneOf(NamedTuple):
    """Allowed values of a text."""

    known: Collection[str]


class Check(NamedTuple):
    """A function that returns the faults of a value of the right type, for checks that are no bounds."""

    problems: Callable[[Any], list[Problem]]


AnyRule = Rule | OneOf | Check
Rules = Mapping[str, AnyRule]


def at_least(least: float) -> Rule:
    """Values from ``least`` on."""
    return Rule(f"of at least {least}", lambda value: value >= least, (least,))


def above(low: Any, *nearest: object) -> Rule:
    """Values above ``low``."""
    return Rule(f"above {low}", lambda value: value > low, nearest)


def within(least: float, end: float) -> Rule:
    """Values from ``least`` on, below ``end``."""
    return Rule(f"of at least {least} and less than {end}", lambda value: least <= value < end)


def argument_problems(
    values: Mapping[str, object], hints: Mapping[str, Any], rules: Rules, defaults: Mapping[str, object]
) -> list[Problem]:
    """Faults of single values.

    Args:
        values: values by name.
        hints: types by name; a value without one may have any type.
        rules: rules by name.
        defaults: default values by name.
    """
    found = []
    for name, value in values.items():
        hint, rule = hints.get(name, Any), rules.get(name)
        fits = _fits(value, hint)
        if fits and isinstance(rule, Check):
            found += rule.problems(value)
        if fits and _keeps(value, rule):
            continue
        words = rule.known if isinstance(rule, OneOf) else [word for word in _literals(hint) if isinstance(word, str)]
        if isinstance(value, str) and words:
            found.append(Problem(name, value, "unknown", nearest_names(value, list(words))))
            continue
        near = dict.fromkeys((type(near), near) for near in _near(value, hint, rule, defaults.get(name, MISSING)))
        found.append(Problem(name, value, f"must be {_wanted(hint, rule)}", tuple(near for _, near in near)))
    return found


def field_problems(instance: Any, rules: Rules, leave: Collection[str] = ()) -> list[Problem]:
    """Faults of single fields of a dataclass.

    Args:
        instance: the dataclass.
        rules: rules by name of the field.
        leave: fields that other code checks.
    """
    known = [field for field in fields(instance) if field.init and field.name not in leave]
    values = {field.name: getattr(instance, field.name) for field in known}
    defaults = {field.name: field.default for field in known}
    owner: Any = type(instance)
    return argument_problems(values, _hints_of(owner), rules, defaults)


@cache
def _hints_of(annotated: Any) -> Mapping[str, Any]:
    """Annotations of a class or function by name; cached, since evaluating them is slow."""
    return get_type_hints(annotated)


def checked(
    elsewhere: Mapping[str, str] | None = None, **rules: AnyRule
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate an ``__init__`` with checks of all its arguments before it runs.

    Args:
        elsewhere: our argument names, by the names that other programs use.
        **rules: rules by argument, in addition to annotations.

    Returns:
        A decorator. The new ``__init__`` raises a ``ConfigError`` with every argument that is unknown, missing, of
        another type than its annotation, or against its rule.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(init)

        @wraps(init)
        def checking(*args: P.args, **kwargs: P.kwargs) -> None:
            hints = _hints_of(init)
            defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}
            owner = init.__qualname__.split(".")[0]
            unknown = list(_unknown(signature, kwargs, owner, elsewhere or {}))
            known = {n: v for n, v in kwargs.items() if n not in {p.argument for p in unknown}}
            bound = signature.bind_partial(*args, **known)
            missing = [n for n, p in signature.parameters.items() if p.default is p.empty and n not in bound.arguments]
            missing = [n for n in missing if signature.parameters[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
            unknown += [Problem(name, None, f"{owner} needs it") for name in missing]
            raise_if_any(unknown + argument_problems(_single(bound), hints, rules, defaults))
            init(*args, **kwargs)

        return checking

    return decorate


def _unknown(
    signature: inspect.Signature, given: Mapping[str, object], owner: str, elsewhere: Mapping[str, str]
) -> Iterator[Problem]:
    takes = signature.parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values()):
        return
    names = list(takes)[1:]
    for name, value in given.items():
        if name not in takes:
            yield unknown_name(name, value, f"argument of {owner}", names, elsewhere)


def unknown_name(
    name: str, value: object, what: str, known: Sequence[str], elsewhere: Mapping[str, str] | None = None
) -> Problem:
    """The :class:`Problem` for an unknown name.

    Args:
        name: name that the user gave.
        value: value that the user gave.
        what: kind of name, such as "argument of MegatronStrategy".
        known: known names.
        elsewhere: our names, or advice, by the names that other programs use.
    """
    ours = (elsewhere or {}).get(name)
    if ours is not None and ours not in known:
        return Problem(name, value, f"no such {what}: {ours}")
    return Problem(name, value, f"no such {what}", nearest_names(name, known) if ours is None else (ours,))


def _single(bound: inspect.BoundArguments) -> dict[str, object]:
    """Named arguments, without ``self``, ``*args`` and ``**kwargs``."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = list(bound.arguments.items())[1:]
    return {name: value for name, value in taken if bound.signature.parameters[name].kind not in several}


def _parts(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _literals(hint: Any) -> list[Any]:
    return [word for part in _parts(hint) if get_origin(part) is Literal for word in get_args(part)]


def _fits(value: object, hint: Any) -> bool:
    return any(_fits_one(value, part) for part in _parts(hint))


_PLAIN_FITS: dict[Any, Callable[[Any], bool]] = {
    None: lambda value: value is None,
    NoneType: lambda value: value is None,
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
}


def _fits_one(value: object, hint: Any) -> bool:
    """True if a value has a type that is not a union; an unknown kind of type fits all values."""
    if hint in _PLAIN_FITS:
        return _PLAIN_FITS[hint](value)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in inner)
    kind = origin or hint
    if hint is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if origin is not None and issubclass(kind, Mapping):
        return isinstance(value, Mapping)  # its entries have checks of their own
    if origin is not None and issubclass(kind, Sequence):  # YAML has no tuples: lists pass for them
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    return isinstance(value, kind)


def _keeps(value: object, rule: AnyRule | None) -> bool:
    if isinstance(rule, OneOf):
        return not isinstance(value, str) or value in rule.known
    return not isinstance(rule, Rule) or isinstance(value, str | bool | None) or rule.holds(value)


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "text",
    NoneType: "None",
    None: "None",
}
_NO_RULE = (str, bool, None, NoneType)
"""Types to which no :class:`Rule` applies."""


def _wanted(hint: Any, rule: AnyRule | None) -> str:
    """The types of a value and its rule in words."""
    words = []
    for part in _parts(hint):
        if get_origin(part) is Literal:
            words += [repr(word) for word in get_args(part)]
        else:
            named = _WORDS.get(part) or _kind(get_origin(part) or part)
            words.append(f"{named} {rule.text}" if isinstance(rule, Rule) and part not in _NO_RULE else named)
    return " or ".join(dict.fromkeys(words))


def _kind(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "a mapping"
    if isinstance(kind, type) and issubclass(kind, Sequence):
        return "a list"
    return f"a {getattr(kind, '__name__', kind)}"


def _near(value: object, hint: Any, rule: AnyRule | None, default: object) -> Iterator[object]:
    """Valid values near the given one: derived from it, from the rule, and the default."""
    ruled = list(rule.nearest) if isinstance(rule, Rule) else []
    defaults = [] if default is MISSING else [default]
    for candidate in [*_numbers(value, hint), *(ruled + defaults if _fits(value, hint) else defaults + ruled)]:
        if _fits(candidate, hint) and _keeps(candidate, rule):
            yield candidate


def _numbers(value: object, hint: Any) -> Iterable[object]:
    """Numbers that the user may have meant."""
    if isinstance(value, bool) or not isinstance(value, str | float):
        return ()
    try:
        number = float(value)
    except ValueError:
        return ()
    if not math.isfinite(number):
        return ()
    return dict.fromkeys((math.floor(number), math.ceil(number))) if int in _parts(hint) else (number,)
