"""Layers with and without a window: decoding with a cache, angles of two kinds, faults of the configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_llama

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset

SOME = tiny_llama(num_layers=3, sliding_window=4, sliding_window_layers=(0, 2), rope_local_theta=100.0)


def model_of(**changes: Any) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(SOME.replace(init_std=0.3, **changes)).eval()


@pytest.mark.parametrize("steps", [(1,) * 12, (5, 1, 6), (3, 9), (12,)])
def test_a_cache_in_steps_of_any_length_gives_the_logits_of_the_whole_text_and_holds_a_window(steps):
    model = model_of()
    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(1))
    caches = [KVCache(model.config.window(number)) for number in range(3)]
    with torch.no_grad():
        whole, first = model(tokens), 0
        for step in steps:
            logits = model(tokens[:, first : first + step], caches=caches)
            first += step
            torch.testing.assert_close(logits[:, -1], whole[:, first - 1], rtol=1e-5, atol=1e-5)
            assert [cache.length for cache in caches] == [first] * 3
            assert [cache.held for cache in caches] == [min(3, first), first, min(3, first)]


def test_a_token_does_not_depend_on_what_lies_before_the_windows_of_all_layers():
    model = model_of(sliding_window_layers=())
    tokens = torch.randint(40, (1, 16), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 5] = (tokens[0, 5] + 1) % 40
    with torch.no_grad():
        changed = (model(tokens) != model(other)).any(-1)[0]
    reach = 3 * (4 - 1)  # each layer looks three tokens further back
    assert changed.nonzero().flatten().tolist() == list(range(5, 5 + reach + 1))


def test_layers_with_a_window_have_angles_of_their_own():
    tokens = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = {theta: model_of(rope_local_theta=theta)(tokens) for theta in (0.0, SOME.rope_theta, 50.0)}
    assert torch.equal(logits[0.0], logits[SOME.rope_theta])
    assert not torch.allclose(logits[0.0], logits[50.0])


def test_a_smaller_copy_keeps_the_pattern_of_windows_and_the_scale_of_its_embedding():
    config = preset("gemma3-1b").replace(num_layers=8, hidden_size=64, num_attention_heads=4)
    assert [config.window(number) for number in range(8)] == [512] * 5 + [0] + [512] * 2
    assert config.embedding_scale == 8.0
    assert preset("gemma3-1b").replace(vocab_size=5).embedding_scale == 1152**0.5


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"sliding_window": -1}, "sliding_window=-1: must be"),
        ({"sliding_window": 4, "sliding_window_layers": (0, 2)}, "layers are numbered 0 to 1"),
        ({"sliding_window_layers": (0,)}, "there is no window"),
        ({"rope_local_theta": 10.0}, "there is none: set rope_theta, or sliding_window"),
        ({"attention_softcap": -1.0}, "attention_softcap=-1.0: must be"),
        ({"embedding_scale": 0.0}, "embedding_scale=0.0: must be"),
    ],
)
def test_faults_are_named(fields, told):
    with pytest.raises(ConfigError, match=told):
        tiny_llama(**fields)
