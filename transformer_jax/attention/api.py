"""Public attention functions, which choose an implementation for each call.

    dot_product_attention           softmax(scale q k + bias, masked) v
    explain_attention               the implementations that would run, and why others would not
    dot_product_attention_weights   the attention weights
    additive_attention              Bahdanau et al. 2015
    state_attention                 Luong et al. 2015

The implementations are the values of `IMPLEMENTATIONS`, and all of them compute the same function.
If you request one by name, it either runs or raises NotImplementedError with the condition that
failed. `explain_attention` reports this condition in advance, with one exception: it cannot see a
`vmap` around the call, which may make the tile lists too long for a TPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack, overload

import jax
from jax.sharding import PartitionSpec

from transformer_jax.attention.additive import additive_attention, state_attention
from transformer_jax.attention.arguments import (
    AttentionCall,
    Implementation,
    Options,
    Plan,
    PlannedMask,
    Refused,
    check_call,
)
from transformer_jax.attention.biases import Bias
from transformer_jax.attention.blockwise.core import Blockwise, parts_of_types
from transformer_jax.attention.blockwise.tiles import FEW_QUERIES
from transformer_jax.attention.cudnn import Cudnn
from transformer_jax.attention.fused import Invariant, Native, Pallas
from transformer_jax.attention.masks import Mask
from transformer_jax.attention.reference import Xla, reference_weights
from transformer_jax.attention.ring import SplitLengths, attend, split_lengths
from transformer_jax.attention.score_mod import ScoreFunction
from transformer_jax.config.keywords import known_keywords, refuse_keywords
from transformer_jax.kernels import cpu, platform, target
from transformer_jax.kernels.chips import FASTEST
from transformer_jax.programs import depends_on_names, program
from transformer_jax.sharding import by_compiler, split
from transformer_jax.tracing import are_concrete

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionCall",
    "Bias",
    "Explanation",
    "Implementation",
    "Refused",
    "additive_attention",
    "dot_product_attention",
    "dot_product_attention_weights",
    "explain_attention",
    "state_attention",
]

IMPLEMENTATIONS: dict[str, Implementation] = {
    "xla": Xla(),
    "blockwise": Blockwise(),
    "pallas": Pallas(),
    "pallas_unordered": Pallas(single_pass=True),
    "cudnn": Cudnn(),
    "native": Native(),
    "invariant": Invariant(),
}
"""Implementations, keyed by name. Add an entry to use your own."""
# compiled programs are cached by these names, so replacing a value must cause a new trace
depends_on_names(IMPLEMENTATIONS)


Array = jax.Array
Names = str | Sequence[str] | None


@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, *,
    return_lse: Literal[False] = False, implementation: Names = None, **options: Unpack[Options],
) -> Array: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, *,
    return_lse: Literal[True], implementation: Names = None, **options: Unpack[Options],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Array, key: Array, value: Array, *,
    return_lse: bool, implementation: Names = None, **options: Unpack[Options],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@known_keywords
def dot_product_attention(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H], or paged [P, page, K, H]
    value: jax.Array,  # [B, S, K, Hv], or paged [P, page, K, Hv]
    *,
    mask: Mask | PlannedMask | None = None,
    bias: jax.Array | Bias | None = None,
    score_mod: ScoreFunction | None = None,
    scale: float | jax.Array | None = None,  # a number or [N]
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    q_positions: jax.Array | None = None,  # i32[T] or [B, T]
    k_positions: jax.Array | None = None,  # i32[S] or [B, S]
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
    key_scale: jax.Array | None = None,  # f32[B, S, K], or paged [P, page, K]
    value_scale: jax.Array | None = None,  # f32[B, S, K], or paged [P, page, K]
    block_table: jax.Array | None = None,  # i32[B, M]
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], or with lse [B, T, N]
    """Return softmax(s) v over the query-key pairs that the mask allows.

        s = score_mod(softcap tanh(scale q.k / softcap) + bias)

    Query head n reads key head n // (N / K). If a query sees no key, its output is zero, its lse is
    -inf, and it has no gradient.

    NaN or inf in a query, key or value affects only the queries that see it: their output is NaN,
    and they have no gradient. "pallas" and "pallas_unordered" are exceptions. They require all
    queries, keys and values to be finite, even hidden ones; otherwise, any output may become NaN.

    With a `block_table`, keys and values are stored in the pages of a pool, as in a `PagedCache`:
    key j of row b is in slot j % page of page block_table[b, j // page]. S is then M * page, and
    the mask, bias and positions refer to j as usual. An invalid entry, such as -1, reads an
    arbitrary page, so hide its keys with the mask or with `k_positions` of -1. If there are few
    queries, the kernels for NVIDIA GPUs and TPUs read int8 directly, and read pages in place if the
    page size is a multiple of 64 (NVIDIA) or 128 (TPU). All other implementations read a gathered,
    dequantized copy.

    The implementations are:

        xla               materializes the scores; supports every option
        blockwise         memory O(T + S); O(T S) in forward mode and in derivatives of the gradient
        native            compiled C++ on a CPU; memory O(T + S) for all derivatives
        invariant         "native" with the same bits for a row whatever else is in the call
        pallas            fused kernels, also O(T + S), for TPUs and for NVIDIA GPUs from Ampere on
        pallas_unordered  on Hopper, a faster backward pass whose last bits vary between runs
        cudnn             NVIDIA's library, on NVIDIA GPUs

    Args:
        query: [B, T, N, H], in bfloat16, float16, float32 or float64.
        key: [B, S, K, H], K divides N, in the query's dtype or int8; paged [P, page, K, H].
        value: [B, S, K, Hv], in the key's dtype; paged [P, page, K, Hv].
        mask: the keys that each query sees, for example `Causal() & Window(32)`; None means all.
        bias: an array that broadcasts to [B, N, T, S], or a `Bias` such as `ALiBi`, which depends
            on positions instead of indices; None means no bias.
        score_mod: function (score, row, head, q_position, k_position) -> score of scalars, which
            may read other arrays, such as `table[head]`. It is differentiated, also with respect to
            these arrays, and must be differentiable for every pair, even a hidden one. A result of
            -inf hides the pair. "xla" and "blockwise" support it. So does "pallas" on a TPU, if
            the operations on scores and on pairs of positions are elementwise.
        scale: factor for q.k, either a number or an array [N] with one factor per query head. It
            may be traced and differentiated. None means 1 / sqrt(H).
        softcap: bound on the scores, applied before the bias; above 0. None means no bound.
        sinks: [N]; exp(sinks[n]) is added to the denominator of the softmax.
        q_positions: i32[T] or [B, T], the positions for mask and bias; None means arange(T).
        k_positions: i32[S] or [B, S]; a key at a negative position is an empty slot. None means
            arange(S).
        dropout_rate: probability of dropping a weight after the softmax, at least 0 and below 1.
            All implementations drop the same weights.
        dropout_key: a single PRNG key, required if the rate is above 0.
        broadcast_dropout: whether all batch rows and heads drop the same pairs of query and key, as
            in flax. By default, each weight is dropped independently.
        key_scale: f32[B, S, K], or paged [P, page, K]: the scales of int8 keys, which are
            dequantized to scale * key.
        value_scale: f32[B, S, K], or paged [P, page, K]: the scales of int8 values.
        block_table: i32[B, M], the page that stores each block of a row.
        return_lse: whether to also return lse, the natural logarithm of the softmax denominator,
            including sinks.
        implementation: a name, or a sequence of names to try in order. None chooses the fastest one
            that runs here, which `explain_attention` reports.

    Returns:
        The output [B, T, N, Hv] in the query's dtype. With `return_lse`, the function also returns
        lse [B, T, N] in float32, or in float64 if the query is float64.

    Raises:
        ValueError: If the arguments are invalid or do not match.
        NotImplementedError: If none of the named implementations supports the arguments. The
            message lists the reasons.
    """
    call = check_call(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        score_mod=score_mod,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        q_positions=q_positions,
        k_positions=k_positions,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        broadcast_dropout=broadcast_dropout,
        key_scale=key_scale,
        value_scale=value_scale,
        block_table=block_table,
        return_lse=return_lse,
    )
    refused = []
    for name, plan, lengths in _plans(call, implementation):
        if isinstance(plan, Plan):
            try:
                # calls with and without lse share one compiled program; inside an outer `jit`, the
                # compiler removes an unused lse
                planned = replace(call, plan=plan, return_lse=False)
                out, lse = _run(IMPLEMENTATIONS[name], planned, lengths)
                if not return_lse:
                    return out
                assert lse is not None
                return out, lse
            except Refused as error:
                # `plan` sees only shapes; only the trace shows whether a `vmap` around this call
                # makes the tile lists longer
                plan = str(error)
        refused.append(f"{name}: {plan}")
    raise Refused("; ".join(refused))


@dataclass(frozen=True, eq=False)
class Explanation(Mapping[str, str | None]):
    """Mapping from each implementation to None, or to the reason why it would not run.

    Attributes:
        reasons: for each implementation, keyed by name, the reason why it would not run, or None.
        chosen: the implementation that `implementation=None` would run.
        reads_pages: the implementations that read the pages of a `block_table` in place if the call
            is not differentiated; the others gather the pages.
        lengths: how T and S are computed if a mesh splits them, or why they are gathered; None if
            they are whole.
    """

    reasons: Mapping[str, str | None]
    chosen: str
    reads_pages: frozenset[str] = frozenset()
    lengths: str | None = None

    def __getitem__(self, name: str) -> str | None:
        return self.reasons[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reasons)

    def __len__(self) -> int:
        return len(self.reasons)

    def __str__(self) -> str:
        how = {name: "runs, reads pages in place" for name in self.reads_pages}
        lines = [f"{name}: {why or how.get(name, 'runs')}" for name, why in self.reasons.items()]
        lengths = [] if self.lengths is None else [f"lengths: {self.lengths}"]
        return "\n".join([*lines, f"default: {self.chosen}", *lengths])

    __repr__ = __str__


def explain_attention(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Explanation:
    """Report which implementations of `dot_product_attention` support these arguments.

    Args:
        query: [B, T, N, H]. Like all arrays here, it may be a `jax.ShapeDtypeStruct`.
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        return_lse: as in `dot_product_attention`.
        **options: the other arguments of `dot_product_attention` except `implementation`.

    Returns:
        For each implementation, None or the reason why it would not run (see `Explanation`).

    Raises:
        ValueError: If the arguments are invalid or do not match.
    """
    if unknown := {name: x for name, x in options.items() if name not in Options.__annotations__}:
        refuse_keywords(explain_attention, unknown, Options.__annotations__)
    call = check_call(query, key, value, return_lse=return_lse, **options)
    plans = {name: _plan(name, call) for name in IMPLEMENTATIONS}
    reasons = {name: plan if isinstance(plan, str) else None for name, plan in plans.items()}
    found = (x for x in _plans(call) if isinstance(x[1], Plan))
    chosen, _, split_up = next(found)
    ways, lengths = split_lengths(call), None
    if split_up is not None:
        assert isinstance(ways, list)
        others = [way.describe(call) for way in ways if way != split_up]
        lengths = "; alternative: ".join([split_up.describe(call), *others])
    elif ways is not None:
        why = ways if isinstance(ways, str) else f"{chosen} computes only whole calls"
        lengths = f"gathered, because {why}"
    in_place = (n for n, plan in plans.items() if isinstance(plan, Plan) and plan.reads_pages)
    return Explanation(reasons, chosen, frozenset(in_place), lengths)


def plan_mask(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    *,
    implementation: str | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Mask | PlannedMask | None:
    """Return a mask with precomputed tile lists, for repeated calls of `dot_product_attention`.

    Use it if all layers of a model share a mask and positions. Otherwise, inside a `lax.scan` or
    under `jax.checkpoint`, XLA would recompute the tile lists of a fused kernel for each layer.

    Args:
        query: [B, T, N, H], as in the calls. Like all arrays here, it may be a
            `jax.ShapeDtypeStruct`.
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        implementation: as in the calls.
        **options: the mask for the calls, and all arguments that affect the choice of tiles.

    Returns:
        The mask with its tile lists, or the unchanged mask if there is nothing to share or the mesh
        has explicit axes.
    """
    call = check_call(query, key, value, **options)
    mask, (B, T, N, S) = call.mask, call.sizes
    leaves = jax.tree.leaves((mask, call.q_positions, call.k_positions))
    if any(jax.typeof(x).sharding.mesh.explicit_axes for x in leaves) or split_lengths(call):
        return mask
    # as in `check_call`: with explicit positions, a mask is not read at 0 .. T - 1
    T_checked = None if call.q_positions is not None else T
    S_checked = None if call.k_positions is not None else S
    checked = B, N, T_checked, S_checked
    for name in _candidates(call, implementation):
        plan, one = _plan(name, call), IMPLEMENTATIONS[name]
        if isinstance(plan, Plan):
            if mask is None or type(one).share is Implementation.share:
                return mask
            shared = one.share(replace(call, plan=plan))
            return mask if shared is None else PlannedMask(mask, shared, checked)
    return mask


@known_keywords
def dot_product_attention_weights(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    *,
    mask: Mask | None = None,
    bias: jax.Array | Bias | None = None,
    score_mod: ScoreFunction | None = None,
    scale: float | jax.Array | None = None,  # a number or [N]
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    q_positions: jax.Array | None = None,  # i32[T] or [B, T]
    k_positions: jax.Array | None = None,  # i32[S] or [B, S]
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:  # f32[B, N, T, S]
    """Return the attention weights of `dot_product_attention`.

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H], K divides N.
        mask: the keys that each query sees; None means all.
        bias: an array that broadcasts to [B, N, T, S], or a `Bias`; None means no bias.
        score_mod: as in `dot_product_attention`.
        scale: factor for q.k, either a number or an array [N] with one factor per query head; None
            means 1 / sqrt(H).
        softcap: bound on the scores, applied before the bias; above 0. None means no bound.
        sinks: [N], logits whose exponentials are added to the denominator of the softmax only.
        q_positions: i32[T] or [B, T]; None means arange(T).
        k_positions: i32[S] or [B, S]; a negative position marks an empty slot. None means
            arange(S).
        implementation: as in `dot_product_attention`. All built-in implementations return the same
            weights. Your own implementation must return them from its `weights` method.

    Returns:
        f32[B, N, T, S]. The weights of a query sum to 1 minus the share of its sink, or to 0 if the
        query sees no key.

    Raises:
        ValueError: If the arguments are invalid or do not match.
        NotImplementedError: If your own implementation does not define `weights`.
    """
    call = check_call(
        query,
        key,
        key,
        mask=mask,
        bias=bias,
        score_mod=score_mod,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        q_positions=q_positions,
        k_positions=k_positions,
    )
    # `type`, not `isinstance`: a user's subclass may compute different weights
    ours = {Xla, Blockwise, Pallas, Cudnn, Native, Invariant}
    for name in _candidates(call, implementation):
        if type(one := IMPLEMENTATIONS[name]) not in ours:
            rows, tokens, heads, _ = split(query)
            spec = PartitionSpec(rows, heads, tokens)
            weights: jax.Array = by_compiler(one.weights, [call], spec)
            return weights
    return _weights(call)


# Choosing an implementation


def _candidates(
    call: AttentionCall, implementation: str | Sequence[str] | None = None
) -> Sequence[str]:
    """Return the implementations to try, in order: those named, or the fastest for these sizes.

    On an accelerator, "pallas" comes first only for the chips and lengths for which it was measured
    to be the fastest (kernels/chips.py). "xla" may use up to 1 GiB for scores.

    On a CPU, benchmarks/choosing.py fits the limits to benchmarks/results/choosing.json. With few
    queries per key head, "native" reads keys in place. With more, it first repacks keys and values
    and starts threads, which pays off only if there are many scores. This also applies to the
    gradient. Otherwise, "xla" is fastest if the scores, keys and values fit in the processor's
    cache. If they do not fit, or if few queries see many keys, "blockwise" is faster because it
    stops at the end of a KV cache.
    """
    if implementation is not None:
        names = [implementation] if isinstance(implementation, str) else list(implementation)
        if not names or not set(names) <= IMPLEMENTATIONS.keys():
            known = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"implementation is {implementation!r}: must be one of {known}")
        return names
    B, T, N, S = call.sizes
    # `jax.export` has symbolic sizes, but tiles need numbers
    if not are_concrete(B, T, S):
        return ["xla"]
    where = target()
    fewest = None if isinstance(where, str) else FASTEST.get((where.name, where.chip))
    ours = [] if fewest is None or fewest > T else ["pallas"]
    if platform() != "cpu":
        small = 4 * B * T * N * S <= 2**30
        return [*ours, "cudnn", *(["xla", "blockwise"] if small else ["blockwise", "xla"])]
    products = B * N * T * S * (call.query.shape[3] + call.value.shape[3])
    many_scores = T * S >= 64 * 64 or (T * S >= 32 * 32 and products >= 6_000_000)
    few_queries = T * N // call.key.shape[2] <= cpu.FEW_ROWS and S >= 32
    native = ["native"] if few_queries or many_scores else []
    # count only the keys of this call: the pool of pages may be larger
    rows = B * S * call.key.shape[2]
    size = 4 * (B * T * N * S + rows * (call.key.shape[3] + call.value.shape[3]))
    in_cache = T * S < 128 * 128 and size <= 2**23 and not (T <= FEW_QUERIES and S >= 64)
    return [*ours, *native, *(["xla", "blockwise"] if in_cache else ["blockwise", "xla"])]


def _plans(
    call: AttentionCall, implementation: str | Sequence[str] | None = None
) -> Iterator[tuple[str, Plan | str, SplitLengths | None]]:
    """Yield implementations to try, each with its plan or the reason why it cannot run.

    If a mesh splits the lengths, the implementations that can compute a part of the keys come
    first. The others run only if there are none, with gathered lengths.
    """
    ways = split_lengths(call)
    for lengths in ways if isinstance(ways, list) else []:
        local = lengths.local(call)
        for name in _candidates(local, implementation):
            one = IMPLEMENTATIONS[name]
            if not lengths.repeats and one.refuse_part(call) is not None:
                continue
            whole = lengths.left_to_compiler(one, call)
            plan = _plan(name, lengths.repeated(call) if whole else local)
            if isinstance(plan, Plan):
                yield name, plan, lengths
    for name in _candidates(call, implementation):
        yield name, _plan(name, call), None


def _plan(name: str, call: AttentionCall) -> Plan | str:
    """Return the plan of an implementation for a call, or the reason why it cannot run the call."""
    B, T, _, S = call.sizes
    if name != "xla" and not are_concrete(B, T, S):
        return f"needs fixed sizes, but B, T, S are {B}, {T}, {S}: use 'xla' or None"
    one = IMPLEMENTATIONS[name]
    if call.score_mod is not None and not one.reads_score_mod:
        return "does not support score_mod"
    return one.plan(call)


# Running an implementation


@program(static=("one", "lengths"))
def _run(
    one: Implementation, call: AttentionCall, lengths: SplitLengths | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Run an implementation with only the arguments that it reads."""
    if call.block_table is not None and not call.plan.reads_pages:
        call = call.gathered()
    if lengths is not None and lengths.left_to_compiler(one, call):
        out, lse = _run(one, lengths.with_split_heads(call))
        back = lengths.with_split_lengths
        return back(out), None if lse is None else back(lse)
    if lengths is not None:
        mask = None if call.mask is None else call.mask.closed()
        return attend(one, replace(call, mask=mask), lengths)
    if call.key_scale is not None and not call.plan.reads_int8:
        call = call.dequantized()
    # drop the tile lists of another implementation, so that they do not become arguments of the
    # program
    if type(one).share is Implementation.share:
        call = replace(call, shared=None)
    # arrays that a predicate reads become arguments, so that they can be sharded over a mesh
    if call.mask is not None:
        call = replace(call, mask=call.mask.closed())
    # if types specify the sharding, "blockwise" shards rows and heads itself, without gathering,
    # because the compiler cannot shard its loops
    if isinstance(one, Blockwise) and parts_of_types(call) is not None:
        return one.attend(call)
    return by_compiler(one.attend, [call], split(call.query, slice(3)))


@program()
def _weights(call: AttentionCall) -> jax.Array:
    rows, tokens, heads, _ = split(call.query)
    return by_compiler(reference_weights, [call], PartitionSpec(rows, heads, tokens))
