"""Write the tables of flags into from-megatron.md: ``python docs/from_megatron.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_megatron.tools.cli.from_megatron import deepspeed
from lightning_megatron.tools.cli.from_megatron.flags import ALWAYS, ONLY, TAKEN, WITHOUT, Flag
from lightning_megatron.tools.cli.from_megatron.variables import (
    COMPUTED,
    FLAGS,
    HERE,
    NONE,
    SWITCHES,
    WITH_BINS,
    WITH_FP8,
)

PAGE = Path(__file__).parent / "from-megatron.md"
BEGIN, END = "<!-- made by `python docs/from_megatron.py` -->\n", "<!-- end of what is made -->\n"
PARTS = {"strategy": "trainer.strategy.", "trainer": "trainer.", "model": "model.", "data": "data."}
CALLBACKS = (
    "ModelCheckpoint", "Throughput", "StragglerMonitor", "ExpertTelemetry", "SpikeGuard", "KillSwitch", "Timer",
    "DeviceProfiler",
)  # fmt: skip


def where(flag: Flag) -> str:
    """Place in a recipe that a flag is read into."""
    part, dot, name = flag.becomes.partition(".")
    if part in PARTS and dot:
        return PARTS[part] + name
    if part in CALLBACKS:
        return f"callback {flag.becomes}"
    if flag.name == "--deepspeed_config":
        return flag.becomes
    return flag.becomes if part in ("seed_everything", "ckpt_path") else f"model.config.{flag.becomes}"


def tables() -> str:
    """The tables."""
    taken = "".join(f"| `{flag.name}` | `{where(flag)}` |\n" for flag in TAKEN)
    return (
        f"## Flags that a recipe is made of\n\n| flag | in the recipe |\n|---|---|\n{taken}\n"
        f"## Flags that name what is always so\n\n{_reasons(ALWAYS, 'here')}\n"
        f"## Flags of which one value names what is always so\n\n{_values()}\n"
        f"## Flags without a counterpart\n\n{_reasons(WITHOUT, 'instead, or why')}\n"
        f"## Keys of DeepSpeed's file\n\n{_keys()}\n"
        f"## Variables of the fork's scripts\n\n{_variables()}\n"
        f"## Variables without a counterpart\n\n{_reasons(NONE, 'instead, or why', 'variable')}"
    )


def _values() -> str:
    rows = "".join(f"| `{name} {value}` | {text} |\n" for name, (value, text) in ONLY.items())
    return f"Another value has no counterpart, and is named.\n\n| flag | here |\n|---|---|\n{rows}"


def _keys() -> str:
    taken = {key: place for key, (_, place) in deepspeed.KEYS.items()}
    more = {"optimizer.type": "AdamW, or none", "optimizer.params.betas": "`model.betas`"}
    found = {
        **taken,
        **more,
        **deepspeed.HERE,
        **{key: f"no counterpart: {why}" for key, why in deepspeed.NONE.items()},
    }
    return _reasons(found, "place in the recipe, or what is so here", "key")


def _variables() -> str:
    same = {name: ", ".join(f"`{flag}`" for flag in flags) for name, flags in FLAGS.items()}
    switches = {name: f"`{flag}`" for name, flag in {**SWITCHES, **WITH_BINS, **WITH_FP8}.items()}
    return _reasons(
        {**same, **switches, **COMPUTED, **HERE}, "flag, place in the recipe, or what is so here", "variable"
    )


def _reasons(flags: Mapping[str, str], title: str, kind: str = "flag") -> str:
    return f"| {kind} | {title} |\n|---|---|\n" + "".join(f"| `{name}` | {text} |\n" for name, text in flags.items())


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text()
    return text[: text.index(BEGIN) + len(BEGIN)] + tables() + text[text.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(page())
