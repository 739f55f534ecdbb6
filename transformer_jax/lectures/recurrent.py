"""Recurrent models: a language model, a tagger, and an encoder-decoder with attention.

As in all models, `model.apply({"params": params}, tokens, state=state, valid=valid) -> (logits f32,
state)` is used for training, prefill, and decoding, with any number of tokens at a time. Tokens
that are not `valid` are padding and do not change the state.

    RNN    h' = tanh(W x + U h + b)
    LSTM   i, f, o = sigmoid(W x + U h + b);  g = tanh(W_g x + U_g h + b_g)
           c' = f c + i g;  h' = o tanh(c')
    GRU    r, z = sigmoid(W x + U h + b);  n = tanh(W_n x + b_n + r (U_n h + u_n))
           h' = (1 - z) n + z h

Dropout is applied between layers, not between time steps (Zaremba et al. 2014). Attention averages
the encoder's states m to a context c. The config's `context` specifies where c is used:

    output   h' = cell(y, h);      c = attend(h', m);  logits from tanh(W [c; h'])
    input    c = attend(h, m);     h' = cell([y; c], h);  logits from tanh(W [c; h'])
    state    h~ = cell(y, h);      c = attend(h~, m);  h' = tanh(W [c; h~]);  logits from h'

Here, h is the top state before the token y. The first variant is from Luong et al. 2015, and the
second is from Bahdanau et al. 2015. In the third, the combined state is also the recurrent state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, Self, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.additive import additive_attention, state_attention
from transformer_jax.attention.masks import Padding
from transformer_jax.checks import check_count, check_not_consumed
from transformer_jax.config.architectures import AnyModelConfig, PlaceShapes, Shape
from transformer_jax.config.fields import (
    FieldValue,
    Fraction,
    Positive,
    Size,
    check_types,
    fail,
    unread,
)
from transformer_jax.config.keywords import config_class
from transformer_jax.decoding.step import AppliedStep
from transformer_jax.lectures.vocabulary import Vocabulary, embed
from transformer_jax.models.arguments import (
    CheckedModule,
    check_tokens,
    gather_tokens,
    visited_logits,
)
from transformer_jax.models.functional import dropout, split_key
from transformer_jax.models.layers import parameter, refuse_rngs, refuse_surplus
from transformer_jax.models.module import Module
from transformer_jax.models.packing import (
    check_segments,
    check_valid,
    first_tokens,
    last_document,
    number_documents,
    sequence_positions,
)
from transformer_jax.models.places import NOWHERE, Captured, Places, Visit
from transformer_jax.pytree import Tree
from transformer_jax.values import value_class

F32 = jnp.float32
Cell = Literal["rnn", "lstm", "gru"]
StateAttention = Literal["dot", "general", "additive"]
ContextUse = Literal["output", "input", "state"]

LayerCarry = jax.Array | tuple[jax.Array, jax.Array]
"""State of a layer, which is h [B, H] for an RNN or GRU and (c, h) for an LSTM."""
Carry = tuple[LayerCarry, ...]


@config_class
class RecurrentConfig(AnyModelConfig):
    """Config for a recurrent language model, tagger, or encoder-decoder.

    If `source_vocab_size` is set, the model is an encoder-decoder (`RecurrentSeq2Seq`). Otherwise,
    it is a tagger (`RecurrentTagger`) if `bidirectional` is true and a language model
    (`RecurrentLM`) if not.
    """

    vocab_size: Size = 256
    """Size of the vocabulary. For an encoder-decoder, this is the target vocabulary."""
    source_vocab_size: Size | None = None
    """Size of the source vocabulary; None for a model without an encoder."""
    d_embed: Size = 128
    """Width of the token embeddings."""
    d_hidden: Size = 128
    """Width of a cell's state in each direction."""
    num_layers: Size = 1
    """Number of stacked cells in the encoder and in the decoder."""
    cell: Cell = "lstm"
    """Type of cell: rnn (Elman 1990), lstm (Hochreiter & Schmidhuber 1997, Gers et al. 2000), or
    gru (Cho et al. 2014)."""
    forget_bias: float = 0.0
    """Initial bias of the forget gates of an LSTM. If it is 1, a cell keeps most of its content
    from one token to the next (Gers et al. 2000, Jozefowicz et al. 2015)."""
    bidirectional: bool = False
    """Read in both directions (Schuster & Paliwal 1997). This applies to the encoder, or to a model
    without an encoder."""
    attention: StateAttention | None = None
    """Attention score for the encoder's states: dot or general (Luong et al. 2015), or additive
    (Bahdanau et al. 2015). None uses only the encoder's last state."""
    context: ContextUse | None = None
    """Where the context of the attention is used. For output, the query is the state after the
    token, and the logits are computed from tanh(W [context; state]). For input, the query is the
    state before the token, the context is concatenated to the input of the first cell, and the
    logits are computed as for output. For state, the computation is the same as for output, but
    tanh(W [context; state]) also replaces the recurrent state. None uses the choice of the paper:
    input for additive, output for dot and general."""
    d_attention: Size | None = None
    """Width of the hidden layer of additive attention; None uses d_hidden."""
    num_classes: Size | None = None
    """Number of classes in the classification head of a bidirectional tagger; None means no
    head."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output matrix."""
    dropout: Fraction = 0.0
    """Dropout rate on embeddings, between layers, and before the output matrix (Zaremba et al.
    2014)."""
    init_std: Positive = 0.1
    """Initial standard deviation of the embeddings and the output matrix."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.cell != "lstm":
            unread(self, "needs cell 'lstm'", "forget_bias")
        if self.source_vocab_size is None:
            unread(self, "needs a source_vocab_size", "attention")
        if not self.is_tagger:
            unread(self, "needs bidirectional, and no source_vocab_size", "num_classes")
        if self.attention is None:
            unread(self, "needs an attention", "context")
        if self.attention != "additive":
            unread(self, "needs attention 'additive'", "d_attention")
        if self.attention == "dot" and self.bidirectional:
            rule = "two directions are twice as wide as the decoder's state: use 'general'"
            fail("attention", self.attention, rule)
        if self.tie_embeddings and self.read_out_dim != self.d_embed:
            rule = f"needs d_embed {self.d_embed} to equal d_hidden {self.d_hidden}"
            fail("tie_embeddings", self.tie_embeddings, rule)

    @property
    def attention_dim(self) -> int:
        return self.d_hidden if self.d_attention is None else self.d_attention

    @property
    def context_use(self) -> ContextUse | None:
        """Return the place where the context is used, or None without attention."""
        if self.attention is None or self.context is not None:
            return self.context
        return "input" if self.attention == "additive" else "output"

    @property
    def is_tagger(self) -> bool:
        """Whether the model is bidirectional and has no source, so that it cannot generate."""
        return self.bidirectional and self.source_vocab_size is None

    @property
    def read_out_dim(self) -> int:
        """Return the input width of the output matrix."""
        return self.d_embed if self.is_tagger and self.tie_embeddings else self.d_hidden

    @property
    def memory_dim(self) -> int:
        """Return the width of the encoder's states."""
        return 2 * self.d_hidden if self.bidirectional else self.d_hidden

    @property
    def kind(self) -> Shape:
        if self.source_vocab_size is not None:
            return "encoder-decoder"
        return "encoder" if self.bidirectional else "decoder"

    @property
    def named(self) -> str:
        return self.cell

    @classmethod
    def usual(cls, name: str, shape: Shape) -> Self:
        cell: FieldValue = name
        if shape == "encoder-decoder":
            return cls(
                cell=cell, source_vocab_size=256, bidirectional=True, attention="additive",
                d_embed=128, d_hidden=128,
            )  # fmt: skip
        return cls(cell=cell, bidirectional=shape == "encoder", d_hidden=256, num_layers=2)

    def build(self) -> RecurrentLM | RecurrentSeq2Seq | RecurrentTagger:
        if self.is_tagger:
            return RecurrentTagger(self)
        seq2seq = self.source_vocab_size is not None
        return RecurrentSeq2Seq(self) if seq2seq else RecurrentLM(self)

    def init_state(self, batch: int) -> RecurrentState:
        return init_recurrent_state(self, batch)

    def places(self) -> PlaceShapes:
        shapes: PlaceShapes = {"embedding": ("B", "T", self.d_embed)}
        for i in range(self.num_layers):
            if self.is_tagger:
                shapes[f"layer_{i}/output"] = ("B", "T", self.memory_dim)
                continue
            shapes[f"layer_{i}/hidden"] = ("B", "T", self.d_hidden)
            if self.cell == "lstm":
                shapes[f"layer_{i}/cell"] = ("B", "T", self.d_hidden)
        if self.attention is not None:
            shapes["attention/weights"] = ("B", "T", "S")
            shapes["attention/context"] = ("B", "T", self.memory_dim)
        if self.source_vocab_size is not None:
            shapes["encoder/embedding"] = ("B", "T", self.d_embed)
            for i in range(self.num_layers):
                shapes[f"encoder/layer_{i}/output"] = ("B", "T", self.memory_dim)
        shapes["read_out"] = ("B", "T", self.read_out_dim)
        return shapes | {"logits": ("B", "T", self.vocab_size)}

    def word_vectors(self, params: Any) -> Any:
        part = "embed" if self.source_vocab_size is None else "encoder"
        return params[part]["tokens"]


@value_class(pytree=True, exportable=True)
class SourceMemory:
    """Encoder states that the decoder attends to.

    Attributes:
        states: [B, S, M], zero for padding.
        valid: bool[B, S], False for padding.
        keys: [B, S, A], states @ w_key, computed once for additive attention; otherwise None.
    """

    states: jax.Array  # [B, S, M]
    valid: jax.Array  # bool[B, S]
    keys: jax.Array | None = None  # [B, S, A]


@value_class(pytree=True, exportable=True)
class RecurrentState:
    """Immutable state of a recurrent model. Each call returns a new state.

    Attributes:
        carry: state of each layer, which is h [B, H] for an RNN or GRU and (c, h) for an LSTM.
        length: i32[B], the number of tokens that have been read.
        memory: encoder states to attend to; None without attention.
        weights: f32[B, S], attention weights of the last token, initially 0; None without
            attention.
    """

    carry: Carry
    length: jax.Array  # i32[B]
    memory: SourceMemory | None = None
    weights: jax.Array | None = None  # f32[B, S]


class RecurrentEncoder(Module):
    """Encoder for the source, in one or both directions (Schuster & Paliwal 1997)."""

    config: RecurrentConfig

    @nn.compact
    def __call__(
        self,
        source: jax.Array,  # i32[B, S]
        valid: jax.Array,  # bool[B, S]
        key: jax.Array | None,
        places: Places = NOWHERE,
        positions: jax.Array | None = None,  # i32[S] or [B, S], for edits
    ) -> tuple[jax.Array, Carry, Captured]:  # [B, S, M], zero for padding
        """Return the states of the source, the decoder's initial carry, and captured values.

        Layer i of the decoder starts from the last state of layer i in the encoder, or from tanh(W
        [forward; backward] + b) if the encoder is bidirectional.
        """
        cfg, carry, visit = self.config, [], places.visit(positions=positions)
        normal = nn.initializers.normal(cfg.init_std)
        assert cfg.source_vocab_size is not None
        table = parameter(self, "tokens", normal, (cfg.source_vocab_size, cfg.d_embed))
        keys = split_key(key, cfg.num_layers)
        x = visit("embedding", embed(table, source, valid, cfg.dropout, keys[0]))
        for i in range(cfg.num_layers):
            if i > 0:
                x = dropout(x, cfg.dropout, keys[i])
            # a source is a single document, so the carry is never reset
            x, last, first = _encoder_layer(cfg, i, x, valid)
            x = visit(f"layer_{i}/output", x)
            if first is not None:
                ends = jnp.concatenate(jax.tree.leaves((last, first)), axis=-1)
                parts, tree = jax.tree.flatten(last)
                bridge = nn.Dense(len(parts) * cfg.d_hidden, name=f"bridge_{i}")
                # both directions together are twice as wide as the decoder's state
                start = jnp.split(jnp.tanh(bridge(ends)), len(parts), axis=-1)
                last = jax.tree.unflatten(tree, start)
            carry.append(last)
        refuse_surplus(self)
        return x, tuple(carry), visit.captured


class RecurrentDecoder(Module):
    """Stacked cells with optional attention to a source."""

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
        """Return the encoder's states in the form that attention needs."""
        valid = jnp.array(valid, copy=True)  # decoding donates the state, but not the caller's mask
        if self.config.attention != "additive":
            return SourceMemory(states, valid)
        return SourceMemory(states, valid, jnp.einsum("BSM,MA->BSA", states, self.w_key))

    def __call__(
        self,
        x: jax.Array,  # [B, T, E]
        valid: jax.Array,  # bool[B, T]
        state: RecurrentState,
        key: jax.Array | None,
        starts: jax.Array | None = None,  # bool[B, T]: tokens before which the carry is reset
        places: Places = NOWHERE,
        positions: jax.Array | None = None,  # i32[T] or [B, T], for edits
    ) -> tuple[jax.Array, RecurrentState, Captured]:  # [B, T, H]
        """Return the input of the output layer, the new state, and captured values."""
        cfg, memory = self.config, state.memory
        # Inside the cells, only the connections between layers have dropout, because dropout on the
        # recurrent connections would erase the state (Zaremba et al. 2014).
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
        """Read one token per row. Return the carry, the weights, the top state, and the context."""
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
                attended, weights = self._attend(x, memory, visit)
                context, x = None, self._combine(attended, x)
            x = visit.token(f"layer_{i}/hidden", x)
            new.append((visit.token(f"layer_{i}/cell", layer[0]), x) if cfg.cell == "lstm" else x)
        if cfg.context_use == "output":
            context, weights = self._attend(x, memory, visit)
        # padding leaves every bit of the row's state unchanged
        after = _keep(valid, (tuple(new), weights), before)
        return after, (x, context, visit.captured)

    def _combine(self, context: jax.Array, state: jax.Array) -> jax.Array:  # [..., M], [..., H]
        """Return tanh(W [context; state])."""
        return jnp.tanh(self.read_out(jnp.concatenate([context, state], axis=-1)))

    def _attend(
        self, query: jax.Array, memory: SourceMemory | None, visit: Visit
    ) -> tuple[jax.Array, jax.Array]:
        """Return the context [B, M] and the weights f32[B, S] for one query [B, H] per row."""
        assert memory is not None
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
            # the attention used the weights before the edit
            context = jnp.einsum("BS,BSM->BM", weights, memory.states)
        return visit.token("attention/context", context), weights


class BothDirections(Module):
    """Stacked bidirectional layers (Schuster & Paliwal 1997)."""

    config: RecurrentConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, E]
        valid: jax.Array,  # bool[B, T]
        segments: jax.Array | None,  # i32[B, T]
        key: jax.Array | None,
        visit: Visit,
    ) -> jax.Array:  # [B, T, 2 H], zero for padding
        """Return the forward and backward states of the top layer at each token."""
        cfg = self.config
        starts = ends = None
        if segments is not None:
            starts = first_tokens(number_documents(segments), valid)
            # The backward cell reads the row in reverse, where the last token of a document comes
            # first.
            ends = first_tokens(number_documents(segments[:, ::-1]), valid[:, ::-1])[:, ::-1]
        keys = split_key(key, cfg.num_layers)
        for i in range(cfg.num_layers):
            if i > 0:
                x = dropout(x, cfg.dropout, keys[i])
            x = visit(f"layer_{i}/output", _encoder_layer(cfg, i, x, valid, starts, ends)[0])
        refuse_surplus(self)
        return x


class _GateWeights(Module):
    """Kernel of a gate and, if it has an initial value, the bias."""

    features: int
    kernel_init: nn.initializers.Initializer
    bias: float | None = None

    @nn.compact
    def __call__(self, inputs: int) -> list[jax.Array]:  # [inputs, H], and [H]
        weights = [parameter(self, "kernel", self.kernel_init, (inputs, self.features))]
        if self.bias is not None:
            init = nn.initializers.constant(self.bias)
            weights.append(parameter(self, "bias", init, (self.features,)))
        return weights


class LSTMCell(nn.OptimizedLSTMCell):
    """LSTM cell with the same parameters as in flax and a configurable initial forget bias.

    Attributes:
        features: H, the width of the state.
        forget_bias: initial bias of the forget gate.
    """

    forget_bias: float = 0.0

    @nn.compact
    def __call__(
        self,
        carry: tuple[jax.Array, jax.Array],  # c and h [B, H]
        inputs: jax.Array,  # [B, E]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Return the new carry (c, h) and h."""
        c, h = carry
        input_kernels, state_kernels, biases = [], [], []
        for gate in "ifgo":
            weights = _GateWeights(self.features, self.kernel_init, name=f"i{gate}")
            input_kernels.append(weights(inputs.shape[-1])[0])
            init = self.forget_bias if gate == "f" else 0.0
            weights = _GateWeights(self.features, self.recurrent_kernel_init, init, name=f"h{gate}")
            kernel, bias = weights(self.features)
            state_kernels.append(kernel)
            biases.append(bias)
        # one product for all four gates, as in flax's cell
        state_part = h @ jnp.concatenate(state_kernels, axis=-1) + jnp.concatenate(biases)[None]
        i, f, g, o = jnp.split(
            state_part + inputs @ jnp.concatenate(input_kernels, axis=-1), 4, axis=-1
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
    """Return the initial carry, which contains zeros for each layer."""
    zero = jnp.zeros((rows, config.d_hidden), F32)
    return ((zero, zero) if config.cell == "lstm" else zero,) * config.num_layers


def _hidden(layer: LayerCarry) -> jax.Array:  # [B, H]
    """Return h from the carry of a layer."""
    return layer[1] if isinstance(layer, tuple) else layer


def _keep(valid: jax.Array, new: Tree, old: Tree) -> Tree:
    """Return `new` in valid rows and `old` in the other rows."""
    return jax.tree.map(lambda n, o: jnp.where(valid[:, None], n, o), new, old)


def _zero_at(start: jax.Array | None, carry: Tree) -> Tree:
    """Reset the carry of rows where a document starts, bool[B]. None resets nothing."""
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
]:  # [B, S, M]; last forward carry, and last backward carry or None
    """Run one layer over a sequence, in one or both directions. Outputs at padding are zero.

    The compact module that calls this function owns the parameters `cell_i` and `back_i`.
    """
    zero, first = zero_carry(config, x.shape[0])[0], None
    last, out = _run(_cell(config, f"cell_{index}"), zero, x, valid, starts)
    if config.bidirectional:
        # padding does not change the carry, so each row starts at its own last token
        back_cell = _cell(config, f"back_{index}")
        first, back = _run(back_cell, zero, x, valid, ends, reverse=True)
        out = jnp.concatenate([out, back], axis=-1)
    return jnp.where(valid[:, :, None], out, 0.0), last, first


def _run(
    cell: nn.RNNCellBase,
    carry: LayerCarry,
    x: jax.Array,  # [B, S, D]
    valid: jax.Array,  # bool[B, S]
    starts: jax.Array | None = None,  # bool[B, S]: tokens before which the carry is reset
    reverse: bool = False,
) -> tuple[LayerCarry, jax.Array]:  # [B, S, H]
    """Scan a cell over a sequence, forward or in reverse. Return the last carry and the outputs."""

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


RecurrentResult: TypeAlias = (
    tuple[jax.Array, RecurrentState] | tuple[jax.Array, RecurrentState, Captured]
)
"""Logits f32[B, T, V], the new state, and, with `capture`, the captured values."""


def init_recurrent_state(config: RecurrentConfig, batch: int) -> RecurrentState:
    """Create the initial state of a language model.

    For an encoder-decoder, call `model.apply(..., source, method="init_state")` instead.

    Args:
        config: config of a language model.
        batch: B, the number of rows.

    Raises:
        ValueError: If the model has a source or is bidirectional, or if `batch` is not a
            nonnegative integer.
    """
    if config.source_vocab_size is not None:
        rule = "its state starts from a source: model.apply(..., source, method='init_state')"
        raise ValueError(f"source_vocab_size is {config.source_vocab_size}: {rule}")
    if config.bidirectional:
        raise ValueError("bidirectional is True: a bidirectional model has no state")
    check_count("batch", batch, 0)
    return RecurrentState(zero_carry(config, batch), jnp.zeros((batch,), jnp.int32))


class RecurrentLM(CheckedModule):
    """Recurrent language model (Mikolov et al. 2010; Zaremba et al. 2014).

    Attributes:
        config: config that has no source and is not bidirectional.
    """

    config: RecurrentConfig

    @nn.nowrap
    def as_step(self) -> RecurrentStep:
        """Return the decoding step for `make_step`."""
        return RecurrentStep(self)

    def setup(self) -> None:
        self.embed = Vocabulary(self.config)
        self.decoder = RecurrentDecoder(self.config)
        refuse_surplus(self)

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        state: RecurrentState | None = None,
        valid: jax.Array | None = None,  # bool[B, T]
        segments: jax.Array | None = None,  # i32[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> RecurrentResult:
        """Return the logits of the next tokens and the new state.

        Args:
            tokens: i32[B, T].
            state: the state after the previous tokens; None starts a sequence.
            valid: bool[B, T], False marks padding; None means no padding.
            segments: i32[B, T], IDs of packed documents. The carry is reset before the first token
                of each run of equal IDs, and the new state belongs to the last document. This
                argument cannot be combined with `state`.
            at: i32[B, Q], indices of the tokens whose logits are returned; None means all tokens.
            key: a single key, which turns on dropout.
            capture: names of places (`transformer_jax.places`) to return the values of.

        Returns:
            Logits f32[B, T, V], or [B, Q, V] with `at`; the new state; and with `capture` the
            values keyed by place.

        Raises:
            ValueError: If the arguments do not fit.
        """
        check_tokens(tokens, self.config.vocab_size)
        check_segments(tokens, segments, state)
        places = Places.of(self, capture)
        whole = state is None
        if state is None:
            state = init_recurrent_state(self.config, tokens.shape[0])
        logits, state, captured = read_tokens(
            self, tokens, state, valid=valid, at=at, key=key, segments=segments, places=places,
            whole=whole,
        )  # fmt: skip
        return (logits, state, places.in_order(captured)) if capture else (logits, state)


class RecurrentTagger(CheckedModule):
    """Bidirectional model for tagging, masked tokens, or classification (Graves et al. 2005).

    Each layer has a forward and a backward cell, and the next layer reads both outputs. The logits
    are computed from tanh(W [forward; backward] + b).

    Attributes:
        config: bidirectional config without a source.
    """

    config: RecurrentConfig

    @nn.nowrap
    def as_step(self) -> NoReturn:
        """Raise ValueError, because a bidirectional model cannot generate tokens one by one."""
        rule = "it is bidirectional and cannot generate tokens"
        raise ValueError(f"model is a RecurrentTagger: {rule}")

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
        valid: jax.Array | None = None,  # bool[B, T]
        segments: jax.Array | None = None,  # i32[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> tuple[jax.Array, None] | tuple[jax.Array, None, Captured]:
        """Return the logits of the tokens at their own positions, and None instead of a state.

        Args:
            tokens: i32[B, T].
            valid: bool[B, T], False marks padding; None means no padding.
            segments: i32[B, T], IDs of packed documents, at which both directions restart.
            at: i32[B, Q], indices of the tokens whose logits are returned; None means all tokens.
            key: a single key, which turns on dropout.
            capture: names of places (`transformer_jax.places`) to return the values of.

        Returns:
            Logits f32[B, T, V], or [B, Q, V] with `at`; None; and the captured values.

        Raises:
            ValueError: If the arguments do not fit.
        """
        check_segments(tokens, segments, None)
        positions, packed = sequence_positions(tokens, None, valid, segments), segments is not None
        places = Places.of(self, capture).with_facts(positions, packed=packed)
        visit = places.visit(positions=positions)
        read_key, top_key = split_key(key, 2)
        states, valid = self._read(tokens, valid, segments, read_key, visit)
        x = dropout(jnp.tanh(self.read_out(states)), self.config.dropout, top_key)
        # a model is initialized by this method, which does not otherwise use the classifier
        if self.config.num_classes is not None and self.is_initializing():
            self._classes(states, valid, None)
        x = visit("read_out", x)
        logits = visited_logits(self.embed, x, at, visit)
        return (logits, None, places.in_order(visit.captured)) if capture else (logits, None)

    def classify(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        valid: jax.Array | None = None,  # bool[B, T]
        key: jax.Array | None = None,
    ) -> jax.Array:  # f32[B, C]
        """Return the class logits W [forward; backward] + b of each row.

        The logits are computed from the top layer's forward state at the last token and its
        backward state at the first token. Each of these states covers the whole row.

        Args:
            tokens: i32[B, T].
            valid: bool[B, T], False marks padding; None means no padding.
            key: a single key, which turns on dropout.

        Returns:
            f32[B, C].

        Raises:
            ValueError: If the model has no classification head or the arguments are invalid.
        """
        if self.config.num_classes is None:
            raise ValueError("num_classes is None: this model has no classification head")
        read_key, top_key = split_key(key, 2)
        positions = sequence_positions(tokens, None, valid)
        visit = Places.of(self).with_facts(positions).visit(positions=positions)
        states, valid = self._read(tokens, valid, None, read_key, visit)
        return self._classes(states, valid, top_key)

    def _read(
        self,
        tokens: jax.Array,  # i32[B, T]
        valid: jax.Array | None,  # bool[B, T]
        segments: jax.Array | None,  # i32[B, T]
        key: jax.Array | None,
        visit: Visit,
    ) -> tuple[jax.Array, jax.Array]:  # [B, T, 2 H], bool[B, T]
        """Return the states of both directions at each token and the mask of valid tokens."""
        refuse_rngs(self, key)
        check_tokens(tokens, self.config.vocab_size)
        valid = check_valid("tokens", tokens, valid)
        embed_key, layers_key = split_key(key, 2)
        x = visit("embedding", self.embed(tokens, valid, embed_key))
        return self.layers(x, valid, segments, layers_key, visit), valid

    def _classes(
        self,
        states: jax.Array,  # [B, T, 2 H]
        valid: jax.Array,  # bool[B, T]
        key: jax.Array | None,
    ) -> jax.Array:  # f32[B, C]
        first = jnp.argmax(valid, axis=1)
        last = valid.shape[1] - 1 - jnp.argmax(valid[:, ::-1], axis=1)
        # The forward state has read the whole row at the last token, and the backward one at the
        # first.
        forward, backward = jnp.split(gather_tokens(states, jnp.stack([last, first], 1)), 2, axis=2)
        x = jnp.concatenate([forward[:, 0], backward[:, 1]], axis=-1)
        return self.classifier(dropout(x, self.config.dropout, key)).astype(F32)


class RecurrentSeq2Seq(CheckedModule):
    """Encoder-decoder (Sutskever et al. 2014) with attention (Bahdanau et al. 2015).

    Attributes:
        config: config with a source.
    """

    config: RecurrentConfig

    @nn.nowrap
    def as_step(self) -> RecurrentStep:
        """Return the decoding step for `make_step`."""
        return RecurrentStep(self)

    def setup(self) -> None:
        self.encoder = RecurrentEncoder(self.config)
        self.embed = Vocabulary(self.config)
        self.decoder = RecurrentDecoder(self.config)
        refuse_surplus(self)

    def init_state(
        self,
        source: jax.Array,  # i32[B, S]
        *,
        valid: jax.Array | None = None,  # bool[B, S]
        key: jax.Array | None = None,
    ) -> RecurrentState:
        """Encode the source and return the initial state of the decoder.

        Args:
            source: i32[B, S].
            valid: bool[B, S], False marks padding; None means no padding.
            key: a single key, which turns on dropout.
        """
        places = Places.of(self).inside("encoder/")
        return self._read(source, valid, key, places)[0]

    def _read(
        self,
        source: jax.Array,
        valid: jax.Array | None,
        key: jax.Array | None,
        places: Places,  # the encoder's
    ) -> tuple[RecurrentState, Captured]:
        refuse_rngs(self, key)
        vocab_size = self.config.source_vocab_size
        assert vocab_size is not None
        check_tokens(source, vocab_size)
        is_token = check_valid("source", source, valid)
        positions = sequence_positions(source, None, valid) if places.edit else None
        places = places.with_facts(positions)
        states, carry, captured = self.encoder(source, is_token, key, places, positions)
        state = RecurrentState(carry, jnp.zeros((source.shape[0],), jnp.int32))
        if self.config.attention is not None:
            memory = self.decoder.remember(states, is_token)
            state = replace(state, memory=memory, weights=jnp.zeros(source.shape, F32))
        return state, captured

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        source: jax.Array | None = None,  # i32[B, S]
        source_valid: jax.Array | None = None,  # bool[B, S]
        state: RecurrentState | None = None,
        valid: jax.Array | None = None,  # bool[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
    ) -> RecurrentResult:
        """Return the logits of the next target tokens and the new state.

        Args:
            tokens: i32[B, T], the target.
            source: i32[B, S], which is required unless `state` is passed.
            source_valid: bool[B, S], False marks padding; None means no padding.
            state: state after the source and the previous target tokens, passed instead of a
                source.
            valid: bool[B, T], False marks padding; None means no padding.
            at: i32[B, Q], indices of the tokens whose logits are returned; None means all tokens.
            key: a single key, which turns on dropout.
            capture: names of places (`transformer_jax.places`) whose values are returned. Places in
                the encoder require a source.

        Returns:
            Logits f32[B, T, V], or [B, Q, V] with `at`; the new state; and with `capture` the
            values keyed by place.

        Raises:
            ValueError: If the arguments are invalid, or if both or neither of source and state are
                passed.
        """
        if (source is None) == (state is None):
            raise ValueError("pass either source or state: a state already includes its source")
        if source is None and source_valid is not None:
            raise ValueError("source_valid needs a source: a state already includes its source")
        refuse_rngs(self, key)
        check_tokens(tokens, self.config.vocab_size)
        encoder_key, key = split_key(key, 2)
        places = Places.of(self, capture)
        inside = places.inside("encoder/")
        captured: Captured = {}
        whole = state is None
        if source is not None:
            state, captured = self._read(source, source_valid, encoder_key, inside)
        else:  # the model's own edits were applied when the state was created
            for name in Places.of(self.config, capture).inside("encoder/").capture:
                raise ValueError(f"encoder/{name} needs a source: a state already includes it")
        assert state is not None
        logits, state, decoder_captured = read_tokens(
            self, tokens, state, valid=valid, at=at, key=key, places=places, whole=whole
        )
        captured = {f"encoder/{name}": value for name, value in captured.items()}
        captured |= decoder_captured
        return (logits, state, places.in_order(captured)) if capture else (logits, state)


def read_tokens(
    model: RecurrentLM | RecurrentSeq2Seq,
    tokens: jax.Array,
    state: RecurrentState,
    *,
    valid: jax.Array | None,
    at: jax.Array | None,
    key: jax.Array | None,
    segments: jax.Array | None = None,
    places: Places = NOWHERE,
    whole: bool,  # whether the sequences start with these tokens
) -> tuple[jax.Array, RecurrentState, Captured]:
    """Embed tokens, run the decoder's cells, and compute the logits, for both models."""
    refuse_rngs(model, key)
    check_recurrent_state(model.config, state, tokens.shape[0])
    positions = None
    if places.edit:
        positions = sequence_positions(tokens, None if whole else state.length, valid, segments)
        packed, count = segments is not None, tokens.shape[1]
        places = places.with_facts(positions, whole=whole, packed=packed, count=count)
    valid = check_valid("tokens", tokens, valid)
    embed_key, cells_key, top_key = split_key(key, 3)
    visit = places.visit(positions=positions)
    x = visit("embedding", model.embed(tokens, valid, embed_key))
    if segments is None:
        x, state, captured = model.decoder(x, valid, state, cells_key, None, places, positions)
    else:
        documents = number_documents(segments)
        starts = first_tokens(documents, valid)
        x, state, captured = model.decoder(x, valid, state, cells_key, starts, places, positions)
        # The carry was reset at each document, so only the tokens of the last one belong to the
        # state.
        last = last_document(documents, valid).max(axis=1, initial=0, keepdims=True)
        read = (valid & (documents == last)).sum(axis=1, dtype=jnp.int32)
        state = replace(state, length=read)
    x = visit("read_out", dropout(x, model.config.dropout, top_key))
    logits = visited_logits(model.embed, x, at, visit)
    return logits, state, captured | visit.captured


def check_recurrent_state(
    config: RecurrentConfig, state: RecurrentState, rows: int, subject: str = "tokens have"
) -> None:
    """Raise ValueError unless the state matches the tokens' rows and the model's layers."""
    if not isinstance(state, RecurrentState):
        raise ValueError(f"state is of type {type(state).__name__}: must be a RecurrentState")
    check_not_consumed(state)
    state_rows = state.length.shape[0]
    if state_rows != rows:
        raise ValueError(f"{subject} {rows} rows, but the state has {state_rows}")
    # check only shapes, to reject the state of another model before computing anything
    zero = jax.eval_shape(lambda: zero_carry(config, rows))
    found, expected = (jax.tree.map(lambda leaf: leaf.shape, c) for c in (state.carry, zero))
    if found != expected:
        raise ValueError(f"state.carry has shapes {found}, but this model's are {expected}")
    memory = state.memory
    if config.attention is None:
        if memory is not None:
            raise ValueError("state.memory must be None: this model has no attention")
        return
    if memory is None:
        raise ValueError("state.memory is None: make the state with method='init_state'")
    if memory.states.shape[-1] != config.memory_dim:
        raise ValueError(
            f"state.memory has width {memory.states.shape[-1]}, but the model's memory has width "
            f"{config.memory_dim}"
        )
    width = None if memory.keys is None else memory.keys.shape[-1]
    wide = config.attention_dim if config.attention == "additive" else None
    if width != wide:
        raise ValueError(f"state.memory.keys have width {width}, but the attention needs {wide}")


@value_class
class RecurrentStep(AppliedStep[RecurrentState]):
    """Decoding step of a `RecurrentLM` or `RecurrentSeq2Seq`, whose state is a `RecurrentState`.

    Attributes:
        model: model that `build(config)` returned.
    """

    model: RecurrentLM | RecurrentSeq2Seq

    def check(self, prompt: np.ndarray, state: RecurrentState, total: np.ndarray) -> None:
        """Raise ValueError if the prompt or the state does not fit. Any length is allowed."""
        check_tokens(prompt, self.model.config.vocab_size)
        check_recurrent_state(self.model.config, state, prompt.shape[0], "prompt has")
        super().check(prompt, state, total)
