"""Entries of any ``config.json`` that do not affect what a model computes from its weights."""

from __future__ import annotations

from typing import Any

_FILES = {
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "quantization_config",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "trust_remote_code",
}
_TOKENS = {
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "pad_token_id",
    "prefix",
    "sep_token_id",
    "unk_token_id",
}
_OUTPUTS = {
    "chunk_size_feed_forward",
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tf_legacy_loss",
    "torchscript",
    "use_bfloat16",
    "use_cache",
}
_GENERATION = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
_PASSIVE = _FILES | _TOKENS | _OUTPUTS | _GENERATION
_OFF = {
    "add_cross_attention",
    "cross_attention_hidden_size",
    "is_decoder",
    "is_encoder_decoder",
    "pruned_heads",
    "tie_encoder_decoder",
}
"""Entries of other kinds of models, without effect if they are off."""


def is_passive(name: str, value: Any) -> bool:
    """True for an entry without effect: null, those above, and transformers' notes, which begin with an underscore."""
    return value is None or name in _PASSIVE or name.startswith("_") or (name in _OFF and not value)
