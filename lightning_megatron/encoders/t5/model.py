"""T5 (https://arxiv.org/abs/1910.10683): an encoder reads a text, a decoder that attends to it writes another.

Residual streams are ``[S, B, H]``; callers see ``[B, S]``. Every stage of a pipeline passes on both streams,
concatenated in one activation ``[S + T, B, H]``: the first stage, which alone has the embedding, embeds the tokens of
both. The encoder's stages forward the decoder's embedded tokens, and the decoder's stages the encoder's output. So a
stage may hold any consecutive layers, even the last ones of the encoder with the first ones of the decoder, and every
schedule works.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.config.recompute_plan import NO_RECOMPUTE
from lightning_megatron.context_parallel.inputs import shard_inputs
from lightning_megatron.encoders.t5.config import T5Config
from lightning_megatron.encoders.t5.cross_attention import MemoryCache
from lightning_megatron.encoders.t5.parts import DecoderCache, Memory, RelativeBias, StackEnd, T5Block, T5Head
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.layers.init import seeded
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.compiled import without_graphs
from lightning_megatron.models.stages import Parts, StagedModel, in_own_dtype, mean_weights
from lightning_megatron.models.transformer import Embedding
from lightning_megatron.ops.registry import Ops


class T5Inputs(NamedTuple):
    """Inputs of T5.

    Attributes:
        tokens: ids for the encoder, ``[B, S]``.
        decoder_tokens: ids for the decoder, ``[B, T]``.
        padding_mask: ``[B, S]``, 1 or True for tokens of the encoder, 0 for padding; ``None`` for no padding. Padding
            of the decoder comes last, where no token sees it.
    """

    tokens: Tensor
    decoder_tokens: Tensor
    padding_mask: Tensor | None = None


class T5Model(StagedModel):
    """Embedding, two stacks of blocks, head; on a mesh of one rank the reference for all layouts.

    Arguments and errors as of :class:`StagedModel`.

    Attributes:
        encoder_bias: relative positions of the encoder; ``None`` on a rank without an encoder layer. If several stages
            hold them, their gradients are summed.
        decoder_bias: relative positions of the decoder, likewise.
        encoder_end: norm after the encoder; ``None`` on a rank without its last layer.
    """

    config: T5Config
    head: T5Head | None

    def _classes(self) -> Parts:
        return Parts(Embedding, T5Block, T5Head)

    def _add_parts(self, mesh: ParallelMesh, ops: Ops) -> None:
        config, here = self.config, {int(number) for number in self.layers}
        encoder, decoder = config.stacks["encoder"], config.stacks["decoder"]
        self.encoder_bias = self.decoder_bias = None
        if here.intersection(encoder):
            with seeded(self._seed, config.num_layers + 2):
                self.encoder_bias = RelativeBias(config, mesh, both_sides=True)
        if here.intersection(decoder):
            with seeded(self._seed, config.num_layers + 3):
                self.decoder_bias = RelativeBias(config, mesh, both_sides=False)
        self.encoder_end: StackEnd | None = None
        if encoder[-1] in here:
            self.encoder_end = StackEnd(config, mesh, sequence_parallel=self.sequence_parallel, ops=ops)

    def forward(self, inputs: T5Inputs, labels: Tensor | None = None, loss_mask: Tensor | None = None) -> Tensor:
        """Logits, or with labels the loss; on a stage that is not the last, the end of the step.

        Args:
            inputs: tokens of both stacks.
            labels: ``[B, T]`` ids that the decoder should write; -100 is ignored.
            loss_mask: ``[B, T]``, weight of each token in the loss; ``None`` for 1.

        Returns:
            ``[B, T, V]``, or the mean loss over tokens of weight 1.

        Raises:
            RuntimeError: if the model is cut into stages and no schedule is running.
        """
        with in_own_dtype(self):
            decoded = self._decoded(inputs)
            assert self.head is not None
            if labels is None:
                logits = self.head(decoded, self.tied_weight)  # [T, B, V]
                return self._sharding.gather(logits, inputs.decoder_tokens.shape[1]).transpose(0, 1)
            weights = self._sharding.shard(mean_weights(labels, loss_mask), 1)
            return self.head(decoded, self.tied_weight, labels=self._own_labels(labels).t(), token_weights=weights.t())

    def encode(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Memory:
        """Output of the encoder for tokens ``[B, S]``, of a model in one piece.

        Args:
            tokens: ids for the encoder.
            padding_mask: ``[B, S]``, 1 or True for tokens, 0 for padding; ``None`` for no padding.
        """
        with in_own_dtype(self):
            self._refresh()
            key_mask = self._key_mask(tokens, padding_mask)
            return Memory(self._encoded(self.config.stacks["encoder"], self._embedded(tokens), key_mask), key_mask)

    def decode(self, tokens: Tensor, memory: Memory, caches: Sequence[DecoderCache]) -> Tensor:
        """Append tokens ``[B, T]`` to those in the caches, and return the logits ``[B, 1, V]`` after the last one.

        Args:
            tokens: ids for the decoder.
            memory: result of :meth:`encode`.
            caches: keys and values, one per layer of the decoder; this call appends to them.
        """
        with in_own_dtype(self):
            first, length = caches[0].own.length, tokens.shape[1]
            # Decoding grows keys and values with every token: each length would compile another graph.
            with without_graphs(self.layers.values()):
                embedded = self._embedded(tokens, first)
                decoded = self._run_decoder(self.config.stacks["decoder"], embedded, memory, length, first, caches)
            for cache in caches:
                cache.own.truncate(first + length)
            assert self.head is not None
            logits = self.head(decoded, self.tied_weight, keep=slice(length - 1, length))
            return logits.transpose(0, 1)

    def caches(self) -> list[DecoderCache]:
        """Empty caches for :meth:`decode`."""
        return [DecoderCache(KVCache(), MemoryCache()) for _ in self.config.stacks["decoder"]]

    def _decoded(self, inputs: T5Inputs) -> Tensor:
        """This rank's shard of the decoder's stream; on a stage that is not the last, the end of the step."""
        stage, cut = self._current_stage(), self.config.num_encoder_layers
        self._refresh()
        key_mask = self._key_mask(inputs.tokens, inputs.padding_mask)
        if stage.has_embedding:
            encoded, decoded = self._embedded(inputs.tokens), self._embedded(inputs.decoder_tokens)
        else:
            lengths = [self.hidden_shape(tokens)[0] for tokens in (inputs.tokens, inputs.decoder_tokens)]
            encoded, decoded = self._received().split(lengths)
        encoded = self._encoded([number for number in stage.layers if number < cut], encoded, key_mask)
        layers = [number for number in stage.layers if number >= cut]
        decoded = self._run_decoder(layers, decoded, Memory(encoded, key_mask), inputs.decoder_tokens.shape[1])
        if not stage.has_loss:
            assert self._boundary is not None
            self._boundary.leave(torch.cat((encoded, decoded)))
        return decoded

    def _embedded(self, tokens: Tensor, first: int = 0) -> Tensor:
        """This rank's shard of the embedded tokens ``[B, S]``, the first of which is at position ``first``."""
        assert self.embedding is not None
        own = shard_inputs(tokens, None, self._sharding, first)
        out: Tensor = self.embedding(own.tokens, own.positions)
        return out

    def _encoded(self, layers: Sequence[int], hidden: Tensor, key_mask: Tensor | None) -> Tensor:
        """The encoder's stream after ``layers``; after its last layer, its output."""
        if not layers:
            return hidden
        assert self.encoder_bias is not None
        length = hidden.shape[0] * (self.axis.size if self.sequence_parallel else 1)
        bias = self.encoder_bias(range(length), length, key_mask)
        hidden = self._run_layers(layers, hidden, bias)
        if layers[-1] != self.config.num_encoder_layers - 1:
            return hidden
        assert self.encoder_end is not None
        out: Tensor = self.encoder_end(hidden)
        return out

    def _run_decoder(
        self,
        layers: Sequence[int],
        hidden: Tensor,
        memory: Memory,
        length: int,
        first: int = 0,
        caches: Sequence[DecoderCache] | None = None,
    ) -> Tensor:
        """The decoder's stream of ``length`` tokens, the first at position ``first``, after ``layers``."""
        if not layers:
            return hidden
        assert self.decoder_bias is not None
        end = first + length + self._sharding.padding(length)
        bias = self.decoder_bias(range(first, end), end)
        return self._run_layers(layers, hidden, bias, memory, caches)

    def _run_layers(
        self,
        layers: Sequence[int],
        hidden: Tensor,
        bias: Tensor,
        memory: Memory | None = None,
        caches: Sequence[DecoderCache] | None = None,
    ) -> Tensor:
        """Layers of one stack, in the groups of the recomputation plan."""
        plan = NO_RECOMPUTE if caches else self.recompute  # recomputation would append to the caches twice
        # Biases are of this rank's heads, and all layers share the memory.
        run = partial(self._run_group, bias=bias, memory=memory, caches=caches)
        for group in plan.groups(layers):
            hidden = self._planned(run, group)(hidden, group.layers)
        return hidden

    def _run_group(
        self,
        hidden: Tensor,
        layers: Sequence[int],
        bias: Tensor,
        memory: Memory | None,
        caches: Sequence[DecoderCache] | None,
    ) -> Tensor:
        for number in layers:
            cache = caches[number - self.config.num_encoder_layers] if caches else None
            own, of_memory = cache or (None, None)
            hidden, _ = self.layers[str(number)](hidden, cache=own, bias=bias, memory=memory, memory_cache=of_memory)
        return hidden
