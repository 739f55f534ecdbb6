"""Recurrent models: a language model, a tagger, and an encoder-decoder with attention.

`model.apply({"params": params}, tokens, state=state, valid=valid) -> (logits f32, state)` is
training, prefill and decoding alike, as it is with the transformers: any number of tokens at a
time. A token that is not `valid` is padding: it leaves its row's state as it was.

    RNN    h' = tanh(W x + U h + b)
    LSTM   i, f, o = sigmoid(W x + U h + b);  g = tanh(W_g x + U_g h + b_g)
           c' = f c + i g;  h' = o tanh(c')
    GRU    r, z = sigmoid(W x + U h + b);  n = tanh(W_n x + b_n + r (U_n h + u_n))
           h' = (1 - z) n + z h

Layers stand on top of each other, with dropout between them only (Zaremba et al. 2014). The
encoder's states m_s are averaged to a context c, where the config's `context` says:

    output   h' = cell(y, h);      c = attend(h', m);  logits from tanh(W [c; h'])
    input    c = attend(h, m);     h' = cell([y; c], h);  logits from tanh(W [c; h'])
    state    h~ = cell(y, h);      c = attend(h~, m);  h' = tanh(W [c; h~]);  logits from h'

h is the top state before the token y. Luong et al. 2015 have the first, Bahdanau et al. 2015 the
second; in the third the combined state itself is the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.additive import additive_attention, state_attention
from transformer_jax.attention.masks import Padding
from transformer_jax.checks import check_count
from transformer_jax.config import RecurrentConfig, WindowConfig
from transformer_jax.models.functional import dropout, lookup, split_key
from transformer_jax.models.layers import parameter, refuse_rngs, refuse_surplus
from transformer_jax.models.packing import (
    check_segments,
    check_valid,
    first_tokens,
    last_document,
    number_documents,
)
from transformer_jax.models.transformer import check_one, check_tokens, gather_tokens
from transformer_jax.pytree import exportable
from transformer_jax.shown import short_repr

F32 = jnp.float32

Carry = tuple[Any, ...]
"""Of each layer, h [B, H] of an RNN or a GRU, or (c, h) of an LSTM."""


@short_repr
@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SourceMemory:
    """Hold an encoder's states, which the decoder's attention looks at."""

    states: jax.Array  # [B, S, M]; zeros where padded
    valid: jax.Array  # bool[B, S]
    keys: jax.Array | None = None  # [B, S, A]: additive attention's states w_key, computed once


@short_repr
@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """Hold all a model remembers of the tokens so far; goes in and comes out, never mutated."""

    carry: Carry
    length: jax.Array  # i32[B]: tokens read
    memory: SourceMemory | None = None
    weights: jax.Array | None = None  # f32[B, S]: attention of the last token; zeros before any


def init_recurrent_state(config: RecurrentConfig, batch: int) -> RecurrentState:
    """Make the state of a language model that has read nothing.

    An encoder-decoder reads its source first: `model.apply(..., source, method="init_state")`.
    """
    if config.source_vocab_size is not None:
        rule = "its state starts from a source: model.apply(..., source, method='init_state')"
        raise ValueError(f"source_vocab_size is {config.source_vocab_size}: {rule}")
    if config.bidirectional:
        raise ValueError("bidirectional is True: a model that reads both ends has no state")
    check_count("batch", batch, 0)
    return RecurrentState(_zero_carry(config, batch), jnp.zeros((batch,), jnp.int32))


class Vocabulary(nn.Module):
    """Turn tokens into vectors, and vectors into logits."""

    config: RecurrentConfig | WindowConfig

    def setup(self) -> None:
        cfg = self.config
        normal = nn.initializers.normal(cfg.init_std)
        self.tokens = parameter(self, "tokens", normal, (cfg.vocab_size, cfg.d_embed))
        if not cfg.tie_embeddings:
            self.output = parameter(self, "output", normal, (cfg.vocab_size, cfg.read_out_dim))
        self.bias = parameter(self, "bias", nn.initializers.zeros, (cfg.vocab_size,))
        refuse_surplus(self)

    def __call__(
        self, tokens: jax.Array, valid: jax.Array, key: jax.Array | None
    ) -> jax.Array:  # [B, T, E]
        return _embed(self.tokens, tokens, valid, self.config.dropout, key)

    def logits(self, x: jax.Array) -> jax.Array:  # [B, T, H] -> f32[B, T, V]
        """Return x W^T + b."""
        table = self.tokens if self.config.tie_embeddings else self.output
        return jnp.einsum("BTH,VH->BTV", x, table) + self.bias[None, None]


class RecurrentEncoder(nn.Module):
    """Compute the source's states, from one end or from both (Schuster & Paliwal 1997)."""

    config: RecurrentConfig

    @nn.compact
    def __call__(
        self,
        source: jax.Array,  # i32[B, S]
        valid: jax.Array,  # bool[B, S]
        key: jax.Array | None,
    ) -> tuple[jax.Array, Carry]:  # [B, S, M], zeros where padded; the decoder's first carry
        """Read the source, and return the first carry of the decoder.

        Layer i of the decoder starts from the last states of layer i here: of one direction as
        they are, of two as tanh(W [forward; backward] + b).
        """
        cfg, carry = self.config, []
        normal = nn.initializers.normal(cfg.init_std)
        assert cfg.source_vocab_size is not None  # as in every config with a source
        table = parameter(self, "tokens", normal, (cfg.source_vocab_size, cfg.d_embed))
        keys = split_key(key, cfg.num_layers)
        x = _embed(table, source, valid, cfg.dropout, keys[0])
        for i in range(cfg.num_layers):
            if i > 0:
                x = dropout(x, cfg.dropout, keys[i])
            x, last, first = _encoder_layer(cfg, i, x, valid)
            if first is not None:
                ends = jnp.concatenate(jax.tree.leaves((last, first)), axis=-1)
                parts, tree = jax.tree.flatten(last)
                bridge = nn.Dense(len(parts) * cfg.d_hidden, name=f"bridge_{i}")
                start = jnp.split(jnp.tanh(bridge(ends)), len(parts), axis=-1)
                last = jax.tree.unflatten(tree, start)
            carry.append(last)
        refuse_surplus(self)
        return x, tuple(carry)


class RecurrentDecoder(nn.Module):
    """Cells on top of each other, and their attention to a source."""

    config: RecurrentConfig

    def setup(self) -> None:
        cfg = self.config
        self.cell = [_cell(cfg) for _ in range(cfg.num_layers)]
        if cfg.attention is None:
            refuse_surplus(self)
            return
        init = nn.initializers.lecun_normal()
        if cfg.attention == "additive":
            self.w_query = parameter(self, "w_query", init, (cfg.d_hidden, cfg.attention_dim))
            self.w_key = parameter(self, "w_key", init, (cfg.memory_dim, cfg.attention_dim))
            normal = nn.initializers.normal(cfg.attention_dim**-0.5)
            self.v = parameter(self, "v", normal, (cfg.attention_dim,))
        if cfg.attention == "general":
            self.w = parameter(self, "w", init, (cfg.d_hidden, cfg.memory_dim))
        self.read_out = nn.Dense(cfg.d_hidden, use_bias=False)
        refuse_surplus(self)

    def remember(self, states: jax.Array, valid: jax.Array) -> SourceMemory:
        """Return the encoder's states as attention reads them."""
        valid = jnp.array(valid, copy=True)  # a state is consumed by decoding, a caller's mask not
        if self.config.attention != "additive":
            return SourceMemory(states, valid)
        return SourceMemory(states, valid, jnp.einsum("BSM,MA->BSA", states, self.w_key))

    def __call__(
        self,
        x: jax.Array,  # [B, T, E]
        valid: jax.Array,  # bool[B, T]
        state: RecurrentState,
        key: jax.Array | None,
        starts: jax.Array | None = None,  # bool[B, T]: tokens before which the carry is zeros
    ) -> tuple[jax.Array, RecurrentState]:  # [B, T, H]
        """Return what the logits are read from, and the state after the tokens."""
        cfg, memory = self.config, state.memory
        between = key if cfg.num_layers > 1 and cfg.dropout > 0 else None
        keys = None if between is None else jax.random.split(between, x.shape[1])
        read = nn.scan(
            RecurrentDecoder._read,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=(1, 1, 0, 1, nn.broadcast),
            out_axes=1,
        )
        (carry, weights), (top, context) = read(
            self, (state.carry, state.weights), x, valid, keys, starts, memory
        )
        if context is not None:
            top = self._combine(context, top)
        length = state.length + valid.sum(axis=1, dtype=jnp.int32)
        return top, RecurrentState(carry, length, memory, weights)

    def _read(
        self,
        before: tuple[Carry, jax.Array | None],
        x: jax.Array,  # [B, E]
        valid: jax.Array,  # bool[B]
        key: jax.Array | None,
        start: jax.Array | None,  # bool[B]
        memory: SourceMemory | None,
    ) -> tuple[tuple[Carry, jax.Array | None], tuple[jax.Array, jax.Array | None]]:
        """Read a token of every row: the carry and weights after it, the top state and context."""
        cfg, (carry, weights) = self.config, before
        carry = _zero_at(start, carry)
        before = carry, weights
        context, new = None, []
        if cfg.context_use == "input":
            context, weights = self._attend(_hidden(carry[-1]), memory)
            x = jnp.concatenate([x, context], axis=-1)
        keys = split_key(key, cfg.num_layers)
        for i, cell in enumerate(self.cell):
            if i > 0:
                x = dropout(x, cfg.dropout, keys[i])
            layer, x = cell(carry[i], x)
            new.append(layer)
        if cfg.context_use in ("output", "state"):
            context, weights = self._attend(x, memory)
        if cfg.context_use == "state":
            context, x = None, self._combine(context, x)
            new[-1] = (new[-1][0], x) if isinstance(new[-1], tuple) else x
        return _keep(valid, (tuple(new), weights), before), (x, context)

    def _combine(self, context: Any, state: jax.Array) -> jax.Array:  # [..., M], [..., H]
        """Return tanh(W [context; state])."""
        return jnp.tanh(self.read_out(jnp.concatenate([context, state], axis=-1)))

    def _attend(self, query: jax.Array, memory: Any) -> tuple[jax.Array, jax.Array]:
        """Context [B, M] and weights f32[B, S] of one query [B, H] a row."""
        query, mask = query[:, None], Padding(memory.valid)
        if self.config.attention == "additive":
            context, weights = additive_attention(
                query, memory.keys, memory.states, w_query=self.w_query, w_key=None, v=self.v,
                mask=mask,
            )  # fmt: skip
        else:
            w = self.w if self.config.attention == "general" else None
            context, weights = state_attention(query, memory.states, w=w, mask=mask)
        return context[:, 0], weights[:, 0]


class RecurrentLM(nn.Module):
    """Language model (Mikolov et al. 2010; Zaremba et al. 2014)."""

    config: RecurrentConfig

    def setup(self) -> None:
        self.embed = Vocabulary(self.config)
        self.decoder = RecurrentDecoder(self.config)
        refuse_surplus(self)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        state: RecurrentState | None = None,
        valid: jax.Array | None = None,  # bool[B, T]; False is padding
        segments: jax.Array | None = None,  # i32[B, T]: ids of packed documents
        at: jax.Array | None = None,  # i32[B, Q]; None is every token
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, RecurrentState]:
        """Return logits f32[B, T, V] of the next token, and the state after these.

        With `segments` the carry is zeros before the first token of each run of equal ids, so each
        document is read as if alone; the state is that of the last one. `segments` with a `state`
        is a ValueError. `at` asks for the logits [B, Q, V] after the tokens of these indices
        alone.
        """
        check_tokens(tokens, self.config.vocab_size)
        check_segments(tokens, segments, state)
        if state is None:
            state = init_recurrent_state(self.config, tokens.shape[0])
        return read_tokens(self, tokens, state, valid, at, key, segments)


class RecurrentTagger(nn.Module):
    """Give logits for each token of a text that is read from both ends (Graves et al. 2005).

    For training on masked tokens, to tag, or to classify. In each layer one cell reads forward and
    one backward; both outputs together go to the next layer, and tanh(W [forward; backward] + b) to
    the logits.
    """

    config: RecurrentConfig

    def setup(self) -> None:
        self.embed = Vocabulary(self.config)
        self.layers = BothDirections(self.config)
        self.read_out = nn.Dense(self.config.read_out_dim)
        if self.config.num_classes is not None:
            self.classifier = nn.Dense(self.config.num_classes)
        refuse_surplus(self)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        valid: jax.Array | None = None,  # bool[B, T]; False is padding
        segments: jax.Array | None = None,  # i32[B, T]: ids of packed documents
        at: jax.Array | None = None,  # i32[B, Q]; None is every token
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        """Return logits f32[B, T, V] of each token's own place, and None for a state.

        With `segments` both directions begin anew at each run of equal ids. `at` asks for the
        logits [B, Q, V] of these indices alone. `key` turns dropout on. ValueError where arguments
        do not fit.
        """
        check_segments(tokens, segments, None)
        read_key, top_key = split_key(key, 2)
        states, valid = self._read(tokens, valid, segments, read_key)
        x = dropout(jnp.tanh(self.read_out(states)), self.config.dropout, top_key)
        if self.config.num_classes is not None and self.is_initializing():
            self._classes(states, valid, None)
        return self.embed.logits(x if at is None else gather_tokens(x, at)), None

    def classify(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        valid: jax.Array | None = None,  # bool[B, T]; False is padding
        key: jax.Array | None = None,
    ) -> jax.Array:  # f32[B, C]
        """Return class logits W [forward; backward] + b of each row.

        forward is the top layer's state after the last token of a row, backward the one after the
        first: each has read the whole row. `key` turns dropout on. ValueError where the model has
        no classification head or the arguments do not fit.
        """
        if self.config.num_classes is None:
            raise ValueError("num_classes is None: this model has no classification head")
        read_key, top_key = split_key(key, 2)
        states, valid = self._read(tokens, valid, None, read_key)
        return self._classes(states, valid, top_key)

    def _read(
        self,
        tokens: jax.Array,  # i32[B, T]
        valid: jax.Array | None,  # bool[B, T]
        segments: jax.Array | None,  # i32[B, T]
        key: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:  # [B, T, 2 H], bool[B, T]
        """Return the states of both directions at each token, and which tokens are no padding."""
        refuse_rngs(self, key)
        check_tokens(tokens, self.config.vocab_size)
        valid = check_valid("tokens", tokens, valid)
        embed_key, layers_key = split_key(key, 2)
        x = self.embed(tokens, valid, embed_key)
        return self.layers(x, valid, segments, layers_key), valid

    def _classes(
        self,
        states: jax.Array,  # [B, T, 2 H]
        valid: jax.Array,  # bool[B, T]
        key: jax.Array | None,
    ) -> jax.Array:  # f32[B, C]
        first = jnp.argmax(valid, axis=1)
        last = valid.shape[1] - 1 - jnp.argmax(valid[:, ::-1], axis=1)
        forward, backward = jnp.split(gather_tokens(states, jnp.stack([last, first], 1)), 2, axis=2)
        x = jnp.concatenate([forward[:, 0], backward[:, 1]], axis=-1)
        return self.classifier(dropout(x, self.config.dropout, key)).astype(F32)


class BothDirections(nn.Module):
    """Read vectors from both ends, in layers on top of each other (Schuster & Paliwal 1997)."""

    config: RecurrentConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, E]
        valid: jax.Array,  # bool[B, T]
        segments: jax.Array | None,  # i32[B, T]
        key: jax.Array | None,
    ) -> jax.Array:  # [B, T, 2 H], zeros where padded
        """Return the forward and the backward state of the top layer at each token."""
        cfg = self.config
        starts = ends = None
        if segments is not None:
            starts = first_tokens(number_documents(segments), valid)
            ends = first_tokens(number_documents(segments[:, ::-1]), valid[:, ::-1])[:, ::-1]
        keys = split_key(key, cfg.num_layers)
        for i in range(cfg.num_layers):
            if i > 0:
                x = dropout(x, cfg.dropout, keys[i])
            x = _encoder_layer(cfg, i, x, valid, starts, ends)[0]
        refuse_surplus(self)
        return x


class RecurrentSeq2Seq(nn.Module):
    """Source in, target out (Sutskever et al. 2014), with attention (Bahdanau et al. 2015)."""

    config: RecurrentConfig

    def setup(self) -> None:
        self.encoder = RecurrentEncoder(self.config)
        self.embed = Vocabulary(self.config)
        self.decoder = RecurrentDecoder(self.config)
        refuse_surplus(self)

    def init_state(
        self,
        source: jax.Array,  # i32[B, S]
        *,
        valid: jax.Array | None = None,  # bool[B, S]; False is padding
        key: jax.Array | None = None,
    ) -> RecurrentState:
        """Read the source once: what the decoder starts from, and its attention looks at."""
        refuse_rngs(self, key)
        vocab_size = self.config.source_vocab_size
        assert vocab_size is not None
        check_tokens(source, vocab_size)
        valid = check_valid("source", source, valid)
        states, carry = self.encoder(source, valid, key)
        start = jnp.zeros((source.shape[0],), jnp.int32)
        if self.config.attention is None:
            return RecurrentState(carry, start)
        memory = self.decoder.remember(states, valid)
        return RecurrentState(carry, start, memory, jnp.zeros(source.shape, F32))

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]: the target
        *,
        source: jax.Array | None = None,  # i32[B, S]
        source_valid: jax.Array | None = None,  # bool[B, S]; False is padding
        state: RecurrentState | None = None,
        valid: jax.Array | None = None,  # bool[B, T]; False is padding
        at: jax.Array | None = None,  # i32[B, Q]; None is every token
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, RecurrentState]:
        """Return logits f32[B, T, V] of the next target token: from a `source`, or from a `state`.

        `at` asks for the logits [B, Q, V] after the tokens of these indices alone.
        """
        if (source is None) == (state is None):
            raise ValueError("give either source or state: a state has already read its source")
        if source is None and source_valid is not None:
            raise ValueError("source_valid without a source: a state has already read it")
        refuse_rngs(self, key)
        check_tokens(tokens, self.config.vocab_size)
        encoder_key, key = split_key(key, 2)
        if source is not None:
            state = self.init_state(source, valid=source_valid, key=encoder_key)
        assert state is not None
        return read_tokens(self, tokens, state, valid, at, key)


def read_tokens(
    model: RecurrentLM | RecurrentSeq2Seq,
    tokens: jax.Array,
    state: RecurrentState,
    valid: jax.Array | None,
    at: jax.Array | None,
    key: jax.Array | None,
    segments: jax.Array | None = None,
) -> tuple[jax.Array, RecurrentState]:
    """Embed, run the decoder's cells and read the logits; shared by both models."""
    refuse_rngs(model, key)
    check_state(model.config, state, tokens.shape[0])
    valid = check_valid("tokens", tokens, valid)
    embed_key, cells_key, top_key = split_key(key, 3)
    x = model.embed(tokens, valid, embed_key)
    if segments is None:
        x, state = model.decoder(x, valid, state, cells_key)
    else:
        documents = number_documents(segments)
        x, state = model.decoder(x, valid, state, cells_key, first_tokens(documents, valid))
        last = last_document(documents, valid).max(axis=1, initial=0, keepdims=True)
        read = (valid & (documents == last)).sum(axis=1, dtype=jnp.int32)
        state = replace(state, length=read)
    x = dropout(x, model.config.dropout, top_key)
    return model.embed.logits(x if at is None else gather_tokens(x, at)), state


@short_repr
@dataclass(frozen=True)
class RecurrentStep:
    """Run `RecurrentLM` or `RecurrentSeq2Seq` as a step; the state is its `RecurrentState`."""

    model: RecurrentLM | RecurrentSeq2Seq

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,  # i32[B, T]
        state: RecurrentState,
        *,
        valid: jax.Array | None = None,  # bool[B, T]
    ) -> tuple[jax.Array, RecurrentState]:  # f32[B, T, V]
        return self.read(params, tokens, state, None, valid=valid)

    def read(
        self,
        params: Any,
        tokens: jax.Array,  # i32[B, T]
        state: RecurrentState,
        at: jax.Array | None,  # i32[B, Q]
        *,
        valid: jax.Array | None = None,  # bool[B, T]
    ) -> tuple[jax.Array, RecurrentState]:  # f32[B, Q, V]
        """Do as a call, with the logits after the tokens `at` alone."""
        result: Any = self.model.apply({"params": params}, tokens, state=state, valid=valid, at=at)
        return result

    def attend(
        self,
        params: Any,
        tokens: jax.Array,  # i32[B, 1]
        state: RecurrentState,
        *,
        valid: jax.Array | None = None,  # bool[B, 1]
    ) -> tuple[jax.Array, RecurrentState, jax.Array]:
        """Do as a call with one token a row, and return its weights f32[B, S]; 0 if not valid."""
        check_one(tokens)
        if self.model.config.attention is None:
            raise ValueError("attention is None: this model has no attention weights")
        logits, state = self(params, tokens, state, valid=valid)
        assert state.weights is not None
        weights = state.weights if valid is None else jnp.where(valid, state.weights, 0.0)
        return logits, state, weights

    def check(self, prompt: np.ndarray, state: RecurrentState, total: np.ndarray) -> None:
        """ValueError where the prompt or the state is not this model's; no length is too long."""
        check_tokens(prompt, self.model.config.vocab_size)
        check_state(self.model.config, state, prompt.shape[0], "prompt has")


def check_state(
    config: RecurrentConfig, state: RecurrentState, rows: int, said: str = "tokens have"
) -> None:
    """Raise ValueError unless the state has the tokens' rows and the model's cells and memory."""
    if not isinstance(state, RecurrentState):
        raise ValueError(f"state is a {type(state).__name__}: must be a RecurrentState")
    held = state.length.shape[0]
    if held != rows:
        raise ValueError(f"{said} {rows} rows, the state {held}")
    wanted = jax.eval_shape(lambda: _zero_carry(config, rows))
    given, needed = (jax.tree.map(lambda leaf: leaf.shape, c) for c in (state.carry, wanted))
    if given != needed:
        raise ValueError(f"state.carry has shapes {given}: this model's are {needed}")
    memory = state.memory
    if config.attention is None:
        if memory is not None:
            raise ValueError("state.memory is given, but attention is None")
        return
    if memory is None:
        raise ValueError("state.memory is None: start it from a source, with method='init_state'")
    if memory.states.shape[-1] != config.memory_dim:
        raise ValueError(
            f"state.memory is {memory.states.shape[-1]} wide: the model's is {config.memory_dim}"
        )
    width = None if memory.keys is None else memory.keys.shape[-1]
    wide = config.attention_dim if config.attention == "additive" else None
    if width != wide:
        raise ValueError(f"state.memory.keys are {width} wide: attention needs {wide}")


def _cell(config: RecurrentConfig, name: str | None = None) -> nn.RNNCellBase:
    cells = {"rnn": nn.SimpleCell, "lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}
    return cells[config.cell](config.d_hidden, name=name)


def _zero_carry(config: RecurrentConfig, rows: int) -> Carry:
    zero = jnp.zeros((rows, config.d_hidden), F32)
    return ((zero, zero) if config.cell == "lstm" else zero,) * config.num_layers


def _hidden(layer: Any) -> jax.Array:  # [B, H]
    """Return h of a layer's carry."""
    return layer[1] if isinstance(layer, tuple) else layer


def _keep(valid: jax.Array, new: Any, old: Any) -> Any:
    """Return `new` in rows that are valid [B], `old` in the others."""
    return jax.tree.map(lambda n, o: jnp.where(valid[:, None], n, o), new, old)


def _zero_at(start: jax.Array | None, carry: Any) -> Any:
    """Return the carry with zeros in the rows that begin a document, bool[B]; None has none."""
    if start is None:
        return carry
    return _keep(start, jax.tree.map(jnp.zeros_like, carry), carry)


def _encoder_layer(
    config: RecurrentConfig,
    index: int,
    x: jax.Array,  # [B, S, D]
    valid: jax.Array,  # bool[B, S]
    starts: jax.Array | None = None,  # bool[B, S]
    ends: jax.Array | None = None,  # bool[B, S]
) -> tuple[jax.Array, Any, Any]:  # [B, S, M]; the last carry forward, and backward or None
    """Read a sequence by one layer, from both ends if so configured; zeros where padded.

    Called inside a compact module, whose parameters `cell_i` and `back_i` are.
    """
    zero, first = _zero_carry(config, x.shape[0])[0], None
    last, out = _run(_cell(config, f"cell_{index}"), zero, x, valid, starts)
    if config.bidirectional:
        back_cell = _cell(config, f"back_{index}")
        first, back = _run(back_cell, zero, x, valid, ends, reverse=True)
        out = jnp.concatenate([out, back], axis=-1)
    return jnp.where(valid[:, :, None], out, 0.0), last, first


def _run(
    cell: nn.RNNCellBase,
    carry: Any,
    x: jax.Array,  # [B, S, D]
    valid: jax.Array,  # bool[B, S]
    starts: jax.Array | None = None,  # bool[B, S]: tokens before which the carry is zeros
    reverse: bool = False,
) -> tuple[Any, jax.Array]:  # [B, S, H]
    """Run a cell over a sequence, if `reverse` from its end: its last carry, and all it gave."""

    def read(
        cell: nn.RNNCellBase, carry: Any, x: jax.Array, valid: jax.Array, start: jax.Array | None
    ) -> tuple[Any, jax.Array]:
        carry = _zero_at(start, carry)
        new, out = cell(carry, x)
        return _keep(valid, new, carry), out

    scan = nn.scan(
        read,
        variable_broadcast="params",
        split_rngs={"params": False},
        in_axes=1,
        out_axes=1,
        reverse=reverse,
    )
    return scan(cell, carry, x, valid, starts)


def _embed(
    table: jax.Array, tokens: jax.Array, valid: jax.Array, rate: float, key: jax.Array | None
) -> jax.Array:  # [B, T, E]
    """Rows of the table, with dropout; zeros where padded, or 0 * NaN would enter gradients."""
    return dropout(jnp.where(valid[:, :, None], lookup(table, tokens), 0.0), rate, key)
