"""Partition of a model's layers into pipeline stages, with the embedding and the loss."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from lightning_megatron.errors import ConfigError, Problem, nearest_to, problems_of, raise_if_any
from lightning_megatron.pipeline.action import chunk_of, rank_of
from lightning_megatron.stage import StageLayers

BALANCED = "balanced"
"""Value of ``layout`` that weighs the output layer by its work, in place of a layout string."""

_LONGEST = 10_000
"""Largest number of letters of a layout string with its repeats written out."""


@dataclass(frozen=True)
class LayerSplit:
    """The user's choice of a partition.

    Attributes:
        first_stage_layers: layers of stage 0, which also embeds; the other stages share the rest evenly.
        last_stage_layers: layers of the last stage, which also computes the loss.
        count_embedding: True to count the embedding as one layer of an even partition.
        count_loss: True to count the loss as one layer of an even partition.
        layout: every stage spelled out: ``E`` embedding, ``t`` layer, ``L`` loss, ``|`` between stages, ``*3`` repeats
            the preceding item, parentheses group, commas and spaces are ignored: ``"Et*3|(tt|)*29,t|L"``.
            As in Megatron's ``--pipeline-model-parallel-layout``. Or ``"balanced"``: the last stage gets fewer layers,
            by the work of output layer and loss.
    """

    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    layout: str | None = None

    @property
    def is_even(self) -> bool:
        """True if every stage gets the same number."""
        return self == LayerSplit()

    def stages(self, num_layers: int, pp: int, vpp: int = 1, loss_cost: float = 1.0) -> tuple[StageLayers, ...]:
        """Divide ``num_layers`` layers into ``pp * vpp`` stages.

        Args:
            num_layers: layers of the whole model.
            pp: pipeline ranks.
            vpp: chunks a rank holds.
            loss_cost: work of output layer and loss, in layers, for a balanced layout.

        Returns:
            One entry per stage, by stage number.

        Raises:
            ConfigError: with every fault of the choice.
        """
        return _stages(self, num_layers, pp, vpp, loss_cost)

    def problems(self, num_layers: int, pp: int, vpp: int) -> list[Problem]:
        """Every fault of the choice for a model and a pipeline."""
        return problems_of(self.stages, num_layers, pp, vpp)


@lru_cache(maxsize=4096)
def _stages(split: LayerSplit, num_layers: int, pp: int, vpp: int, loss_cost: float) -> tuple[StageLayers, ...]:
    uneven = {"first_stage_layers": split.first_stage_layers, "last_stage_layers": split.last_stage_layers}
    counted = {"count_embedding": split.count_embedding, "count_loss": split.count_loss}
    raise_if_any(
        Problem(name, size, "a size must be at least 1", (1,))
        for name, size in {"num_layers": num_layers, "pp": pp, "vpp": vpp}.items()
        if size < 1
    )
    if split.layout is not None:
        reason = "the layout already defines the number of layers of every stage: leave one of the two out"
        given = {n: v for n, v in uneven.items() if v is not None} | {n: v for n, v in counted.items() if v}
        raise_if_any(Problem(name, value, reason) for name, value in given.items())
        if split.layout == BALANCED:
            sizes = _balanced_sizes(num_layers, pp * vpp, loss_cost)
        else:
            sizes = _layout_sizes(split.layout, num_layers, pp, vpp)
    elif split.first_stage_layers is None and split.last_stage_layers is None:
        sizes = _even_sizes(num_layers, pp * vpp, split.count_embedding, split.count_loss)
    else:
        reason = "first_stage_layers and last_stage_layers already define those stages: leave one of the two out"
        raise_if_any(Problem(name, value, reason, (False,)) for name, value in counted.items() if value)
        sizes = _uneven_sizes(num_layers, pp * vpp, uneven)
    stages = []
    start = 0
    for stage, size in enumerate(sizes):
        layers = range(start, start + size)
        is_last = stage == len(sizes) - 1
        stages.append(StageLayers(stage, rank_of(stage, pp), chunk_of(stage, pp), layers, stage == 0, is_last))
        start += size
    return tuple(stages)


def parse_layout(layout: str) -> list[str]:
    """Parse a layout string into the letters of every stage: ``"Et|(tt|)*2L"`` is ``["Et", "tt", "tt", "L"]``.

    Raises:
        ConfigError: if the string cannot be read.
    """
    tokens = re.findall(r"\*\s*\d+|\S", layout.replace(",", " "))
    letters, rest = _expand(layout, tokens)
    if rest:
        raise ConfigError([Problem("pipeline_layout", layout, "a closing parenthesis has no opening one")])
    return letters.split("|")


def _expand(layout: str, tokens: list[str], inside: bool = False) -> tuple[str, list[str]]:
    """Write out the repeats up to the end, or up to the parenthesis that closes the caller's group."""
    parts: list[str] = []
    while tokens:
        token, *tokens = tokens
        if token == "(":
            group, tokens = _expand(layout, tokens, inside=True)
            parts.append(group)
        elif token == ")":
            return "".join(parts), tokens if inside else [token]
        elif token.startswith("*"):
            if len(token) == 1 or not parts:
                reason = "a * needs an item before it and a number after it, as in t*3 or (tt|)*4"
                raise ConfigError([Problem("pipeline_layout", layout, reason)])
            times = int(token[1:])
            if len(parts[-1]) * times > _LONGEST:
                raise ConfigError([Problem("pipeline_layout", layout, f"{token} makes more than {_LONGEST} letters")])
            parts[-1] *= times
        elif token == "m":
            always = "those (mtp_num_layers) are always beside the loss: leave it out"
            reason = f"m asks for a multi-token prediction layer, and {always}"
            raise ConfigError([Problem("pipeline_layout", layout, reason)])
        elif token in "EtL|":
            parts.append(token)
        else:
            reason = f"{token!r} means nothing here: E embedding, t layer, L loss, | next stage, *n, ( and )"
            raise ConfigError([Problem("pipeline_layout", layout, reason)])
    if inside:
        raise ConfigError([Problem("pipeline_layout", layout, "an opening parenthesis has no closing one")])
    return "".join(parts), tokens


def _layout_sizes(layout: str, num_layers: int, pp: int, vpp: int) -> list[int]:
    stages = parse_layout(layout)
    letters = "".join(stages)
    problems = []
    if len(stages) % pp:
        reason = f"{len(stages)} stages do not split over pp={pp} ranks"
        problems.append(Problem("pipeline_layout", layout, reason))
    elif len(stages) != pp * vpp:
        reason = f"the layout has {len(stages)} stages, which are {len(stages) // pp} chunks on each of pp={pp} ranks"
        problems.append(Problem("vpp", vpp, reason, (len(stages) // pp,)))
    if letters.count("t") != num_layers:
        reason = f"the layout has {letters.count('t')} layers"
        problems.append(Problem("num_layers", num_layers, reason, (letters.count("t"),)))
    if letters.count("E") != 1 or not letters.startswith("E") or not stages[0]:
        problems.append(Problem("pipeline_layout", layout, "one E, and it comes first in the first stage"))
    if letters.count("L") != 1 or not stages[-1].endswith("L"):
        problems.append(Problem("pipeline_layout", layout, "one L, and it comes last in the last stage"))
    raise_if_any(problems)
    return [stage.count("t") for stage in stages]


def _balanced_sizes(num_layers: int, num_stages: int, loss_cost: float) -> list[int]:
    """Layers of each stage such that the stage with the most work has as little work as possible."""
    others = num_stages - 1
    if others == 0:
        return [num_layers]
    if num_layers < others:
        reason = f"fewer layers than the {others} stages before the last"
        raise ConfigError([Problem("num_layers", num_layers, reason, (others,))])

    def most_work(last: int) -> float:
        return max(last + loss_cost, math.ceil((num_layers - last) / others))

    last = min(range(num_layers - others, -1, -1), key=most_work)  # ties go to the largest last stage
    share, rest = divmod(num_layers - last, others)
    # Earlier stages keep activations of more micro-batches, so they get the smaller shares.
    return [share] * (others - rest) + [share + 1] * rest + [last]


def _even_sizes(num_layers: int, num_stages: int, count_embedding: bool, count_loss: bool) -> list[int]:
    total = num_layers + count_embedding + count_loss
    if total % num_stages:
        extra = count_embedding + count_loss
        counted = f" and {extra} counted as layers" if extra else ""
        reason = (
            f"{num_layers} layers{counted} do not split over {num_stages} stages (pp x vpp); "
            "first_stage_layers, last_stage_layers or a layout string share them unevenly"
        )
        lower = total // num_stages * num_stages - extra
        valid = [n for n in (lower, lower + num_stages) if n > 0]
        raise ConfigError([Problem("num_layers", num_layers, reason, nearest_to(num_layers, valid))])
    sizes = [total // num_stages] * num_stages
    sizes[0] -= count_embedding
    sizes[-1] -= count_loss
    if min(sizes) < 0:
        reason = f"embedding and loss take two places, and each of {num_stages} stages has {total // num_stages}"
        raise ConfigError([Problem("count_loss", count_loss, reason, (False,))])
    return sizes


def _uneven_sizes(num_layers: int, num_stages: int, uneven: dict[str, int | None]) -> list[int]:
    given = {name: layers for name, layers in uneven.items() if layers is not None}
    if num_stages == 1:
        reason = "there is one stage (pp x vpp = 1) and it holds all layers: leave it out"
        raise ConfigError([Problem(name, layers, reason) for name, layers in given.items()])
    others = num_stages - len(given)

    def shares(rest: int) -> bool:
        """True if the other stages can share ``rest`` layers evenly, at least one each."""
        return rest == 0 if others == 0 else rest >= others and rest % others == 0

    rest = num_layers - sum(given.values())
    if min(given.values()) < 0 or not shares(rest):
        name, layers = min(given.items(), key=lambda item: item[1]) if min(given.values()) < 0 else [*given.items()][-1]
        free = num_layers - (sum(given.values()) - layers)
        valid = [n for n in range(free + 1) if shares(free - n)]
        reason = (
            f"that leaves {rest} of {num_layers} layers for {others} other stages, which share evenly, one or more each"
        )
        raise ConfigError([Problem(name, layers, reason, nearest_to(layers, valid))])
    middle = [rest // others] * others if others else []
    first, last = uneven["first_stage_layers"], uneven["last_stage_layers"]
    return ([] if first is None else [first]) + middle + ([] if last is None else [last])
