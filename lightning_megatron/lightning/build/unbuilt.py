"""Models with names, modes, dtypes and ``requires_grad`` but no memory yet; changes are applied once they are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron import device as devices
from lightning_megatron.errors import ConfigError, Problem, raise_if_any

_ADVICE = "call module.configure_model() first, or do it in your configure_model after super().configure_model()"
_FACTS = {
    "__get__",
    "__set__",  # checked further
    "__hash__",
    "__len__",
    "__repr__",
    "_has_compatible_shallow_copy_type",  # torch asks it when it casts a module
    "detach",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "requires_grad_",
    "size",
    "stride",
}
_CASTS = {"bfloat16", "double", "float", "half", "to", "type", devices.CPU.type, devices.CUDA.type, devices.HPU.type}


class Unbuilt(Tensor):
    """Parameter or buffer of a model that is not built yet: has metadata, and refuses functions that need values."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of metadata; reduce a cast to its change of dtype.

        Raises:
            ConfigError: for a function that needs values.
        """
        name = getattr(func, "__name__", str(func))
        if name in _CASTS:
            like = func(torch.empty(0, dtype=args[0].dtype, device="cpu"), *args[1:], **(kwargs or {}))
            if not isinstance(like, Tensor):
                return like  # the name of the type
            func, args, kwargs = Tensor.to, (args[0], like.dtype), None
        elif name not in _FACTS or (name == "__set__" and _has_values(args[1])):
            reason = f"needs values, and the model is not built yet: {_ADVICE}"
            raise ConfigError([Problem("function of a parameter", name, reason)])
        return super().__torch_function__(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Parameter or buffer of a copy that is not built either."""
        is_param = isinstance(self, nn.Parameter)
        memo[id(self)] = copied = nn.Parameter(self.detach(), self.requires_grad) if is_param else self.detach()
        return copied


def _has_values(given: object) -> bool:
    return isinstance(given, Tensor) and not isinstance(given, Unbuilt)


class Outline:
    """A whole model on the meta device, and the changes that a user makes to it before it is built for a layout."""

    def __init__(self, model: nn.Module) -> None:
        for part in model.modules():
            for name, tensor in _tensors(part, recurse=False):
                if type(tensor) is nn.Parameter:  # and no subclass
                    setattr(part, name, nn.Parameter(tensor.detach().as_subclass(Unbuilt), tensor.requires_grad))
                elif type(tensor) is Tensor:
                    setattr(part, name, tensor.as_subclass(Unbuilt))
        self.model = model
        self._structure = _structure(model)
        self._dtypes = {name: tensor.dtype for name, tensor in _tensors(model)}
        self._attributes = {
            name: {key: dict(value) if _are_hooks(key) else value for key, value in vars(part).items()}
            for name, part in model.named_modules()
        }

    def give(self, built: nn.Module, every_dtype: bool) -> None:
        """Apply the changes to a built model, or this rank's part of it; it gets the outline's parameter objects.

        Args:
            built: the model.
            every_dtype: True to apply all dtypes, False to apply only changed ones.

        Raises:
            ConfigError: for changes that cannot be applied.
        """
        now, before = _structure(self.model), self._structure
        changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
        reason = f"was added, replaced or removed before the model is built: {_ADVICE}"
        raise_if_any([Problem("model", name, reason) for name in changed])
        parts = dict(self.model.named_modules())
        for name, part in built.named_modules():
            if (mine := parts.get(name)) is not None:
                self._give_attributes(name, mine, part)
                for leaf, tensor in _tensors(part, recurse=False):
                    was = self._dtypes.get(f"{name}.{leaf}" if name else leaf)
                    if was is not None:
                        _give_tensor(mine, part, leaf, tensor, was, every_dtype)

    def _give_attributes(self, name: str, mine: nn.Module, part: nn.Module) -> None:
        before = self._attributes[name]
        for key, value in vars(mine).items():
            if _are_hooks(key):
                own = dict(vars(part)[key])
                added = {number: hook for number, hook in value.items() if number not in before[key]}
                value.clear()
                value.update(own | added)
                before[key], vars(part)[key] = own, value  # hook handles refer to this dictionary
            elif value is not before.get(key, before):
                if callable(value) and (key.startswith("_") or getattr(value, "__self__", None) is mine):
                    reason = (
                        f"was set before the model is built, and belongs to a part that is replaced then: {_ADVICE}"
                    )
                    raise ConfigError([Problem("model", f"{name}.{key}", reason)])
                setattr(part, key, value)


def _give_tensor(
    mine: nn.Module, part: nn.Module, leaf: str, tensor: Tensor, was: torch.dtype, every_dtype: bool
) -> None:
    unbuilt = getattr(mine, leaf)
    if every_dtype or unbuilt.dtype != was:
        tensor.data = tensor.data.to(unbuilt.dtype)
    if isinstance(tensor, nn.Parameter):
        tensor.requires_grad_(unbuilt.requires_grad)
        if type(tensor) is nn.Parameter and isinstance(unbuilt, Unbuilt):
            torch.utils.swap_tensors(unbuilt, tensor)  # optimizers that hold the parameter stay valid
            setattr(part, leaf, unbuilt)
            setattr(mine, leaf, tensor)


def _tensors(model: nn.Module, recurse: bool = True) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(recurse=recurse), *model.named_buffers(recurse=recurse)]


def _structure(model: nn.Module) -> dict[str, Any]:
    parts: dict[str, Any] = dict(model.named_modules())
    return parts | {name: isinstance(tensor, Unbuilt) for name, tensor in _tensors(model)}


def _are_hooks(attribute: str) -> bool:
    return attribute.endswith("_hooks")
