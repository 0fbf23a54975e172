"""Base and scaling of rotary angles, in both spellings of ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.config.reader import ConfigReader

_LENGTH = "original_max_position_embeddings"
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": ("factor",),
}
"""Entries that a kind of scaling must have."""
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}
"""Entries of YaRN with the values that null and 0 stand for."""


def rope_from_hf(
    reader: ConfigReader, usual: Mapping[str, Any] | None = None, *, partial: bool = False
) -> dict[str, Any]:
    """Fields of the rotary embedding.

    Up to transformers 4 they are ``rope_theta`` and ``rope_scaling``; from 5 on both are in ``rope_parameters``. If a
    file has all of them (the context was lengthened by hand, say), ``rope_scaling`` replaces ``rope_parameters`` as a
    whole, base included, as in transformers.

    Args:
        usual: the family's scaling, for files without one.
        partial: True if the family reads the share of rotated features itself; all are rotated otherwise.
    """
    scaling, parameters = (reader.get(name, {}, null=True) for name in ("rope_scaling", "rope_parameters"))
    name, given = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters or usual or {})
    return rope_of(reader, name, {"rope_theta": reader.get("rope_theta", 10000.0), **given}, partial=partial)


def rope_of(reader: ConfigReader, name: str, given: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
    """Fields of one rotary embedding.

    Args:
        reader: reader of ``config.json``, which collects the faults.
        name: name of the mapping in messages.
        given: its entries, with its base.
        partial: True if the family reads the share of rotated features itself; all are rotated otherwise.
    """
    rope = ConfigReader(given)
    theta = rope.get("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    for source in (reader, rope):
        share = source.get("partial_rotary_factor", 1.0, null=True)
        if share != 1.0 and not partial:
            source.refuse("partial_rotary_factor", share, "all features of a head are rotated", (1.0,))
    if kind in _NEEDED:
        rule = _rule(rope, kind, reader.get("max_position_embeddings", 2048))
        rope.refuse_unread(f"no known entry of the kind {kind}")
    else:
        rule = None
        rope.refuse("rope_type", kind, "unknown way to stretch positions", tuple(_NEEDED))
    if kind in ("llama3", "yarn"):
        length = (rule or {}).get(_LENGTH)
        reason = f"{name} has {length!r} of it, and only some versions of transformers read this one"
        reader.expect(_LENGTH, length, (length,), reason)
    reader.take_over(rope, name)
    return {"position_embedding": "rope", "rope_theta": float(theta), "rope_scaling": rule}


def _rule(rope: ConfigReader, kind: str, positions: int) -> dict[str, Any] | None:
    """Fields of a scaling rule."""
    if kind == "default":
        return None
    found = {"kind": kind} | {key: _needed(rope, key) for key in _NEEDED[kind]}
    if kind == "dynamic":
        found[_LENGTH] = positions
    if kind == "yarn":
        found[_LENGTH] = rope.get(_LENGTH, positions)
        found |= {key: rope.get(key, usual, null=True) or usual for key, usual in _YARN.items()}
        found["truncate"] = rope.get("truncate", True)
        found["attention_factor"] = rope.get("attention_factor", 0.0, null=True)
        if rope.has("attention_factor") and found["attention_factor"] == 0:
            rope.refuse("attention_factor", 0, "makes cosines and sines 0")
    return found


def _needed(rope: ConfigReader, key: str) -> Any:
    if not rope.has(key):
        rope.refuse(key, None, "missing in the Hugging Face configuration")
    return rope.required(key) if key == _LENGTH and rope.has(key) else rope.get(key, 0.0)


def rope_to_hf(reader: ConfigReader) -> dict[str, Any]:
    """Entries of the rotary embedding, in the old spelling: all versions of transformers read it."""
    scaling = dict(reader["rope_scaling"] or {})
    kind = scaling.pop("kind", "default")
    if kind == "dynamic" and (length := scaling.pop(_LENGTH)) != (positions := reader["max_position_embeddings"]):
        reason = "transformers takes max_position_embeddings for it"
        reader.refuse(f"rope_scaling.{_LENGTH}", length, reason, (positions,))
    if kind == "yarn":
        usual = {"attention_factor": 0.0, "mscale": 0.0, "mscale_all_dim": 0.0, "truncate": True}
        scaling = {key: value for key, value in scaling.items() if key not in usual or value != usual[key]}
    return {"rope_theta": reader["rope_theta"], "rope_scaling": {"rope_type": kind, **scaling} if scaling else None}
