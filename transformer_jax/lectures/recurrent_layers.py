"""Define the parts of recurrent models: states, cells in layers, and attention to a source."""

from __future__ import annotations

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.attention.additive import additive_attention, state_attention
from transformer_jax.attention.masks import Padding
from transformer_jax.config import ConvolutionConfig, RecurrentConfig, WindowConfig
from transformer_jax.models.functional import dropout, split_key
from transformer_jax.models.layers import parameter, refuse_surplus
from transformer_jax.models.module import Module
from transformer_jax.models.ops import lookup
from transformer_jax.models.packing import first_tokens, number_documents
from transformer_jax.models.places import NOWHERE, Captured, Places, Visit
from transformer_jax.pytree import Tree, exportable
from transformer_jax.shown import short_repr

F32 = jnp.float32

LayerCarry = jax.Array | tuple[jax.Array, jax.Array]
"""The state of a layer: h [B, H] of an RNN or a GRU, (c, h) of an LSTM."""
Carry = tuple[LayerCarry, ...]


@short_repr
@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SourceMemory:
    """Hold an encoder's states, which the decoder's attention looks at.

    Attributes:
        states: [B, S, M], zeros where padded.
        valid: bool[B, S].
        keys: [B, S, A], additive attention's states w_key, computed once; else None.
    """

    states: jax.Array  # [B, S, M]
    valid: jax.Array  # bool[B, S]
    keys: jax.Array | None = None  # [B, S, A]


@short_repr
@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """Hold all a model remembers of the tokens so far; goes in and comes out, never mutated.

    Attributes:
        carry: of each layer h [B, H] of an RNN or a GRU, (c, h) of an LSTM.
        length: i32[B], tokens read.
        memory: of the source, which attention looks at; None without attention.
        weights: f32[B, S], attention of the last token, zeros before any; None without attention.
    """

    carry: Carry
    length: jax.Array  # i32[B]
    memory: SourceMemory | None = None
    weights: jax.Array | None = None  # f32[B, S]


class Vocabulary(Module):
    """Turn tokens into vectors, and vectors into logits."""

    config: RecurrentConfig | ConvolutionConfig | WindowConfig

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


class RecurrentEncoder(Module):
    """Compute the source's states, from one end or from both (Schuster & Paliwal 1997)."""

    config: RecurrentConfig

    @nn.compact
    def __call__(
        self,
        source: jax.Array,  # i32[B, S]
        valid: jax.Array,  # bool[B, S]
        key: jax.Array | None,
        places: Places = NOWHERE,
        positions: jax.Array | None = None,  # i32[S] or [B, S], for edits
    ) -> tuple[jax.Array, Carry, Captured]:  # [B, S, M], zeros where padded
        """Read the source; return its states, the first carry of the decoder, what is captured.

        Layer i of the decoder starts from the last states of layer i here: of one direction as
        they are, of two as tanh(W [forward; backward] + b).
        """
        cfg, carry, visit = self.config, [], places.visit(positions=positions)
        normal = nn.initializers.normal(cfg.init_std)
        assert cfg.source_vocab_size is not None  # as in every config with a source
        table = parameter(self, "tokens", normal, (cfg.source_vocab_size, cfg.d_embed))
        keys = split_key(key, cfg.num_layers)
        x = visit("embedding", _embed(table, source, valid, cfg.dropout, keys[0]))
        for i in range(cfg.num_layers):
            if i > 0:
                x = dropout(x, cfg.dropout, keys[i])
            x, last, first = _encoder_layer(cfg, i, x, valid)
            x = visit(f"layer_{i}/output", x)
            if first is not None:
                ends = jnp.concatenate(jax.tree.leaves((last, first)), axis=-1)
                parts, tree = jax.tree.flatten(last)
                bridge = nn.Dense(len(parts) * cfg.d_hidden, name=f"bridge_{i}")
                start = jnp.split(jnp.tanh(bridge(ends)), len(parts), axis=-1)
                last = jax.tree.unflatten(tree, start)
            carry.append(last)
        refuse_surplus(self)
        return x, tuple(carry), visit.captured


class RecurrentDecoder(Module):
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
        places: Places = NOWHERE,
        positions: jax.Array | None = None,  # i32[T] or [B, T], for edits
    ) -> tuple[jax.Array, RecurrentState, Captured]:  # [B, T, H]
        """Return what the logits are read from, the state after the tokens, what is captured."""
        cfg, memory = self.config, state.memory
        between = key if cfg.num_layers > 1 and cfg.dropout > 0 else None
        keys = None if between is None else jax.random.split(between, x.shape[1])
        read = nn.scan(
            RecurrentDecoder._read,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=(1, 1, 0, 1, 1, nn.broadcast, nn.broadcast),
            out_axes=1,
        )
        if positions is not None:
            positions = jnp.broadcast_to(positions, valid.shape)
        (carry, weights), (top, context, captured) = read(
            self, (state.carry, state.weights), x, valid, keys, starts, positions, memory, places
        )
        if context is not None:
            top = self._combine(context, top)
        length = state.length + valid.sum(axis=1, dtype=jnp.int32)
        return top, RecurrentState(carry, length, memory, weights), captured

    def _read(
        self,
        before: tuple[Carry, jax.Array | None],
        x: jax.Array,  # [B, E]
        valid: jax.Array,  # bool[B]
        key: jax.Array | None,
        start: jax.Array | None,  # bool[B]
        position: jax.Array | None,  # i32[B]
        memory: SourceMemory | None,
        places: Places,
    ) -> tuple[tuple[Carry, jax.Array | None], tuple[jax.Array, jax.Array | None, Captured]]:
        """Read a token of every row: the carry and weights after it, the top state and context."""
        cfg, (carry, weights) = self.config, before
        visit = places.visit(positions=None if position is None else position[:, None])
        carry = _zero_at(start, carry)
        before = carry, weights
        context: jax.Array | None = None
        new: list[LayerCarry] = []
        if cfg.context_use == "input":
            context, weights = self._attend(_hidden(carry[-1]), memory, visit)
            x = jnp.concatenate([x, context], axis=-1)
        keys = split_key(key, cfg.num_layers)
        for i, cell in enumerate(self.cell):
            if i > 0:
                x = dropout(x, cfg.dropout, keys[i])
            layer, x = cell(carry[i], x)
            if cfg.context_use == "state" and i == cfg.num_layers - 1:
                seen, weights = self._attend(x, memory, visit)
                context, x = None, self._combine(seen, x)
            x = visit.token(f"layer_{i}/hidden", x)
            new.append((visit.token(f"layer_{i}/cell", layer[0]), x) if cfg.cell == "lstm" else x)
        if cfg.context_use == "output":
            context, weights = self._attend(x, memory, visit)
        after = _keep(valid, (tuple(new), weights), before)
        return after, (x, context, visit.captured)

    def _combine(self, context: jax.Array, state: jax.Array) -> jax.Array:  # [..., M], [..., H]
        """Return tanh(W [context; state])."""
        return jnp.tanh(self.read_out(jnp.concatenate([context, state], axis=-1)))

    def _attend(
        self, query: jax.Array, memory: SourceMemory | None, visit: Visit
    ) -> tuple[jax.Array, jax.Array]:
        """Return the context [B, M] and weights f32[B, S] of one query [B, H] a row."""
        assert memory is not None  # of a config with attention
        query, mask = query[:, None], Padding(memory.valid)
        if self.config.attention == "additive":
            assert memory.keys is not None
            context, weights = additive_attention(
                query, memory.keys, memory.states, w_query=self.w_query, w_key=None, v=self.v,
                mask=mask,
            )  # fmt: skip
        else:
            w = self.w if self.config.attention == "general" else None
            context, weights = state_attention(query, memory.states, w=w, mask=mask)
        context, weights = context[:, 0], visit.token("attention/weights", weights[:, 0])
        if "attention/weights" in visit.edits:
            context = jnp.einsum("BS,BSM->BM", weights, memory.states)
        return visit.token("attention/context", context), weights


class BothDirections(Module):
    """Read vectors from both ends, in layers on top of each other (Schuster & Paliwal 1997)."""

    config: RecurrentConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, E]
        valid: jax.Array,  # bool[B, T]
        segments: jax.Array | None,  # i32[B, T]
        key: jax.Array | None,
        visit: Visit,
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
            x = visit(f"layer_{i}/output", _encoder_layer(cfg, i, x, valid, starts, ends)[0])
        refuse_surplus(self)
        return x


class _GateWeights(Module):
    """Own the matrix of a gate, and its bias where it has a number to begin with."""

    features: int
    kernel_init: nn.initializers.Initializer
    bias: float | None = None

    @nn.compact
    def __call__(self, inputs: int) -> list[jax.Array]:  # [inputs, H], and [H]
        found = [parameter(self, "kernel", self.kernel_init, (inputs, self.features))]
        if self.bias is not None:
            begin = nn.initializers.constant(self.bias)
            found.append(parameter(self, "bias", begin, (self.features,)))
        return found


class LSTMCell(nn.OptimizedLSTMCell):
    """Read a vector by an LSTM: flax's cell and parameters, with a forget gate that may start open.

    Attributes:
        features: H.
        forget_bias: where the biases of the forget gate begin.
    """

    forget_bias: float = 0.0

    @nn.compact
    def __call__(
        self,
        carry: tuple[jax.Array, jax.Array],  # c and h [B, H]
        inputs: jax.Array,  # [B, E]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Return (c, h) after the vector, and h."""
        c, h = carry
        of_inputs, of_state, biases = [], [], []
        for gate in "ifgo":
            weights = _GateWeights(self.features, self.kernel_init, name=f"i{gate}")
            of_inputs.append(weights(inputs.shape[-1])[0])
            begin = self.forget_bias if gate == "f" else 0.0
            own = _GateWeights(self.features, self.recurrent_kernel_init, begin, name=f"h{gate}")
            kernel, bias = own(self.features)
            of_state.append(kernel)
            biases.append(bias)
        # One product for the four gates, as in flax's cell.
        state_part = h @ jnp.concatenate(of_state, axis=-1) + jnp.concatenate(biases)[None]
        i, f, g, o = jnp.split(
            state_part + inputs @ jnp.concatenate(of_inputs, axis=-1), 4, axis=-1
        )
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h


def _cell(config: RecurrentConfig, name: str | None = None) -> nn.RNNCellBase:
    if config.cell == "lstm":
        return LSTMCell(config.d_hidden, forget_bias=config.forget_bias, name=name)
    cells = {"rnn": nn.SimpleCell, "gru": nn.GRUCell}
    return cells[config.cell](config.d_hidden, name=name)


def zero_carry(config: RecurrentConfig, rows: int) -> Carry:
    """Return the carry before any token."""
    zero = jnp.zeros((rows, config.d_hidden), F32)
    return ((zero, zero) if config.cell == "lstm" else zero,) * config.num_layers


def _hidden(layer: LayerCarry) -> jax.Array:  # [B, H]
    """Return h of a layer's carry."""
    return layer[1] if isinstance(layer, tuple) else layer


def _keep(valid: jax.Array, new: Tree, old: Tree) -> Tree:
    """Return `new` in rows that are valid [B], `old` in the others."""
    return jax.tree.map(lambda n, o: jnp.where(valid[:, None], n, o), new, old)


def _zero_at(start: jax.Array | None, carry: Tree) -> Tree:
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
) -> tuple[
    jax.Array, LayerCarry, LayerCarry | None
]:  # [B, S, M]; the last carry forward, and backward or None
    """Read a sequence by one layer, from both ends if so configured; zeros where padded.

    Called inside a compact module, whose parameters `cell_i` and `back_i` are.
    """
    zero, first = zero_carry(config, x.shape[0])[0], None
    last, out = _run(_cell(config, f"cell_{index}"), zero, x, valid, starts)
    if config.bidirectional:
        back_cell = _cell(config, f"back_{index}")
        first, back = _run(back_cell, zero, x, valid, ends, reverse=True)
        out = jnp.concatenate([out, back], axis=-1)
    return jnp.where(valid[:, :, None], out, 0.0), last, first


def _run(
    cell: nn.RNNCellBase,
    carry: LayerCarry,
    x: jax.Array,  # [B, S, D]
    valid: jax.Array,  # bool[B, S]
    starts: jax.Array | None = None,  # bool[B, S]: tokens before which the carry is zeros
    reverse: bool = False,
) -> tuple[LayerCarry, jax.Array]:  # [B, S, H]
    """Run a cell over a sequence, if `reverse` from its end: its last carry, and all it gave."""

    def read(
        cell: nn.RNNCellBase,
        carry: LayerCarry,
        x: jax.Array,
        valid: jax.Array,
        start: jax.Array | None,
    ) -> tuple[LayerCarry, jax.Array]:
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
