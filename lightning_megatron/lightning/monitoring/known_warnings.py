"""Filters, active during a run, for warnings of Lightning that its user can do nothing about."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple


class KnownWarning(NamedTuple):
    """One warning, as narrow as ``warnings.filterwarnings`` can name it.

    Attributes:
        message: regular expression of its beginning.
        category: class of it.
        reason: why a user need not see it.
    """

    message: str
    category: type[Warning]
    reason: str


OF_ALL_RUNS = (
    KnownWarning(
        "Precision .* is not supported by the model summary",
        UserWarning,
        "parameters are shown as the 32 bits that they have in mixed precisions",
    ),
    KnownWarning(
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        FutureWarning,
        "Lightning's own code uses a class that torch has renamed, in every process",
    ),
    KnownWarning(
        "You are using a custom batch sampler `MegatronSampler` for prediction",
        UserWarning,
        "the data module says itself which samples are left out",
    ),
    KnownWarning(
        r"You have overridden `(on_before_batch_transfer|transfer_batch_to_device)` in `LightningModule` but have",
        UserWarning,
        "GPTModule prepares documents of batches there, beside any data module",
    ),
)
OF_ONE_REPLICA = (
    KnownWarning(
        r"It is recommended to use `self\.log\(.*sync_dist=True\)`",
        UserWarning,
        "all ranks log the value of the same samples; Lightning does so even if the user says sync_dist=True",
    ),
)


class KnownWarnings:
    """Filters for known warnings, in place from :meth:`open` to :meth:`close`.

    Filters that others add in between stay, unlike with ``warnings.catch_warnings``.
    """

    def __init__(self) -> None:
        self._own: list[Any] = []

    def open(self, *, one_replica: bool) -> None:
        """Add the filters of the known warnings; ``one_replica`` if all ranks read the same samples."""
        self.close()
        for warning in (*OF_ALL_RUNS, *(OF_ONE_REPLICA if one_replica else ())):
            before = [id(entry) for entry in warnings.filters]
            warnings.filterwarnings("ignore", warning.message, warning.category)
            self._own += [entry for entry in warnings.filters if id(entry) not in before]

    def close(self) -> None:
        """Remove the filters that :meth:`open` added."""
        for own in self._own:
            at = next((place for place, entry in enumerate(warnings.filters) if entry is own), None)
            if at is not None:
                del warnings.filters[at]  # type: ignore[attr-defined]  # a list, which no stub says
        self._own = []
