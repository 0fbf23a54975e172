"""Modules that train adapters beside a frozen model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_megatron.adapters.attach import Switch, attach, begin, train_only
from lightning_megatron.adapters.lora import LoRA
from lightning_megatron.adapters.targets import adapted_layers
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, nearest_names, raise_if_any
from lightning_megatron.families import family_for
from lightning_megatron.files import PathLike
from lightning_megatron.lightning.modules.base_module import MegatronModule
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.stages import StagedModel

AdaptersLike = LoRA | Mapping[str, Any] | None
"""An adapter, adapters by name, the fields of either, or none."""

DEFAULT = "default"


class AdaptedModule(MegatronModule):
    """Module whose model may have adapters (:class:`LoRA`), of which one is used at a time, or none.

    With adapters the model's own weights are frozen: they have no gradients, no main values and no optimizer state.

    Attributes:
        lora: adapters by name; empty without any.
        takes_adapters: True if the layers of this model can have adapters.
        base: path and hash of the frozen weights once they are loaded from files; checkpoints then leave them out.
    """

    takes_adapters = False
    config: TransformerConfig
    hf_settings: Mapping[str, Any]
    lora: Mapping[str, LoRA] = {}
    base: Mapping[str, str] | None = None

    _switch = Switch(None)
    _trained: str | None = None
    _is_chosen = False

    def _take_adapters(self, given: AdaptersLike) -> None:
        """Take the adapters that the module is built with, and check them against its configuration.

        Raises:
            ConfigError: naming every argument that is at fault.
        """
        self.lora = _by_name(given)
        if not self.lora:
            return
        if not self.takes_adapters:
            reason = f"{type(self).__name__} has no adapters: they are for decoders"
            raise ConfigError([Problem("lora", list(self.lora), reason, (None,))])
        self._trained = next(iter(self.lora))
        self._switch = Switch(self._trained)
        # Balancing experts by their load would change a frozen weight.
        still = {"moe_expert_bias": self.config.has_expert_bias, "moe_expert_bias_update_rate": 0.0}
        self.config = self.config.replace(**still) if self.config.num_experts else self.config
        for lora in self.lora.values():
            self._plan(lora)

    @property
    def _adapter_arguments(self) -> dict[str, Any]:
        """The argument ``lora`` in plain containers, for hyper-parameters; empty without adapters."""
        return {"lora": {name: lora.plain for name, lora in self.lora.items()}} if self.lora else {}

    def _plan(self, lora: LoRA) -> Any:
        source = getattr(self, "hf_settings", {}).get("config", {}).get("model_type")
        family, _ = family_for(self.config, source)
        return adapted_layers(family, self.config, lora, weight_shapes(self.config))

    def _attach_adapters(self, model: StagedModel, mesh: ParallelMesh) -> None:
        """Attach the adapters to the layers of a new model, and freeze the rest."""
        if not self.lora:
            return
        for name, lora in self.lora.items():
            attach(model, mesh, name, lora, self._plan(lora), self._switch)
        train_only(model, self._trained)
        begin(model)
        if not any(param.requires_grad for param in model.parameters()):
            reason = f"no target is on the pipeline stage of rank {mesh.rank}, which would have nothing to train"
            lora = self.lora[self._trained or DEFAULT]
            raise_if_any([Problem("targets", lora.targets, reason, ("all-linear",))])

    def begin_adapters(self) -> None:
        """Initialize DoRA's magnitudes from the frozen weights, which must be loaded; all ranks call this."""
        for part in self.modules():
            if isinstance(part, StagedModel) and self.lora:
                begin(part)

    @property
    def active_adapter(self) -> str | None:
        """Name of the adapter in use; ``None`` for the model without any."""
        return self._switch.active

    def use_adapter(self, name: str) -> None:
        """Use another adapter from now on, and train it alone. Call this between runs of ``fit``.

        Raises:
            ConfigError: for a name that no adapter has.
        """
        if name not in self.lora:
            reason = "the module has no such adapter"
            raise ConfigError([Problem("name", name, reason, nearest_names(name, list(self.lora)))])
        self._is_chosen = True
        self._use(name)

    @property
    def trained_adapter(self) -> str | None:
        """Name of the adapter that ``fit`` trains; ``None`` without adapters."""
        return self._trained

    def resume_adapter(self, name: str, path: PathLike, *, trains: bool) -> None:
        """Use the adapter that the run of a checkpoint trained, unless :meth:`use_adapter` has chosen another.

        Raises:
            ConfigError: if another is chosen, and this run ``trains``.
        """
        if name not in self.lora or name == self._trained:
            return
        if not self._is_chosen:
            self._use(name)
        elif trains:
            reason = f"{path} has the state of training {name!r}, and a run goes on with that"
            raise ConfigError([Problem("use_adapter", self._trained, reason, (name,))])

    def _use(self, name: str) -> None:
        self._trained = self._switch.active = name
        for part in self.modules():
            if isinstance(part, StagedModel):
                train_only(part, name)

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Compute with the model as it was before training, as the reference model of preference tuning."""
        before, self._switch.active = self._switch.active, None
        try:
            yield
        finally:
            self._switch.active = before


def _by_name(given: AdaptersLike) -> dict[str, LoRA]:
    if given is None:
        return {}
    if isinstance(given, LoRA):
        return {DEFAULT: given}
    fields = set(LoRA.__dataclass_fields__)
    if not isinstance(given, Mapping):
        raise ConfigError([Problem("lora", given, "is neither a LoRA nor a mapping of names to them", (None,))])
    if given and given.keys() <= fields:
        return {DEFAULT: LoRA(**given)}
    problems, found = [], {}
    for name, each in given.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", str(name)):
            problems.append(Problem("lora", name, "is no name of letters, digits, - and _", (DEFAULT,)))
        if isinstance(each, LoRA):
            found[str(name)] = each
        elif isinstance(each, Mapping) and each.keys() <= fields:
            found[str(name)] = LoRA(**each)
        else:
            near = nearest_names(str(name), sorted(fields))
            problems.append(Problem("lora", {name: each}, "is neither an adapter nor a field of LoRA", near))
    raise_if_any(problems)
    return found
