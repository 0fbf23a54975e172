"""HPU graphs of the lazy mode: nothing is recorded here, but models that cannot be recorded are refused."""

from __future__ import annotations

import inspect

from torch import nn


def wrap_in_hpu_graph(
    module: nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> nn.Module:
    """A module for inference, unchanged."""
    return module


class ModuleCacher:
    """``ModuleCacher(max_graphs)(model=...)`` returns a model for training, unchanged.

    Args:
        max_graphs: number of graphs to keep; not used.
    """

    def __init__(self, max_graphs: int = 10) -> None:
        self.max_graphs = max_graphs

    def __call__(
        self,
        model: nn.Module,
        use_lfu: bool = False,
        inplace: bool = True,
        allow_unused_input: bool = False,
        asynchronous: bool = False,
        have_grad_accumulation: bool = False,
        log_frequency: int = 100,
        verbose: bool = False,
        disable_tensor_cache: bool = False,
        dry_run: bool = False,
    ) -> nn.Module:
        """Return the model, unless graphs do not support it."""
        assert not isinstance(model, nn.parallel.DistributedDataParallel), "wrap the model before DDP"
        for argument in inspect.signature(model.forward).parameters.values():
            assert argument.kind not in (argument.VAR_POSITIONAL, argument.POSITIONAL_ONLY), (
                f"Unsupported argument type : {argument.kind}"
            )
        return model
