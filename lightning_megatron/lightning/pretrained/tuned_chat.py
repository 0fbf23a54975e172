"""The chat template that a model was tuned on, and the token that ends its answers: from checkpoints into exports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT = "chat"
"""Key of the state of a data module, and of a checkpoint of merged weights: ``template`` and ``end_token_id``."""

_EOS = "eos_token_id"


@dataclass(frozen=True)
class TunedChat:
    """Template and end token with which a model was tuned.

    Attributes:
        template: text of the chat template; ``None`` if the model was not tuned on chats.
        end_token_id: token that ends an answer; ``None`` if there is none.
    """

    template: str | None = None
    end_token_id: int | None = None

    @classmethod
    def of_checkpoint(cls, meta: Mapping[str, Any]) -> TunedChat:
        """Read a checkpoint's dictionary."""
        states = (meta, *(state for state in meta.values() if isinstance(state, Mapping)))
        found: Mapping[str, Any] = next((state[CHAT] for state in states if isinstance(state.get(CHAT), Mapping)), {})
        template, end = found.get("template"), found.get("end_token_id")
        return cls(template if isinstance(template, str) else None, end if isinstance(end, int) else None)

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of a checkpoint from which :meth:`of_checkpoint` reads; empty without a template."""
        return {} if self.template is None else {CHAT: vars(self)}

    def with_end(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Contents of ``config.json`` or ``generation_config.json`` in which the end of an answer ends generation."""
        ids = settings.get(_EOS)
        known = list(ids) if isinstance(ids, list) else [] if ids is None else [ids]
        if self.end_token_id is None or self.end_token_id in known:
            return dict(settings)
        return {**settings, _EOS: [*known, self.end_token_id] if known else self.end_token_id}

    def files(self, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
        """A tokenizer's files by name, with this template as its own."""
        if self.template is None or not tokenizer:
            return dict(tokenizer)
        others = {name: file for name, file in tokenizer.items() if name != "chat_template.json"}
        return {**others, "chat_template.jinja": self.template}
