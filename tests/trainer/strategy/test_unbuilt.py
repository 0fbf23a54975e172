"""What is done to a module before its model is built holds when it is, in every layout, or is refused by name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, LlamaModule, LoRA, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.testing.workers import WorkerError
from tests.tiny import tiny_llama

TOKENS = torch.arange(16).view(2, 8)


def made(**options: Any) -> LlamaModule:
    seed_everything(3, verbose=False)
    return LlamaModule(tiny_llama(hidden_dropout=0.5), lr=1e-2, **options)


def built(**options: Any) -> LlamaModule:
    module = made(**options)
    module.configure_model()
    return module


def fill(part: nn.Module) -> None:
    if isinstance(weight := getattr(part, "weight", None), nn.Parameter):
        nn.init.normal_(weight, std=0.1)


def load(module: LlamaModule, **how: Any) -> None:
    weights = {name: torch.full_like(value, 0.25) for name, value in built().state_dict().items()}
    if how.get("strict") is False:
        weights.popitem()
    module.load_state_dict(weights, **how)


def layer(module: LlamaModule) -> Any:
    assert module.model is not None
    return module.model.layers["1"]


def doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def no_dropout(module: LlamaModule) -> None:
    for part in module.modules():
        if hasattr(part, "p"):
            part.p = 0.0


def wrapped(module: LlamaModule) -> None:
    outer = LightningModule()
    outer.inner = module
    outer.load_state_dict({f"inner.{name}": torch.full_like(v, 0.25) for name, v in built().state_dict().items()})


ACTIONS: dict[str, Callable[[LlamaModule], Any]] = {
    "eval": lambda m: m.eval(),
    "eval of a part": lambda m: layer(m).eval(),
    "train after eval": lambda m: m.eval().train(),
    "freeze": lambda m: m.freeze(),
    "unfreeze": lambda m: (m.freeze(), m.unfreeze()),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "requires_grad_ of a part": lambda m: layer(m).requires_grad_(False),
    "requires_grad of a parameter": lambda m: setattr(
        m.get_parameter("model.head.norm.weight"), "requires_grad", False
    ),
    "BaseFinetuning": lambda m: BaseFinetuning.freeze(layer(m)),
    "apply": lambda m: m.apply(fill),
    "load_state_dict": load,
    "load_state_dict, not strict": lambda m: load(m, strict=False),
    "load_state_dict, assigned": lambda m: load(m, assign=True),
    "load_state_dict of a module around it": wrapped,
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "type": lambda m: m.type(torch.float64),
    "to": lambda m: m.to("cpu", torch.float64),
    "cpu": lambda m: m.cpu(),
    "to of a part": lambda m: m.get_submodule("model").to(torch.bfloat16),
    "forward hook": lambda m: layer(m).mlp.register_forward_hook(doubled),
    "removed hook": lambda m: layer(m).mlp.register_forward_hook(doubled).remove(),
    "pre-hook": lambda m: layer(m).mlp.register_forward_pre_hook(lambda part, given: (given[0] * 2, *given[1:])),
    "hook of gradients": lambda m: layer(m).mlp.register_full_backward_hook(lambda part, inner, outer: None),
    "attribute of a part": no_dropout,
    "compile": lambda m: m.compile(backend="eager"),
    "zero_grad": lambda m: m.zero_grad(),
    "add_module": lambda m: m.add_module("more", nn.Linear(2, 2)),
    "attribute": lambda m: setattr(m, "more", nn.Linear(2, 2)),
}


def facts(module: LlamaModule) -> dict[str, Any]:
    """Everything that an action may change."""
    torch.manual_seed(5)
    found: dict[str, Any] = {name: part.training for name, part in module.named_modules()}
    found |= {f"{name}.grad": (p.requires_grad, p.dtype, p.device) for name, p in module.named_parameters()}
    found |= {f"{name}.hooks": len(part._forward_hooks) for name, part in module.named_modules()}
    found |= {f"{name}.backward": len(part._backward_hooks) for name, part in module.named_modules()}
    found["logits"] = module(TOKENS).tolist()
    return found


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_before_the_build_is_as_one_after_it(action: str) -> None:
    late = built()
    torch.manual_seed(4)
    ACTIONS[action](late)
    early = made()
    if action == "apply":  # the model draws its own weights first
        early.configure_model()
        torch.manual_seed(4)
    ACTIONS[action](early)
    seed_everything(3, verbose=False)
    early.configure_model()
    assert facts(early) == facts(late)


READS: dict[str, Callable[[LlamaModule], Any]] = {
    "parameters": lambda m: [(p.shape, p.dtype, p.requires_grad, p.numel()) for p in m.parameters()],
    "named_parameters": lambda m: [name for name, _ in m.named_parameters()],
    "named_buffers": lambda m: [(name, b.shape) for name, b in m.named_buffers()],
    "modules": lambda m: [type(part) for part in m.modules()],
    "children": lambda m: [type(part) for part in m.children()],
    "named_modules": lambda m: [name for name, _ in m.named_modules()],
    "get_submodule": lambda m: type(m.get_submodule("model.layers.1.mlp")),
    "get_parameter": lambda m: m.get_parameter("model.head.norm.weight").shape,
    "state_dict": lambda m: {name: value.tolist() for name, value in m.state_dict().items()},
    "torch.save": lambda m: {n: v.tolist() for n, v in saved(m.state_dict()).items()},
    "deepcopy": lambda m: {name: value.tolist() for name, value in copy.deepcopy(m).state_dict().items()},
    "pickle": lambda m: {name: v.tolist() for name, v in pickle.loads(pickle.dumps(m)).state_dict().items()},
    "summarize": lambda m: (summarize(m).total_parameters, summarize(m).trainable_parameters),
    "str": str,
    "dtype, device": lambda m: (m.dtype, m.device),
    "decay_groups": lambda m: [[p.shape for p in group["params"]] for group in m.decay_groups(0.1)],
}


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "adapters"])
def test_a_module_tells_before_the_build_what_it_tells_after_it(read: str, lora: LoRA | None) -> None:
    early, late = made(lora=lora), built(lora=lora)
    seed_everything(3, verbose=False)
    assert READS[read](early) == READS[read](late)


REFUSED: dict[str, tuple[str, Callable[[LlamaModule], Any]]] = {
    "sum": ("sum", lambda m: sum(p.sum() for p in m.parameters())),
    "in place": ("mul_", lambda m: m.get_parameter("model.head.norm.weight").detach().mul_(2)),
    "data": ("fill_", lambda m: m.get_parameter("model.head.norm.weight").data.fill_(2)),
    "initialization": ("constant_", lambda m: nn.init.constant_(m.get_parameter("model.head.norm.weight"), 2.0)),
    "new data": ("__set__", lambda m: setattr(m.get_parameter("model.head.norm.weight"), "data", torch.ones(2))),
    "hook of a parameter": ("register_hook", lambda m: m.get_parameter("model.head.norm.weight").register_hook(print)),
    "apply of a part": ("normal_", lambda m: layer(m).apply(fill)),
    "to_empty": ("empty_like", lambda m: m.to_empty(device="cpu")),
    "share_memory": ("share_memory_", lambda m: m.share_memory()),
    "torch.save of a part": ("__reduce_ex__", lambda m: saved(layer(m).state_dict())),
    "replaced part": (r"head\.norm", lambda m: (setattr(m.model.head, "norm", nn.Identity()), m(TOKENS))),
    "added part": ("more", lambda m: (layer(m).add_module("more", nn.Linear(2, 2)), m(TOKENS))),
    "removed part": (r"layers\.1", lambda m: (m.model.layers.pop("1"), m(TOKENS))),
    "new parameter": (r"norm\.weight", lambda m: (replace_norm(m), m(TOKENS))),
    "compiled part": ("layers.1._compiled", lambda m: (layer(m).compile(backend="eager"), m(TOKENS))),
}


def replace_norm(module: LlamaModule) -> None:
    assert module.model is not None
    assert module.model.head is not None
    module.model.head.norm.weight = nn.Parameter(torch.ones(16))


@pytest.mark.parametrize("action", REFUSED)
def test_what_cannot_hold_is_refused_with_what_to_write(action: str) -> None:
    name, act = REFUSED[action]
    with pytest.raises(ConfigError, match=rf"(?s){name}.*call module.configure_model\(\) first"):
        act(made())


def test_an_optimizer_made_before_the_build_steps_the_model() -> None:
    module = made()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.loss({"tokens": TOKENS, "labels": TOKENS + 1}).backward()
    before = module.state_dict()["model.head.norm.weight"].clone()
    optimizer.step()
    assert not torch.equal(before, module.state_dict()["model.head.norm.weight"])


def stepped(layout: dict[str, Any]) -> float:
    """Loss after a step of an optimizer that was made before the build."""
    seed_everything(1, verbose=False)
    module = LlamaModule(tiny_llama())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    rows = [{"tokens": row, "labels": row + 1} for row in torch.arange(16).view(2, 8)]
    trainer = quiet_trainer(MegatronStrategy(**layout), max_steps=2, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return float(trainer.callback_metrics["train_loss"])


def test_an_optimizer_made_before_the_build_in_layouts(ranks: Any) -> None:
    assert ranks(2, stepped, {"tp": 2}) == pytest.approx([stepped({})] * 2, abs=1e-4)
    with pytest.raises(WorkerError, match="parameters that other pipeline stages have: make it in conf"):
        ranks(2, stepped, {"pp": 2})


def test_weights_of_no_tensor_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        made().load_state_dict({})


def test_an_outline_draws_no_random_number() -> None:
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    LlamaModule(tiny_llama())
    assert torch.rand(()) == expected


class Frozen(BaseFinetuning):
    """Freezes a layer when Lightning calls its ``setup``, before the model is built."""

    def freeze_before_training(self, pl_module: Any) -> None:
        if "1" in pl_module.model.layers:  # an earlier Trainer may have cut the model
            self.freeze(layer(pl_module))

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None: ...


def trained(layouts: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether the parts of this rank keep, in the last layout, what was said before the build."""
    module, modes = made(), dict[str, bool]()
    assert module.model is not None
    module.model.head.norm.requires_grad_(False)  # type: ignore[union-attr]
    layer(module).mlp.eval()
    layer(module).mlp.register_forward_hook(doubled)
    rows = [{"tokens": row, "labels": row + 1} for row in torch.arange(16).view(2, 8)]
    for layout in layouts:
        trainer = quiet_trainer(
            MegatronStrategy(**layout), max_steps=1, callbacks=[Frozen()], use_distributed_sampler=False
        )
        modes.clear()
        module.on_train_start = lambda: modes.update(found(module))  # type: ignore[method-assign]
        trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return modes


def found(module: LlamaModule) -> dict[str, bool]:
    model, facts = module.model, {}
    assert model is not None
    if model.head is not None:
        facts["the norm is frozen"] = not model.head.norm.weight.requires_grad
        facts["the head is trained"] = model.head.training
    if "1" in model.layers:
        facts["the layer is frozen"] = not any(p.requires_grad for p in model.layers["1"].parameters())
        facts["one hook"] = len(model.layers["1"].mlp._forward_hooks) == 1
    return facts


ONE: dict[str, Any] = {}
TP, PP = {"tp": 2}, {"pp": 2}


@pytest.mark.parametrize("layouts", [[ONE], [TP], [PP], [TP, ONE], [TP, PP], [PP, TP]], ids=str)
def test_what_was_said_holds_in_layouts_and_after_a_rebuild(ranks: Any, layouts: list[dict[str, Any]]) -> None:
    seen = ranks(2, trained, layouts)
    assert len({name for modes in seen for name in modes}) == 4
    assert all(value for modes in seen for value in modes.values()), seen


class Announces:
    """Class beside a module of ours that overrides what builds the model."""

    def configure_model(self) -> None:
        super().configure_model()  # type: ignore[misc]


class MixedIn(Announces, LlamaModule):
    """Module whose outermost ``configure_model`` is that of no module of ours."""


def test_an_override_from_a_class_that_is_no_module_builds_the_model_and_loads_its_weights() -> None:
    module = MixedIn(tiny_llama())
    weights = {name: torch.full_like(value, 0.25) for name, value in built().state_dict().items()}
    module.load_state_dict(weights)
    module.configure_model()
    assert all(param.device.type == "cpu" and bool((param == 0.25).all()) for param in module.parameters())
