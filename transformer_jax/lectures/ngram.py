"""N-gram language model with interpolated Kneser-Ney smoothing.

After a context h of k tokens, where h' contains the last k - 1 of them, the probability is

    P_k(w | h) = max(c(h w) - d, 0) / c(h .) + d N(h .) / c(h .) P_(k-1)(w | h')
    P_(-1)(w)  = 1 / V

At the highest order (h has n - 1 tokens), c(h w) is the count of h w. At lower orders, it is the
number of distinct tokens that precede h w (Kneser & Ney 1995). c(h .) is the sum over w, and N(h .)
is the number of w with c(h w) > 0. If nothing follows h, P_k = P_(k-1). The discount of each order
is d = n1 / (n1 + 2 n2), where n1 and n2 are the numbers of n-grams with c = 1 and c = 2 (Ney et al.
1994; Chen & Goodman 1999, section 2.7), or 1/2 if either is 0. Therefore, 0 < d < 1, and every P is
positive.

Each document starts with n - 1 start symbols, which are the word V and are never predicted.

The n-grams are stored in a trie with one sorted array per order. The tokens that follow node i of
order k are `words[start[i]:start[i + 1]]` of order k + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
from transformer_jax.models.places import Captured, Places
from transformer_jax.pytree import Params

F32 = jnp.float32

CHUNK = 64
"""Number of a context's followers that are added per iteration."""


@config_class
class NgramConfig(AnyModelConfig):
    """Config for an n-gram model with interpolated Kneser-Ney smoothing (Chen & Goodman 1999)."""

    vocab_size: Size = 256
    """Size of the vocabulary."""
    order: Size = 5
    """The order n of the model. A prediction sees n - 1 tokens."""
    nodes: tuple[int, ...] | None = None
    """Numbers of distinct 1-grams to n-grams, which are the sizes of the parameters. `count_ngrams`
    sets this field, which is None before counting."""

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
        """Return the number of tokens that a prediction sees."""
        return self.order - 1

    def check_training(self, run: FieldValue) -> None:
        if run.steps != 1:
            fail("steps", run.steps, "must be 1, because an n-gram model is counted in one step")
        rule = "an n-gram model is counted, not trained"
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
    """Count the n-grams in documents, and return the config with `nodes` and the parameters.

    The tokens are sorted once per order.

    Args:
        config: config of the model, whose `nodes` are ignored.
        documents: one document i32[T], one document per row i32[B, T], or a list of documents
            i32[T].

    Raises:
        ValueError: If there are no tokens or a token is outside the vocabulary.
    """
    if getattr(documents, "ndim", None) == 1:
        documents = [np.asarray(documents)]
    # concatenate the documents, each after its start symbols, where `room` is the number of tokens
    # up to the end
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
        raise ValueError("documents have no tokens: pass at least one token")
    words, room = np.concatenate(line), np.concatenate(rooms)
    size = config.vocab_size + 1
    node = np.zeros(len(words), np.int64)  # node of the k-gram that starts at each position
    keys, firsts, counts, nodes = [], [], [], [node]
    for k in range(1, config.order + 1):
        starts = np.flatnonzero(room >= k)
        # one integer for each pair of a node and a word, so that sorting groups the words by node
        key = node[starts] * size + words[starts + k - 1]
        kinds, first, inverse, count = np.unique(
            key, return_index=True, return_inverse=True, return_counts=True
        )
        node = np.zeros(len(words), np.int64)
        node[starts] = inverse
        keys.append(kinds)
        firsts.append(starts[first])
        counts.append(count)
        nodes.append(node)
    for k in range(config.order - 1, 0, -1):  # lower orders count distinct predecessors
        inner = nodes[k][firsts[k] + 1]
        counts[k - 1] = np.bincount(inner, minlength=len(keys[k - 1]))
    params: dict[str, np.ndarray] = {}
    parents = 1
    for k, (kinds, count) in enumerate(zip(keys, counts, strict=True), start=1):
        parent, word = np.divmod(kinds, size)
        count = np.where(word == size - 1, 0, count)  # the start symbol is never predicted
        once, twice = np.sum(count == 1), np.sum(count == 2)
        # if there are no counts of 1 or of 2, the estimate is 0, 1, or undefined
        discount = once / (once + 2 * twice) if once and twice else 0.5
        total = np.bincount(parent, count, parents)
        followers = np.bincount(parent, count > 0, parents)
        followed = np.maximum(total, 1)
        weights = np.maximum(count - discount, 0) / followed[parent]
        # if nothing follows a context, all the probability comes from the shorter context
        backoff = np.where(total > 0, discount * followers / followed, 1.0)
        params[f"words_{k}"] = word.astype(np.int32)
        params[f"weights_{k}"] = weights.astype(np.float32)
        params[f"start_{k - 1}"] = np.searchsorted(parent, np.arange(parents + 1)).astype(np.int32)
        params[f"backoff_{k - 1}"] = backoff.astype(np.float32)
        parents = len(kinds)
    return dataclasses.replace(config, nodes=tuple(len(kinds) for kinds in keys)), params


class NgramLM(CheckedModule):
    """N-gram language model whose parameters come from `count_ngrams`.

    Attributes:
        config: config from `count_ngrams`, with `nodes`.
    """

    config: NgramConfig

    @nn.nowrap
    def as_step(self) -> RecentTokensStep:
        """Return the decoding step for `make_step`."""
        return RecentTokensStep(self)

    def setup(self) -> None:
        cfg = self.config
        if cfg.nodes is None:
            rule = "count first with config, params = count_ngrams(config, documents)"
            fail("nodes", cfg.nodes, rule)
        sizes, orders = (1, *cfg.nodes), range(cfg.order)
        self.words = [self._array(f"words_{k + 1}", sizes[k + 1], jnp.int32) for k in orders]
        self.weights = [self._array(f"weights_{k + 1}", sizes[k + 1], F32) for k in orders]
        self.start = [self._array(f"start_{k}", sizes[k] + 1, jnp.int32) for k in orders]
        self.backoff = [self._array(f"backoff_{k}", sizes[k], F32) for k in orders]
        refuse_surplus(self)

    def _array(self, name: str, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Declare an array of the trie, initialized to zeros."""
        value = self.param(name, lambda key: jnp.zeros((size,), dtype))
        return jnp.asarray(value)  # a NumPy array cannot be indexed by a tracer

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, T]
        *,
        state: RecentTokens | None = None,
        valid: jax.Array | None = None,  # bool[B, T]
        segments: jax.Array | None = None,  # i32[B, T]
        at: jax.Array | None = None,  # i32[B, Q]
        capture: Sequence[str] = (),
    ) -> tuple[jax.Array, RecentTokens] | tuple[jax.Array, RecentTokens, Captured]:
        """Return the log-probabilities of the next tokens, as logits, and the new state.

        Args:
            tokens: i32[B, T].
            state: state after the previous tokens; None starts a sequence.
            valid: bool[B, T], False marks padding; None means no padding.
            segments: i32[B, T], IDs of packed documents, which cannot see each other. This argument
                cannot be combined with `state`.
            at: i32[B, Q], indices of the tokens whose logits are computed; None means all tokens.
            capture: names of places (`transformer_jax.places`) whose values are returned.

        Returns:
            Logits f32[B, T, V], or [B, Q, V] with `at`; the new state; and, with `capture`, the
            values keyed by place.

        Raises:
            ValueError: If the arguments are invalid.
        """
        cfg, places = self.config, Places.of(self, capture)
        windows, state, visit = slide_window(cfg, tokens, state, valid, segments, at, places)
        shape = (*windows.shape[:2], cfg.vocab_size)
        contexts = rearrange(windows, "B Q C -> (B Q) C")
        # V marks an unknown token here but the start symbol in the trie
        unknown = (contexts == cfg.vocab_size).any(axis=1, keepdims=True)
        # A negative token is before the beginning, where the trie has start symbols.
        nodes = self._walk(jnp.where(contexts < 0, cfg.vocab_size, contexts))
        lowest = jnp.full((1, cfg.vocab_size), 1 / cfg.vocab_size, F32)
        p = self._interpolate(0, lowest, jnp.zeros((1,), jnp.int32))
        # the unigram probabilities have no context, so they are computed once for all rows
        p = jnp.broadcast_to(p, (len(contexts), cfg.vocab_size))
        for k in range(1, cfg.order):
            p = self._interpolate(k, p, nodes[:, k - 1])
        logits = visit("logits", jnp.where(unknown, jnp.nan, jnp.log(p)).reshape(shape))
        return result_of(visit, places, logits, state, at)

    def _walk(self, contexts: jax.Array) -> jax.Array:  # i32[X, C] -> i32[X, C]
        """Return the nodes of the last 1, 2, ..., C tokens of each context, or -1 if never counted.

        Contexts of all lengths are looked up in one pass down the trie. At depth d, those with more
        than d tokens remain.
        """
        nodes = jnp.zeros_like(contexts)
        for depth in range(self.config.context):
            # Column j looks up the last j + 1 tokens, so at this depth it reads token C - 1 - j +
            # depth.
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
            # binary search, because a node has up to V + 1 followers, including the start symbol
            steps = (self.config.vocab_size + 1).bit_length()
            low, _ = jax.lax.fori_loop(0, steps, halve, (low, end))
            below = jnp.where((low < end) & (words[low] == token), low, -1)
            nodes = nodes.at[:, depth:].set(below)
        return nodes

    def _followers(self, order: int, node: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the half-open ranges of the followers of nodes, which are empty for -1."""
        start = self.start[order]
        return jnp.where(node < 0, 0, start[node]), jnp.where(node < 0, 0, start[node + 1])

    def _interpolate(
        self,
        order: int,
        p: jax.Array,  # f32[X, V]: P for the context that is one token shorter
        node: jax.Array,  # i32[X]
    ) -> jax.Array:  # f32[X, V]
        """Return the discounted probabilities in these contexts, plus the backoff times `p`.

        Weights are scattered in as many chunks as the longest list of followers requires.
        """
        words, weights = self.words[order], self.weights[order]
        low, end = self._followers(order, node)
        # an uncounted context uses the probabilities of the shorter context
        p = p * jnp.where(node < 0, 1.0, self.backoff[order][node])[:, None]
        rows, longest = jnp.arange(len(p))[:, None], (end - low).max(initial=0)

        def add(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            done, p = carry
            index = low[:, None] + done + jnp.arange(CHUNK)[None]
            # Column V does not exist, so the scatter drops entries past the last follower, and
            # start symbols.
            word = jnp.where(index < end[:, None], words[index], self.config.vocab_size)
            return done + CHUNK, p.at[rows, word].add(weights[index], mode="drop")

        return jax.lax.while_loop(lambda carry: carry[0] < longest, add, (jnp.int32(0), p))[1]
