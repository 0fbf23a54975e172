"""A training job: its recipe, its cluster, and the words that start it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_megatron.launching.cluster import Cluster
from lightning_megatron.recipes.names import is_file

MODULE = "lightning_megatron.cli.main"
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

    def fit_words(self) -> list[str]:
        """Words for ``lightning-megatron``: a run that resumes from its last checkpoint, if there is one."""
        files = [word for config in self.configs for word in (option_of(config), config)]
        nodes, devices = str(self.cluster.nodes), str(self.cluster.devices_per_node)
        sizes = ["--trainer.num_nodes", nodes, "--trainer.devices", devices]
        return ["fit", *files, "--ckpt_path", "last", *sizes, *self.arguments]

    def python_words(self) -> list[str]:
        """Words of one rank's process."""
        return [self.cluster.python, "-m", MODULE, *self.fit_words()]


def option_of(config: str) -> str:
    """The option of ``fit`` that takes a recipe: its name or its file."""
    return "--config" if is_file(config) else "--recipe"


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
