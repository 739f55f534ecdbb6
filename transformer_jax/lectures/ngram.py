"""Count n-grams, and predict from them with interpolated Kneser-Ney smoothing.

After a context h of k tokens, h' being the last k - 1 of them,

    P_k(w | h) = max(c(h w) - d, 0) / c(h .) + d N(h .) / c(h .) P_(k-1)(w | h')
    P_(-1)(w)  = 1 / V

c(h w) is how often h w occurs where h has n - 1 tokens, and where it has fewer how many different
tokens stand before h w (Kneser & Ney 1995); c(h .) is its sum over w, and N(h .) the number of w
with c(h w) > 0. An h that nothing follows leaves P_k = P_(k-1). The discount of each order is
d = n1 / (n1 + 2 n2), n1 and n2 being how many of its n-grams have c = 1 and c = 2 (Ney et al. 1994;
Chen & Goodman 1999, section 2.7), or 1/2 where one of them is 0: so it is between 0 and 1, and no
probability is 0.

A document begins after n - 1 signs for its beginning, which are context and are never predicted.

The n-grams lie in a trie, an array for each order, sorted: the tokens that follow node i of order k
are `words[start[i]:start[i + 1]]` of order k + 1. The sign for the beginning is the word V.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from transformer_jax.config.architectures import Ability, AnyModelConfig, PlaceShapes
from transformer_jax.config.fields import FieldValue, Size, check_types, fail, unread
from transformer_jax.config.keywords import config_class
from transformer_jax.lectures.recent_tokens import (
    RecentTokens,
    RecentTokensStep,
    init_recent_tokens,
    result_of,
    slide_window,
)
from transformer_jax.models.arguments import CheckedModule, check_tokens
from transformer_jax.models.layers import refuse_surplus
from transformer_jax.models.places import NO_EDIT, Captured, Edit, Places
from transformer_jax.pytree import Params

F32 = jnp.float32

CHUNK = 64
"""Followers of a context that are added at a time; the loop ends with the longest context's."""


@config_class
class NgramConfig(AnyModelConfig):
    """Describe an n-gram model with interpolated Kneser-Ney smoothing (Chen & Goodman 1999)."""

    vocab_size: Size = 256
    """Token kinds."""
    order: Size = 5
    """n: a prediction sees n - 1 tokens."""
    nodes: tuple[int, ...] | None = None
    """Distinct 1-grams, 2-grams, ... n-grams that are stored: the sizes of the parameters, which
    `count_ngrams` fills in. None before counting."""

    abilities: ClassVar[frozenset[Ability]] = frozenset()

    def __post_init__(self) -> None:
        check_types(self)
        if self.nodes is None:
            return
        if len(self.nodes) != self.order:
            fail("nodes", self.nodes, f"must have one entry for each order up to {self.order}")
        if min(self.nodes) < 1 or max(self.nodes) >= 2**31 - 1:
            fail("nodes", self.nodes, "must be positive and below 2**31 - 1")

    @property
    def context(self) -> int:
        """Return how many tokens a prediction sees."""
        return self.order - 1

    def check_training(self, run: FieldValue) -> None:
        if run.steps != 1:
            fail("steps", run.steps, "an n-gram model is counted in one step: must be 1")
        rule = "an n-gram model is counted, and has no steps"
        unread(run, rule, "ema_decay", "param_dtype", "z_loss")

    def build(self) -> NgramLM:
        return NgramLM(self)

    def init_state(self, batch: int) -> RecentTokens:
        return init_recent_tokens(self, batch)

    def count(self, documents: Any) -> tuple[NgramConfig, Any]:
        return count_ngrams(self, documents)

    def places(self) -> PlaceShapes:
        return {"logits": ("B", "T", self.vocab_size)}


def count_ngrams(
    config: NgramConfig,
    documents: np.ndarray | Sequence[np.ndarray],  # i32[T], or i32[T] of each document
) -> tuple[NgramConfig, Params]:
    """Count the n-grams of documents: the config with its `nodes`, and the model's parameters.

    Time and memory are those of sorting the tokens once for each order.

    Args:
        config: of the model; its `nodes` are not read.
        documents: i32[T] is one document, of i32[B, T] each row is one; or several i32[T].

    Raises:
        ValueError: if there is no token, or one is outside the vocabulary.
    """
    if getattr(documents, "ndim", None) == 1:
        documents = [np.asarray(documents)]
    # all tokens in a line, each document after the signs of its beginning, and the room to its end
    begin = np.full(config.context, config.vocab_size, np.int64)
    line, rooms = [], []
    for document in documents:
        tokens = np.asarray(document)
        if tokens.ndim != 1:
            raise ValueError(f"a document has shape {tokens.shape}: must be [T]")
        if len(tokens) == 0:
            continue
        check_tokens(tokens[None], config.vocab_size)
        line += [begin, tokens.astype(np.int64)]
        rooms.append(np.arange(len(begin) + len(tokens), 0, -1))
    if not line:
        raise ValueError("documents have no tokens: there is nothing to count")
    words, room = np.concatenate(line), np.concatenate(rooms)
    size = config.vocab_size + 1
    node = np.zeros(len(words), np.int64)  # of the k-gram that begins at each place
    keys, firsts, counts, nodes = [], [], [], [node]
    for k in range(1, config.order + 1):
        places = np.flatnonzero(room >= k)
        key = node[places] * size + words[places + k - 1]
        kinds, first, inverse, count = np.unique(
            key, return_index=True, return_inverse=True, return_counts=True
        )
        node = np.zeros(len(words), np.int64)
        node[places] = inverse
        keys.append(kinds)
        firsts.append(places[first])
        counts.append(count)
        nodes.append(node)
    for k in range(config.order - 1, 0, -1):  # below the highest order: how many stand before
        inner = nodes[k][firsts[k] + 1]
        counts[k - 1] = np.bincount(inner, minlength=len(keys[k - 1]))
    params: dict[str, np.ndarray] = {}
    parents = 1
    for k, (kinds, count) in enumerate(zip(keys, counts, strict=True), start=1):
        params |= _smooth(k, kinds, count, size, parents)
        parents = len(kinds)
    return dataclasses.replace(config, nodes=tuple(len(kinds) for kinds in keys)), params


def _smooth(
    order: int,
    keys: np.ndarray,  # i64[N]: (parent, word) of each n-gram, sorted
    counts: np.ndarray,  # i64[N]
    size: int,  # V + 1
    parents: int,  # P: n-grams one token shorter
) -> dict[str, np.ndarray]:
    """Return an order's words and weights, and where they start and the backoff an order below."""
    parent, word = np.divmod(keys, size)
    counts = np.where(word == size - 1, 0, counts)  # a beginning is not predicted
    once, twice = np.sum(counts == 1), np.sum(counts == 2)
    # without n-grams that occur once, or twice, the estimate is 0, 1 or undefined
    discount = once / (once + 2 * twice) if once and twice else 0.5
    total = np.bincount(parent, counts, parents)
    kinds = np.bincount(parent, counts > 0, parents)
    followed = np.maximum(total, 1)
    weights = np.maximum(counts - discount, 0) / followed[parent]
    # where nothing follows a context, all of the probability is that of the shorter one
    backoff = np.where(total > 0, discount * kinds / followed, 1.0)
    start = np.searchsorted(parent, np.arange(parents + 1))
    return {
        f"words_{order}": word.astype(np.int32),
        f"weights_{order}": weights.astype(np.float32),
        f"start_{order - 1}": start.astype(np.int32),
        f"backoff_{order - 1}": backoff.astype(np.float32),
    }


class NgramLM(CheckedModule):
    """Predict each token from counts of n-grams; the parameters come from `count_ngrams`.

    Attributes:
        config: with the `nodes` that were counted.
    """

    config: NgramConfig

    @nn.nowrap
    def as_step(self) -> RecentTokensStep:
        """Return the step of `make_step`."""
        return RecentTokensStep(self)

    def setup(self) -> None:
        cfg = self.config
        if cfg.nodes is None:
            rule = "count first: config, params = count_ngrams(config, documents)"
            fail("nodes", cfg.nodes, rule)
        sizes, orders = (1, *cfg.nodes), range(cfg.order)
        self.words = [self._array(f"words_{k + 1}", sizes[k + 1], jnp.int32) for k in orders]
        self.weights = [self._array(f"weights_{k + 1}", sizes[k + 1], F32) for k in orders]
        self.start = [self._array(f"start_{k}", sizes[k] + 1, jnp.int32) for k in orders]
        self.backoff = [self._array(f"backoff_{k}", sizes[k], F32) for k in orders]
        refuse_surplus(self)

    def _array(self, name: str, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Declare an array of the trie; zeros until it is counted."""
        value = self.param(name, lambda key: jnp.zeros((size,), dtype))
        return jnp.asarray(value)  # NumPy's arrays have no traced indices

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        state: RecentTokens | None = None,
        valid: jax.Array | None = None,  # bool[B, T]
        segments: jax.Array | None = None,  # i32[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        capture: Sequence[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> tuple[jax.Array, RecentTokens] | tuple[jax.Array, RecentTokens, Captured]:
        """Return log-probabilities of the next token as logits, and the state after these.

        Args:
            tokens: i32[B, T].
            state: of the tokens before; None is the beginning.
            valid: bool[B, T], False is padding; None has none.
            segments: i32[B, T], ids of packed documents, none of which sees another; not with a
                state.
            at: i32[B, Q], indices of the tokens whose logits are asked for; None is every token.
            capture: names of places (`transformer_jax.places`), whose values are returned.
            edit: functions by the names of places, which change the values there.

        Returns:
            Logits f32[B, T, V], of `at` [B, Q, V], and the state; with `capture` also the values by
            name.

        Raises:
            ValueError: if arguments do not fit.
        """
        cfg, places = self.config, Places.of(self, capture, edit)
        windows, state, visit = slide_window(cfg, tokens, state, valid, segments, at, places)
        shape = (*windows.shape[:2], cfg.vocab_size)
        contexts = rearrange(windows, "B Q C -> (B Q) C")
        # V stands here for a token outside the vocabulary, and in the trie for a beginning
        unknown = (contexts == cfg.vocab_size).any(axis=1, keepdims=True)
        nodes = self._walk(jnp.where(contexts < 0, cfg.vocab_size, contexts))
        lowest = jnp.full((1, cfg.vocab_size), 1 / cfg.vocab_size, F32)
        p = self._interpolate(0, lowest, jnp.zeros((1,), jnp.int32))
        p = jnp.broadcast_to(p, (len(contexts), cfg.vocab_size))
        for k in range(1, cfg.order):
            p = self._interpolate(k, p, nodes[:, k - 1])
        logits = visit("logits", jnp.where(unknown, jnp.nan, jnp.log(p)).reshape(shape))
        return result_of(visit, places, logits, state, at)

    def _walk(self, contexts: jax.Array) -> jax.Array:  # i32[X, C] -> i32[X, C]
        """Return the node of the last 1, 2, ... C tokens of each context; -1 where never counted.

        All lengths go down the trie together: at depth d those of at least d tokens remain.
        """
        nodes = jnp.zeros_like(contexts)
        for depth in range(self.config.context):
            token, words = contexts[:, depth:][:, ::-1], self.words[depth]

            def halve(
                _: jax.Array,
                bounds: tuple[jax.Array, jax.Array],
                token: jax.Array = token,
                words: jax.Array = words,
            ) -> tuple[jax.Array, jax.Array]:
                low, high = bounds
                middle = low + (high - low) // 2
                after = (low < high) & (words[middle] < token)
                return jnp.where(after, middle + 1, low), jnp.where(after, high, middle)

            low, end = self._followers(depth, nodes[:, depth:])
            # binary search: a node has at most V + 1 followers, one of them the beginning
            steps = (self.config.vocab_size + 1).bit_length()
            low, _ = jax.lax.fori_loop(0, steps, halve, (low, end))
            below = jnp.where((low < end) & (words[low] == token), low, -1)
            nodes = nodes.at[:, depth:].set(below)
        return nodes

    def _followers(self, order: int, node: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the first and the end of what follows these nodes; of -1, nothing."""
        start = self.start[order]
        return jnp.where(node < 0, 0, start[node]), jnp.where(node < 0, 0, start[node + 1])

    def _interpolate(
        self,
        order: int,
        p: jax.Array,  # f32[X, V]: P of the context that is a token shorter
        node: jax.Array,  # i32[X]
    ) -> jax.Array:  # f32[X, V]
        """Return the discounted part of P after these contexts, and its backoff times `p`.

        The weights are scattered some at a time, up to those of the longest list of followers.
        """
        words, weights = self.words[order], self.weights[order]
        low, end = self._followers(order, node)
        # a context that was never counted leaves the shorter one's probabilities as they are
        p = p * jnp.where(node < 0, 1.0, self.backoff[order][node])[:, None]
        rows, longest = jnp.arange(len(p))[:, None], (end - low).max(initial=0)

        def add(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            done, p = carry
            index = low[:, None] + done + jnp.arange(CHUNK)[None]
            word = jnp.where(index < end[:, None], words[index], self.config.vocab_size)
            return done + CHUNK, p.at[rows, word].add(weights[index], mode="drop")

        return jax.lax.while_loop(lambda carry: carry[0] < longest, add, (jnp.int32(0), p))[1]
