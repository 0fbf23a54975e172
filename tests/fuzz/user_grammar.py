"""The grammar of ``user_programs.py``: a program as data, what it may consist of, and how one is drawn.

A feature is a word in ``CHOICES`` or ``EXTRAS``, and its meaning an entry in a table: ``MIXINS`` in
``user_modules.py``, ``NETS`` in ``user_nets.py``, ``MAKE`` in ``user_batches.py``, ``CALLBACKS`` in
``user_callbacks.py``, or one of ``user_training.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random

# The first value of each is the plain one.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "net": ("mlp", "conv", "norm", "embed", "lstm", "gru", "attention", "tied", "bert", "gpt2", "t5", "gpt", "llama"),
    "batch": ("tuple", "list", "dict", "nested", "namedtuple", "named", "arrays", "dataclass", "ragged"),
    "loss": ("mean", "weighted", "parts"),
    "log": ("none", "step", "epoch", "both", "dict", "sync", "max", "sum", "size", "float", "rank0", "logger", "hook"),
    "metric": ("none", "module", "held-out", "forward", "collection", "by-name", "mean", "plain", "callback"),
    "optimizer": ("sgd", "momentum", "adam", "adamw", "groups", "rmsprop", "adagrad"),
    "schedule": ("none", "step", "epoch", "lambda", "one-cycle", "restarts", "plateau", "sequence", "second", "own"),
    "loop": ("automatic", "manual", "manual-two", "manual-sum", "manual-closure"),
    "accumulate": ("1", "2"),
    "clip": ("none", "norm", "value", "own"),
    "precision": ("32-true", "bf16-mixed"),
    "stop": ("none", "exception", "signal", "file"),
    "resume": ("same", "one", "tp2", "mb2", "pp2"),
    "stop_at": ("3", "1", "2", "5"),
}
EXTRAS: tuple[str, ...] = (
    *(
        "val",
        "val-often",
        "test",
        "predict",
        "odd",
        "shuffle",
        "split",
        "dropout",
        "hparams",
        "rank0-draws",
        "loads-back",
    ),
    *("frozen", "teacher", "counter", "running", "random-buffer", "unfreeze", "two-calls", "outputs", "num-tokens"),
    *("param-hook", "grad-hook", "own-step", "own-zero", "own-state", "collect", "late-group"),
    *("cb-read", "cb-edit", "cb-optimizer", "cb-outputs", "cb-state", "cb-ema", "cb-best", "cb-rates", "cb-early"),
    *("cb-average", "cb-unfreeze", "cb-grads"),
    *("temperature", "weight-norm", "spectral-norm", "recomputes", "penalty", "weight-penalty", "skips", "builds-late"),
    *("gathers", "catches", "two-val", "cb-sets-rates", "cb-stops"),
)
LAYOUTS = ("one", "dp2", "tp2", "pp2", "mb2", "dp2+mb2")
OF_OWN_NETS = ("weight-norm", "spectral-norm", "temperature", "penalty", "weight-penalty", "builds-late", "catches")
PLAIN = {name: values[0] for name, values in CHOICES.items()}
OURS = ("net=gpt", "net=llama")
HUGGING_FACE = ("net=bert", "net=gpt2", "net=t5")


@dataclass(frozen=True)
class Program:
    """One program in one layout.

    Attributes:
        chosen: values of ``CHOICES`` that are not plain, by name.
        extras: words of ``EXTRAS``.
        layout: one of ``LAYOUTS``.
        seed: seed of weights and data.
    """

    chosen: tuple[tuple[str, str], ...] = ()
    extras: tuple[str, ...] = ()
    layout: str = "one"
    seed: int = 0

    def __getitem__(self, name: str) -> str:
        return dict(self.chosen).get(name, PLAIN[name])

    def __contains__(self, extra: str) -> bool:
        return extra in self.extras

    @property
    def features(self) -> tuple[str, ...]:
        """What is not plain, ``net=conv`` or ``teacher``, in a fixed order."""
        return (*(f"{name}={value}" for name, value in self.chosen), *self.extras)

    @property
    def words(self) -> frozenset[str]:
        """The features, those of a kind (``stop``, ``net=ours``), and the layout with its parts."""
        layouts = {self.layout} if self["resume"] == "same" else {self.layout, self["resume"]}
        kinds = {name for name, _ in self.chosen} | {f"@{part}" for each in layouts for part in each.split("+")}
        nets = {name for name, members in (("ours", OURS), ("hugging-face", HUGGING_FACE)) if self.has_any(members)}
        kinds |= {"plain"} if not nets else set()
        kinds |= {"manual"} if self["loop"] != "automatic" else {"automatic"}
        return frozenset({*self.features, *kinds, *nets, f"@={self.layout}"})

    @property
    def alone(self) -> bool:
        """True if all of it runs in one process, which takes batches whole."""
        return self.layout == "one" and self["resume"] in ("same", "one")

    def has_any(self, features: Iterable[str]) -> bool:
        """True if one of the features is there."""
        return any(feature in self.features for feature in features)

    def without(self, feature: str) -> Program:
        """The program with one feature less."""
        name, _, _ = feature.partition("=")
        chosen = tuple(pair for pair in self.chosen if pair[0] != name or "=" not in feature)
        return replace(self, chosen=chosen, extras=tuple(extra for extra in self.extras if extra != feature))

    def always(self, **chosen: str) -> Program:
        """The program with these values of ``CHOICES``."""
        return replace(self, chosen=_ordered({**dict(self.chosen), **chosen}))

    def at(self, layout: str) -> Program:
        """The program in another layout."""
        return replace(self, layout=layout)

    def __str__(self) -> str:
        return " ".join((*self.features, f"seed={self.seed}", f"@{self.layout}"))

    @classmethod
    def parse(cls, text: str) -> Program:
        """The program of such a text; an unknown word is an error."""
        chosen, extras, layout, seed = {}, set(), "one", 0
        for word in text.split():
            name, _, value = word.partition("=")
            if word.startswith("@") and word[1:] in LAYOUTS:
                layout = word[1:]
            elif name == "seed":
                seed = int(value)
            elif value in CHOICES.get(name, ()):
                chosen[name] = value
            elif word in EXTRAS:
                extras.add(word)
            else:
                raise ValueError(f"{word!r} in {text!r} is no feature")
        return cls(_ordered(chosen), tuple(extra for extra in EXTRAS if extra in extras), layout, seed)


def _ordered(chosen: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, chosen[name]) for name in CHOICES if chosen.get(name, PLAIN[name]) != PLAIN[name])


@dataclass(frozen=True)
class Rule:
    """Words that do not go together; ``why`` is a reason, or the name of a fault."""

    why: str
    words: tuple[str, ...]
    unless: tuple[str, ...] = field(default=())

    def holds(self, has: frozenset[str]) -> bool:
        """True if all the words are among these, and none of the others."""
        return has.issuperset(self.words) and not has.intersection(self.unless)


def rules(table: Mapping[str, Iterable[str]]) -> tuple[Rule, ...]:
    """Rules by reason, each written ``"word word -word"``; a word behind a minus must not be there."""
    return tuple(_rule(why, text.split()) for why, texts in table.items() for text in texts)


def _rule(why: str, words: list[str]) -> Rule:
    needed = tuple(word for word in words if not word.startswith("-"))
    return Rule(why, needed, tuple(word[1:] for word in words if word.startswith("-")))


# Programs that no one could write, or whose numbers differ for a reason of the mathematics.
SENSELESS = rules(
    {
        "there is nothing to validate": ("val-often -val", "two-val -val", "metric=held-out -val", "cb-early -val"),
        "parameters of ours are shards": (
            "ours cb-ema @tp2",
            "ours cb-ema @pp2",
            "ours cb-read @tp2",
            "ours cb-read @pp2",
        ),
        "a mean over micro-batches": ("odd collect @mb2", "split collect @mb2"),
        "replicas evaluate with the buffers that a checkpoint has, not with their own of the last batch": tuple(
            f"{feature} {stage} @dp2"
            for feature in ("net=norm", "running", "spectral-norm")
            for stage in ("test", "predict")
        ),
        "code behind the model's call runs on the last stage alone": ("collect @pp2",),
        "a checkpoint around a stage is refused in the step, and the other stage waits for the process to end": (
            "recomputes @pp2",
        ),
        "a step returns one thing": ("outputs num-tokens",),
        "the model is built later": ("ours loads-back",),
        "freezing twice": ("frozen unfreeze", "frozen cb-unfreeze", "unfreeze cb-unfreeze", "late-group cb-unfreeze"),
        "the order of a shuffled loader follows from seed and epoch alone, unlike stock Lightning's": (
            "shuffle -@dp2",
        ),
        "there is one stop": ("stop_at -stop", "resume -stop"),
        "two replicas have a batch each": ("resume @dp2",),
        "a pipeline cuts our modules": ("resume=pp2 -ours",),
        "the model is built in configure_model": (
            *("ours teacher", "ours frozen", "ours unfreeze", "ours cb-unfreeze", "ours running", "ours cb-average"),
            *("ours param-hook", "ours two-calls", "ours loop=manual-two"),
        ),
        "that is a feature of own nets": (
            *(f"ours {extra}" for extra in OF_OWN_NETS),
            *(f"hugging-face {extra}" for extra in OF_OWN_NETS),
        ),
        "the net is not there yet": tuple(
            f"builds-late {extra}"
            for extra in (
                "frozen",
                "unfreeze",
                "teacher",
                "param-hook",
                "weight-norm",
                "spectral-norm",
                "catches",
                "cb-unfreeze",
            )
        ),
        "one parametrization a layer": ("weight-norm spectral-norm",),
        "the net knows tokens, not features": tuple(
            f"penalty net={net}" for net in ("embed", "lstm", "gru", "attention", "tied")
        ),
        "Lightning refuses steps without a loss on several ranks": ("skips @tp2", "skips @pp2"),
        "steps without a loss": ("skips manual", "skips @dp2", "skips outputs", "skips cb-outputs", "skips num-tokens"),
        "means over more than samples": ("catches @mb2", "gathers @mb2", "gathers @tp2", "gathers @pp2"),
        "transformers has dropout and configurations of its own": ("ours dropout", "hugging-face dropout"),
        "Lightning refuses it": ("manual accumulate", "manual clip", "manual schedule=plateau", "manual own-step"),
        "schedules have the groups of the beginning": ("late-group schedule", "cb-unfreeze schedule"),
        "it has no momentum": ("schedule=one-cycle optimizer=adagrad",),
        "a batch of one sample has no variance": ("net=norm odd split",),
        "the monitored value has another name for each loader": tuple(
            f"two-val {reader}" for reader in ("cb-early", "cb-best", "schedule=plateau")
        ),
        "means over classes are not means of means": ("metric=forward @mb2",),
        "loops by hand step schedulers by hand": ("manual schedule",),
        "one optimizer there has all parameters": (
            "loop=manual-two optimizer=groups",
            "loop=manual-two late-group",
            "loop=manual-two frozen",
            "optimizer=groups late-group",
        ),
        "a step there sums over batches": ("loop=manual-sum odd",),
        "statistics of a batch are those of a micro-batch": (
            "net=norm @mb2",
            "running @mb2",
            "counter @mb2",
            "spectral-norm @mb2",
        ),
        "masks of dropout depend on the cut": ("dropout @mb2", "dropout @dp2", "dropout @pp2", "dropout resume"),
        "stock DDP seeds generators anew before the model is built": ("builds-late @dp2", "ours split @dp2"),
        "a pipeline gives each micro-batch a seed, since stages run them in different orders": ("rank0-draws @pp2",),
        "replicas draw from other streams": ("rank0-draws @dp2", "rank0-draws @mb2"),
        "manual optimization steps once a call": ("manual @mb2",),
        "means over other weights than samples": ("loss=weighted @mb2", "num-tokens @mb2"),
        "gradients of micro-batches come one by one": ("grad-hook @mb2", "param-hook @mb2"),
        "values of one replica": ("log=rank0 @dp2", "log=logger @mb2", "log=float @mb2"),
        "replicas share the state, and its use is refused by the parameter's name": ("cb-optimizer @dp2",),
        "a hook sees gradients of this rank alone": (
            *("cb-grads @tp2", "cb-grads @pp2", "cb-grads @mb2", "grad-hook @tp2", "grad-hook @pp2"),
        ),
        "gradients of what no optimizer has are those of this replica": ("late-group clip=own @dp2",),
        "stock Lightning sends no buffers in loops by hand, and those of replicas drift apart": tuple(
            f"manual {feature} @dp2" for feature in ("net=norm", "running", "counter", "spectral-norm")
        ),
        "by that name our modules return the tokens over which a loss is a sum": ("ours num-tokens",),
        "DDP does not average what was frozen when it began": ("unfreeze @dp2", "cb-unfreeze @dp2"),
        "DDP shuffles what one process does not": ("stop split",),
        "an epoch's means and states after a resume in mid-epoch are those of the rest in stock Lightning": (
            *("stop log", "stop metric", "stop collect", "stop schedule=plateau", "stop cb-early", "stop cb-rates"),
            *("stop cb-best", "stop val-often", "stop catches", "stop gathers"),
        ),
        "what user code keeps outside of checkpoints is not resumed": (
            "stop cb-ema",
            "stop rank0-draws",
            "stop cb-stops",
        ),
        "a callback saves before the module's hook at the end of a step": (
            *("stop=exception own-state", "stop=exception teacher"),
        ),
        "hooks of an epoch do not run again in stock Lightning either": (
            *("stop late-group", "stop cb-unfreeze", "stop unfreeze -stop=exception"),
        ),
        "a rounding error of bf16 decides the direction of a step": tuple(
            f"precision optimizer={name}" for name in ("adam", "adamw", "groups", "rmsprop", "adagrad")
        ),
        "a BatchNorm takes back the scale of the layer before it, whose gradient is a rounding error": tuple(
            f"net=norm weight-norm optimizer={name}" for name in ("adam", "adamw", "groups", "rmsprop", "adagrad")
        ),
        "a stop ends the program": ("stop test", "stop predict"),
    }
)
# Faults that have a name, and are not mended yet: a line goes when its fault does.
KNOWN = rules({})


def broken(program: Program, table: Iterable[Rule]) -> Iterator[Rule]:
    """Rules that a program breaks."""
    words = program.words
    return (rule for rule in table if rule.holds(words))


def drawn(seed: int, layout: str | None = None, *, known: bool = False, given: Iterable[str] = ()) -> Program:
    """The program of a seed.

    Args:
        seed: the seed.
        layout: its layout; ``None`` draws one.
        known: true to have features in it that fail today.
        given: features that it must have.
    """
    random = Random(seed)
    much = random.choice((0.15, 0.3, 0.5))  # simple programs fail with a clear reason, others by combination
    chosen = {name: random.choice(values) for name, values in CHOICES.items() if random.random() < much}
    chosen |= {"precision": "bf16-mixed"} if random.random() < 0.1 else {"precision": "32-true"}
    chosen["stop"] = random.choice(CHOICES["stop"]) if random.random() < 0.2 else "none"
    extras = {extra for extra in EXTRAS if random.random() < much / 3}
    extras |= {"val"} if random.random() < 0.5 else set()
    where = layout or random.choice(LAYOUTS)
    if random.random() < (0.9 if where == "pp2" else 0.1):  # others are refused in a pipeline
        chosen["net"] = random.choice(("gpt", "llama"))
    for feature in given:
        name, _, value = feature.partition("=")
        if value:
            chosen[name] = value
        else:
            extras.add(feature)
    program = Program(_ordered(chosen), tuple(e for e in EXTRAS if e in extras), where, seed)
    table = SENSELESS if known else (*SENSELESS, *KNOWN)
    kept = [feature for feature in program.features if feature not in set(given)]
    while (rule := next(broken(program, table), None)) is not None:
        program = _less(program, random, rule, kept)
    return program


def _less(program: Program, random: Random, rule: Rule, kept: list[str]) -> Program:
    """The program without one feature that a rule names, or in one process."""
    named = [f for f in program.features if f in rule.words or f.partition("=")[0] in rule.words]
    of_kinds = [f for f in program.features if f.startswith(("net=", "loop="))]
    may_go = [feature for feature in named if feature in kept] or [feature for feature in of_kinds if feature in kept]
    if may_go:
        return program.without(random.choice(may_go))
    if program.layout != "one":
        return program.at("one")
    raise ValueError(f"{program}: {rule.why}")
