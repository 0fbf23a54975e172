"""What modules of ``user_programs.py`` may have besides their steps: one mixin for each extra feature.

A hook is overridden only in programs with the feature that needs it: the strategy looks at what a module overrides.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from user_batches import FEATURES, MICRO_BATCH, Batch, read
from user_nets import NETS
from user_training import OPTIMIZERS, RATE


class Frozen:
    """The first parameters are not trained, and go through no optimizer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        next(self.net.parameters()).requires_grad_(False)


class Unfreezes:
    """The first parameters are trained from the second epoch on; an optimizer has them from the beginning."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        next(self.net.parameters()).requires_grad_(False)

    def trained(self) -> list[list[nn.Parameter]]:
        params = list(self.net.parameters())
        return [params[: len(params) // 2], params[len(params) // 2 :]]

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.net.requires_grad_(True)


class Teacher:
    """A copy of the net that follows it, and whose scores the net should give for disturbed samples."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, out = super().objective(batch)
        with torch.no_grad():
            wanted = self.teacher(batch)
        wanted = wanted[1] if isinstance(wanted, tuple) else wanted
        return loss + (out - wanted).float().square().mean(), out

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        with torch.no_grad():
            for kept, param in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                kept.lerp_(param, 0.25)


class Counter:
    """A buffer counts samples, another one keeps the numbers of the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = read(batch, self.program["batch"])
        self.count += len(parts.number)
        self.last.copy_(parts.number[:2].float())
        return super().training_step(batch, batch_idx)


class Running:
    """A running mean of the scores, which are centred with it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.register_buffer("centre", torch.zeros(FEATURES))

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.training:
            self.centre.lerp_(batch.x.detach().mean(0).float(), 0.5)
        moved = Batch(batch.x - self.centre, batch.tokens, batch.y, batch.number, batch.names, batch.lengths)
        return super().objective(moved)


class RandomBuffer:
    """A buffer drawn without a seed, as if each process had one of its own."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        random = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self.register_buffer("noise", torch.randn(FEATURES, generator=random))

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        moved = Batch(batch.x * self.noise, batch.tokens, batch.y, batch.number, batch.names, batch.lengths)
        return super().objective(moved)


class TwoCalls:
    """Two calls of the model in a step."""

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, out = super().objective(batch)
        turned = Batch(batch.x.flip(1), batch.tokens.flip(1), batch.y, batch.number, batch.names, batch.lengths)
        return loss + 0.5 * super().objective(turned)[0], out


class Halves:
    """The loss is one over the whole batch, and the backward one for each part of ``MICRO_BATCH`` samples.

    Gradients are rounded and summed as under ``accumulate_grad_batches``, in the batches of the program.
    """

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.training:
            return super().objective(batch)
        rows = len(batch.number)
        parts = [batch.rows(slice(start, start + MICRO_BATCH)) for start in range(0, rows, MICRO_BATCH)]
        losses, outs = zip(*(super(Halves, self).objective(part) for part in parts), strict=True)
        self.losses = losses
        loss = sum(loss * (len(part.number) / rows) for loss, part in zip(losses, parts, strict=True))
        return loss, torch.cat(outs)

    def backward(self, loss: Tensor) -> None:
        for part, share in zip(self.losses, torch.autograd.grad(loss, self.losses), strict=True):
            part.backward(share)


class RaggedLoss:
    """Samples have weights by their lengths."""

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, out = super().objective(batch)
        return loss + (batch.lengths[:, None] * out).float().square().mean() / 10, out


class Outputs:
    """A step returns more than its loss."""

    def returned(self, loss: Tensor, out: Tensor, batch: Batch) -> Any:
        right = (out.detach().argmax(1) == batch.y).float()
        return {"loss": super().returned(loss, out, batch), "right": right, "number": batch.number}


class NumTokens:
    """A step returns a number by a name that our own modules use."""

    def returned(self, loss: Tensor, out: Tensor, batch: Batch) -> Any:
        return {"loss": super().returned(loss, out, batch), "num_tokens": 100}


class ParamHook:
    """A hook of a parameter changes its gradient."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        [p for p in self.net.parameters() if p.requires_grad][-1].register_hook(lambda grad: grad * 0.25)


class GradHook:
    """Gradients are changed behind the backward."""

    def on_after_backward(self) -> None:
        super().on_after_backward()
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


class OwnStep:
    """A warm-up by hand, as Lightning's documentation shows it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (self.global_step + 1) / 4)


class OwnZero:
    """Gradients are set to zero and kept."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnClip:
    """Clipping by a function of the step."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1 * (1 + self.global_step), gradient_clip_algorithm="norm")


class OwnSchedule:
    """The schedule advances every second time."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step % 2:
            scheduler.step()


class OwnState:
    """A number of the module's own in checkpoints."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.ended = 0

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.ended += 1
        self.notes.ends("ended", self.ended)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"ended": self.ended}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.ended = checkpoint["own"]["ended"]


class Collects:
    """Losses of an epoch in a list, the mean is logged at its end."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.collected: list[Tensor] = []

    def returned(self, loss: Tensor, out: Tensor, batch: Batch) -> Any:
        self.collected.append(loss.detach())
        return super().returned(loss, out, batch)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("collected", torch.stack(self.collected).mean())
        self.collected.clear()


class LateGroup:
    """The second half of the parameters is trained from the second epoch on."""

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.program["optimizer"]]([self.trained()[0]])

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.trained()[1], "lr": RATE / 2})


class LogsInHooks:
    """Values are logged in hooks around the step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.log("at_start", float(batch_idx))

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.log("at_end", float(self.global_step), on_step=True, on_epoch=True)


class Masks:
    """Features are masked at random, and the first rank draws once more, for a picture."""

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        kept = (torch.rand_like(batch.x) > 0.25).float()
        words = torch.where(torch.rand(batch.tokens.shape) > 0.25, batch.tokens, 0)
        return super().objective(Batch(batch.x * kept, words, batch.y, batch.number, batch.names, batch.lengths))

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        if self.trainer.is_global_zero:
            torch.randint(4, ())


class Hyper:
    """Hyper-parameters in checkpoints."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.save_hyperparameters({"net": self.program["net"], "sizes": [1, 2], "rate": RATE})


class Temperature:
    """A parameter without dimensions, as CLIP's temperature, and one that no loss depends on."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def trained(self) -> list[list[nn.Parameter]]:
        first, second = super().trained()
        return [[*first, self.unused], [*second, self.temperature]]

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, out = super().objective(batch)
        return loss * self.temperature.exp(), out


class Parametrized:
    """A weight that is computed from others."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        layer = next(module for module in self.net.modules() if isinstance(module, nn.Linear))
        parametrizations.weight_norm(layer)


class Spectral:
    """A weight divided by its norm, of which buffers are estimates."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        layer = next(module for module in self.net.modules() if isinstance(module, nn.Linear))
        parametrizations.spectral_norm(layer)


class Recomputes:
    """Activations are computed again in the backward."""

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = checkpoint(super().objective, batch, use_reentrant=False)
        return found


class Penalty:
    """A penalty of the gradient by the features, which is differentiated again."""

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = batch.x.detach().requires_grad_(True)
            moved = Batch(x, batch.tokens, batch.y, batch.number, batch.names, batch.lengths)
            loss, out = super().objective(moved)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return loss + 0.1 * grad.square().sum(1).mean(), out


class WeightPenalty:
    """A penalty of weights, behind the forward."""

    def objective(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, out = super().objective(batch)
        return loss + 0.01 * sum(param.square().sum() for param in self.net.parameters()), out


class Skips:
    """A step without a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else found


class BuildsLate:
    """The net is built in configure_model."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = NETS[self.program["net"]]()


class Gathers:
    """Values of all replicas are gathered behind the step."""

    def returned(self, loss: Tensor, out: Tensor, batch: Batch) -> Any:
        every = self.all_gather(loss.detach().float())
        self.log("spread", every.max() - every.min(), on_step=True)
        return super().returned(loss, out, batch)


class OtherHooks:
    """Activations are caught by a hook of a layer, and logged when the epoch ends."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.caught: list[float] = []
        next(iter(self.net.modules())).register_forward_hook(self._catch)

    def _catch(self, module: nn.Module, given: Any, out: Any) -> None:
        self.caught.append(float((out[0] if isinstance(out, tuple) else out).detach().float().mean()))

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("caught", sum(self.caught) / len(self.caught))
        self.caught.clear()
