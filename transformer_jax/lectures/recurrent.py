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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.checks import check_count, check_not_consumed
from transformer_jax.config import RecurrentConfig
from transformer_jax.lectures.recurrent_layers import (
    BothDirections,
    RecurrentDecoder,
    RecurrentEncoder,
    RecurrentState,
    Vocabulary,
    zero_carry,
)
from transformer_jax.models.arguments import (
    CheckedModule,
    check_tokens,
    gather_tokens,
    visited_logits,
)
from transformer_jax.models.functional import dropout, split_key
from transformer_jax.models.layers import refuse_rngs, refuse_surplus
from transformer_jax.models.packing import (
    check_segments,
    check_valid,
    first_tokens,
    last_document,
    number_documents,
    sequence_positions,
)
from transformer_jax.models.places import NO_EDIT, NOWHERE, Captured, Edit, Places, Visit

F32 = jnp.float32

RecurrentResult: TypeAlias = (
    tuple[jax.Array, RecurrentState] | tuple[jax.Array, RecurrentState, Captured]
)
"""Logits f32[B, T, V], the state after the tokens, and where places are captured their values."""


def init_recurrent_state(config: RecurrentConfig, batch: int) -> RecurrentState:
    """Make the state of a language model that has read nothing.

    An encoder-decoder reads its source first: `model.apply(..., source, method="init_state")`.

    Args:
        config: of a language model.
        batch: B, rows.

    Raises:
        ValueError: if the model has a source or reads both ends, or `batch` is not an integer of at
            least 0.
    """
    if config.source_vocab_size is not None:
        rule = "its state starts from a source: model.apply(..., source, method='init_state')"
        raise ValueError(f"source_vocab_size is {config.source_vocab_size}: {rule}")
    if config.bidirectional:
        raise ValueError("bidirectional is True: a model that reads both ends has no state")
    check_count("batch", batch, 0)
    return RecurrentState(zero_carry(config, batch), jnp.zeros((batch,), jnp.int32))


class RecurrentLM(CheckedModule):
    """Language model (Mikolov et al. 2010; Zaremba et al. 2014).

    Attributes:
        config: without a source, reading forward.
    """

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
        valid: jax.Array | None = None,  # bool[B, T]
        segments: jax.Array | None = None,  # i32[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> RecurrentResult:
        """Return logits of the next token, and the state after these.

        Args:
            tokens: i32[B, T].
            state: of the tokens before; None is the beginning.
            valid: bool[B, T], False is padding; None has none.
            segments: i32[B, T], ids of packed documents: the carry is zeros before the first token
                of each run of equal ids, and the state that of the last one. Not with a state.
            at: i32[B, Q], indices of the tokens whose logits are asked for; None is every token.
            key: a single key, which turns dropout on.
            capture: names of places (`transformer_jax.places`), whose values are returned.
            edit: functions by the names of places, which change the values there.

        Returns:
            Logits f32[B, T, V], of `at` [B, Q, V], and the state; with `capture` also the values by
            name.

        Raises:
            ValueError: if arguments do not fit.
        """
        check_tokens(tokens, self.config.vocab_size)
        check_segments(tokens, segments, state)
        places = Places.of(self, capture, edit)
        whole = state is None
        if state is None:
            state = init_recurrent_state(self.config, tokens.shape[0])
        found = read_tokens(
            self, tokens, state, valid=valid, at=at, key=key, segments=segments, places=places,
            whole=whole,
        )  # fmt: skip
        return (*found[:2], places.in_order(found[2])) if capture else found[:2]


class RecurrentTagger(CheckedModule):
    """Give logits for each token of a text that is read from both ends (Graves et al. 2005).

    For training on masked tokens, to tag, or to classify. In each layer one cell reads forward and
    one backward; both outputs together go to the next layer, and tanh(W [forward; backward] + b) to
    the logits.

    Attributes:
        config: without a source, reading both ends.
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
        valid: jax.Array | None = None,  # bool[B, T]
        segments: jax.Array | None = None,  # i32[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        key: jax.Array | None = None,
        capture: Sequence[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> tuple[jax.Array, None] | tuple[jax.Array, None, Captured]:
        """Return logits of each token's own place, and None for a state.

        Args:
            tokens: i32[B, T].
            valid: bool[B, T], False is padding; None has none.
            segments: i32[B, T], ids of packed documents: both directions begin anew at each run of
                equal ids.
            at: i32[B, Q], indices of the tokens whose logits are asked for; None is every token.
            key: a single key, which turns dropout on.
            capture: names of places (`transformer_jax.places`), whose values are returned.
            edit: functions by the names of places, which change the values there.

        Returns:
            Logits f32[B, T, V], of `at` [B, Q, V], and None; with `capture` also the values by
            name.

        Raises:
            ValueError: if arguments do not fit.
        """
        check_segments(tokens, segments, None)
        positions, packed = sequence_positions(tokens, None, valid, segments), segments is not None
        places = Places.of(self, capture, edit).told(positions, packed=packed)
        visit = places.visit(positions=positions)
        read_key, top_key = split_key(key, 2)
        states, valid = self._read(tokens, valid, segments, read_key, visit)
        x = dropout(jnp.tanh(self.read_out(states)), self.config.dropout, top_key)
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
        """Return class logits W [forward; backward] + b of each row.

        forward is the top layer's state after the last token of a row, backward the one after the
        first: each has read the whole row.

        Args:
            tokens: i32[B, T].
            valid: bool[B, T], False is padding; None has none.
            key: a single key, which turns dropout on.

        Returns:
            f32[B, C].

        Raises:
            ValueError: if the model has no classification head or the arguments do not fit.
        """
        if self.config.num_classes is None:
            raise ValueError("num_classes is None: this model has no classification head")
        read_key, top_key = split_key(key, 2)
        positions = sequence_positions(tokens, None, valid)
        visit = Places.of(self).told(positions).visit(positions=positions)
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
        """Return the states of both directions at each token, and which tokens are no padding."""
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
        forward, backward = jnp.split(gather_tokens(states, jnp.stack([last, first], 1)), 2, axis=2)
        x = jnp.concatenate([forward[:, 0], backward[:, 1]], axis=-1)
        return self.classifier(dropout(x, self.config.dropout, key)).astype(F32)


class RecurrentSeq2Seq(CheckedModule):
    """Source in, target out (Sutskever et al. 2014), with attention (Bahdanau et al. 2015).

    Attributes:
        config: with a source.
    """

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
        valid: jax.Array | None = None,  # bool[B, S]
        key: jax.Array | None = None,
    ) -> RecurrentState:
        """Read the source once: what the decoder starts from, and its attention looks at.

        Args:
            source: i32[B, S].
            valid: bool[B, S], False is padding; None has none.
            key: a single key, which turns dropout on.
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
        known = check_valid("source", source, valid)
        positions = sequence_positions(source, None, valid) if places.edit else None
        told = places.told(positions)
        states, carry, captured = self.encoder(source, known, key, told, positions)
        state = RecurrentState(carry, jnp.zeros((source.shape[0],), jnp.int32))
        if self.config.attention is not None:
            memory = self.decoder.remember(states, known)
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
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> RecurrentResult:
        """Return logits of the next target token, and the state after these.

        Args:
            tokens: i32[B, T], the target.
            source: i32[B, S]; None with a state.
            source_valid: bool[B, S], False is padding; None has none.
            state: of the source and of the target's tokens before; None with a source.
            valid: bool[B, T], False is padding; None has none.
            at: i32[B, Q], indices of the tokens whose logits are asked for; None is every token.
            key: a single key, which turns dropout on.
            capture: names of places (`transformer_jax.places`), whose values are returned; those of
                the encoder need a source.
            edit: functions by the names of places, which change the values there.

        Returns:
            Logits f32[B, T, V], of `at` [B, Q, V], and the state; with `capture` also the values by
            name.

        Raises:
            ValueError: if not one of source and state is given, or arguments do not fit.
        """
        if (source is None) == (state is None):
            raise ValueError("give either source or state: a state has already read its source")
        if source is None and source_valid is not None:
            raise ValueError("source_valid without a source: a state has already read it")
        refuse_rngs(self, key)
        check_tokens(tokens, self.config.vocab_size)
        encoder_key, key = split_key(key, 2)
        places = Places.of(self, capture, edit)
        inside = places.inside("encoder/")
        captured: Captured = {}
        whole = state is None
        if source is not None:
            state, captured = self._read(source, source_valid, encoder_key, inside)
        else:  # the model's own edits of the encoder made what the state holds
            asked = Places.of(self.config, capture, edit).inside("encoder/")
            for name in (*asked.capture, *dict(asked.edit)):
                raise ValueError(f"encoder/{name} with a state: it has already read its source")
        assert state is not None
        logits, state, own = read_tokens(
            self, tokens, state, valid=valid, at=at, key=key, places=places, whole=whole
        )
        captured = {f"encoder/{name}": value for name, value in captured.items()} | own
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
    whole: bool,  # whether no token of the tokens' sequences was read before
) -> tuple[jax.Array, RecurrentState, Captured]:
    """Embed, run the decoder's cells and read the logits; shared by both models."""
    refuse_rngs(model, key)
    check_recurrent_state(model.config, state, tokens.shape[0])
    positions = None
    if places.edit:
        positions = sequence_positions(tokens, None if whole else state.length, valid, segments)
        packed, count = segments is not None, tokens.shape[1]
        places = places.told(positions, whole=whole, packed=packed, count=count)
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
        last = last_document(documents, valid).max(axis=1, initial=0, keepdims=True)
        read = (valid & (documents == last)).sum(axis=1, dtype=jnp.int32)
        state = replace(state, length=read)
    x = visit("read_out", dropout(x, model.config.dropout, top_key))
    logits = visited_logits(model.embed, x, at, visit)
    return logits, state, captured | visit.captured


def check_recurrent_state(
    config: RecurrentConfig, state: RecurrentState, rows: int, said: str = "tokens have"
) -> None:
    """Raise ValueError unless the state has the tokens' rows and the model's cells and memory."""
    if not isinstance(state, RecurrentState):
        raise ValueError(f"state is a {type(state).__name__}: must be a RecurrentState")
    check_not_consumed(state)
    held = state.length.shape[0]
    if held != rows:
        raise ValueError(f"{said} {rows} rows, the state {held}")
    wanted = jax.eval_shape(lambda: zero_carry(config, rows))
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
