"""A training job: its recipe, its cluster, and the words that start it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.tools.launching.cluster import Cluster
from lightning_megatron.tools.recipes.names import is_file

MODULE = "lightning_megatron.tools.cli.main"
MODEL_SIZES: Mapping[str, tuple[str, ...]] = {
    name.upper(): (f"--model.dict_kwargs.{name}",)
    for name in (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
        "max_position_embeddings",
    )
}
LAYOUT_SIZES: Mapping[str, tuple[str, ...]] = {
    name.upper(): (f"--trainer.strategy.{name}",) for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch_size")
}
SIZES: Mapping[str, tuple[str, ...]] = {
    **MODEL_SIZES,
    "SEQ_LENGTH": ("--data.seq_length",),
    # A recipe's batch_size would contradict it.
    "GLOBAL_BATCH_SIZE": ("--data.batch_size", "1", "--data.global_batch_size"),
    **LAYOUT_SIZES,
}
"""Words for ``fit`` before a size, by the environment variable that replaces the recipe's size."""
OPTIONS: Mapping[str, tuple[str, ...]] = {"DATA_PATH": ("--data.data_path",), **SIZES}
"""Words for ``fit`` before the value of an environment variable, by its name."""
_WIDTH = 100


@dataclass(frozen=True)
class TrainingJob:
    """A recipe on a cluster.

    Attributes:
        cluster: machines of the job.
        configs: names of recipes and YAML files; later ones override earlier ones.
        arguments: more words for ``fit``.
        checkpoints: folder in which the recipe keeps checkpoints; ``None`` if it names none.
        from_hf: True if the run begins with weights from the Hugging Face directory in ``HF_DIR``.
    """

    cluster: Cluster
    configs: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    checkpoints: str | None = None
    from_hf: bool = False

    def first_words(self) -> list[str]:
        """Words for ``lightning-megatron`` without sizes of the environment: a run resumes from its last checkpoint."""
        files = [word for config in self.configs for word in (option_of(config), config)]
        nodes, devices = str(self.cluster.nodes), str(self.cluster.devices_per_node)
        sizes = ["--trainer.num_nodes", nodes, "--trainer.devices", devices]
        return ["fit", *files, "--ckpt_path", "last", *sizes, *self.arguments]

    def fit_words(self) -> list[str]:
        """All words for ``lightning-megatron``."""
        given = self.cluster.environment
        changes = [word for name, words in OPTIONS.items() if given.get(name) for word in (*words, given[name])]
        return [*self.first_words(), *changes]

    def python_words(self) -> list[str]:
        """Words of one rank's process."""
        return [self.cluster.python, "-m", MODULE, *self.fit_words()]


def option_of(config: str) -> str:
    """The option of ``fit`` that takes a recipe: its name or its file."""
    return "--config" if is_file(config) else "--recipe"


def option_lines(options: Mapping[str, Sequence[str]]) -> str:
    """Lines of a script that append the values of variables to its array ``words``, each behind its own words."""
    lines = [f"option {name} {' '.join(words)}" for name, words in options.items()]
    return "\n".join([_OPTION, *lines])


_OPTION = """\
option() { # a variable, and the words before its value
    if [[ -n ${!1:-} ]]; then
        words+=("${@:2}" "${!1}")
    fi
}"""


def shell_line(words: Sequence[str]) -> str:
    """A command for a shell, broken before options where it is long."""
    lines: list[list[str]] = [[]]
    for word in words:
        length = sum(len(shlex.quote(each)) + 1 for each in lines[-1])
        if lines[-1] and word.startswith("-") and length + len(word) + 20 > _WIDTH:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(line) for line in lines)


def exports(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Lines that set variables for all processes of a script."""
    return [f"export {name}={shlex.quote(value)}" for name, value in pairs]
