"""Choose and run an implementation of attention; all of them mean the same.

    dot_product_attention           softmax(scale q k + bias, masked) v
    explain_attention               which implementations would run, and why not
    dot_product_attention_weights   the weights themselves
    additive_attention              Bahdanau et al. 2015
    state_attention                 Luong et al. 2015

An implementation is a value of `IMPLEMENTATIONS`. One that is asked for by name runs, or raises
NotImplementedError with the condition that failed, which `explain_attention` says beforehand; a
`vmap` over the call, which it does not see, may make the lists of tiles too long for a TPU.
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
from transformer_jax.attention.fused import Native, Pallas
from transformer_jax.attention.masks import Mask
from transformer_jax.attention.reference import Xla, reference_weights
from transformer_jax.config.keywords import known_keywords, refuse_keywords
from transformer_jax.kernels import cpu, platform, target
from transformer_jax.kernels.chips import FASTEST
from transformer_jax.programs import depends_on_names, program
from transformer_jax.sharding import by_compiler, split
from transformer_jax.tracing import known_sizes

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
}
"""Every implementation by its name; one of your own is one more entry."""
# compiled programs are found by these names, so a new value behind one must be noticed
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
    key: jax.Array,  # [B, S, K, H], or in pages [P, page, K, H]
    value: jax.Array,  # [B, S, K, Hv], or in pages [P, page, K, Hv]
    *,
    mask: Mask | PlannedMask | None = None,
    bias: jax.Array | Bias | None = None,
    scale: float | jax.Array | None = None,  # a number or [N]
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    q_positions: jax.Array | None = None,  # i32[T] or [B, T]
    k_positions: jax.Array | None = None,  # i32[S] or [B, S]
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    key_scale: jax.Array | None = None,  # f32[B, S, K], or in pages [P, page, K]
    value_scale: jax.Array | None = None,  # f32[B, S, K], or in pages [P, page, K]
    block_table: jax.Array | None = None,  # i32[B, M]
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:  # [B, T, N, Hv], or with lse [B, T, N]
    """Return softmax(s) v for the scores s of queries and keys, where the mask allows.

        s = softcap tanh(scale q.k / softcap) + bias

    Query head n reads key head n // (N / K). A query that sees nothing gets zeros, lse -inf and no
    gradient.

    NaN or inf in a query, key or value reaches exactly the queries that see it: their output is
    NaN, and they pass no gradient on. "pallas" and "pallas_unordered" need finite queries, keys and
    values, hidden ones too: there NaN may reach any query.

    With a `block_table` keys and values lie in the pages of a pool, as a `PagedCache` holds them:
    key j of row b is in slot j % page of page block_table[b, j // page]. So S = M page, and masks,
    bias and positions are of j as before. For an entry that is no page, as -1, some page of the
    pool is read: hide its keys, by the mask or by `k_positions` of -1. The kernels for few queries
    of NVIDIA GPUs and of TPUs read pages in place whose size is a multiple of 64 keys (NVIDIA) or
    128 (TPU), and int8 as it is; all else reads a gathered, dequantised copy.

    These are the implementations.

        xla               materialises the scores; takes any option
        blockwise         memory O(T + S); O(T S) in forward mode and in derivatives of the gradient
        native            compiled C++ on a CPU, O(T + S) in all of these
        pallas            fused, O(T + S) too, on a TPU or an NVIDIA GPU from Ampere on
        pallas_unordered  on Hopper a single-pass backward, nondeterministic in its last bits
        cudnn             NVIDIA's, on its GPUs

    Args:
        query: [B, T, N, H], in bfloat16, float16, float32 or float64.
        key: [B, S, K, H], K divides N, in the query's dtype or int8; in pages [P, page, K, H].
        value: [B, S, K, Hv], in the key's dtype; in pages [P, page, K, Hv].
        mask: which keys a query sees, as `Causal() & Window(32)`; None is all.
        bias: an array that broadcasts to [B, N, T, S], by index, or a value that is asked by
            position, such as `ALiBi`; None adds nothing.
        scale: of q.k: one number, or [N] with one for each query head, which may be traced and
            differentiated; None is 1 / sqrt(H).
        softcap: above 0; None leaves the scores as they are.
        sinks: [N]: a sink adds exp(sinks[n]) to the denominator of the softmax, and carries no
            value.
        q_positions: i32[T] or [B, T], what mask and bias are asked by; None is arange(T).
        k_positions: i32[S] or [B, S]; a key at a negative position is an empty slot. None is
            arange(S).
        dropout_rate: at least 0 and below 1, of weights after the softmax: the same ones are left
            out in every implementation.
        dropout_key: a single key, which a rate above 0 needs.
        key_scale: f32[B, S, K] of keys of int8, which mean scale * number, as a cache holds them;
            in pages [P, page, K].
        value_scale: the same of values.
        block_table: i32[B, M], the page of each block of a row.
        return_lse: return also the natural logarithm of the softmax's denominator, with the sink's
            term.
        implementation: the name of one, a sequence of names that is tried in order, or None for the
            best that runs here; `explain_attention` says which.

    Returns:
        The result [B, T, N, Hv] in the query's dtype; with `return_lse` also [B, T, N] in float32
        (float64 of float64).

    Raises:
        ValueError: if the arguments do not fit together.
        NotImplementedError: if an implementation that is named does not run them, with the reason.
    """
    call = check_call(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        q_positions=q_positions,
        k_positions=k_positions,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        key_scale=key_scale,
        value_scale=value_scale,
        block_table=block_table,
        return_lse=return_lse,
    )
    refused = []
    for name in _candidates(call, implementation):
        plan: Plan | str = _plan(name, call)
        if isinstance(plan, Plan):
            try:
                # with lse or without it, the program is the same one: the compiler finds no use for
                # lse in a caller's `jit`, and an eager call compiles once
                out, lse = _run(IMPLEMENTATIONS[name], replace(call, plan=plan, return_lse=False))
                if not return_lse:
                    return out
                assert lse is not None
                return out, lse
            except Refused as error:
                # `plan` sees shapes; only the trace knows how long the lists of tiles are, for
                # a `vmap` around this call may have multiplied them
                plan = str(error)
        refused.append(f"{name}: {plan}")
    raise Refused("; ".join(refused))


@dataclass(frozen=True, eq=False)
class Explanation(Mapping[str, str | None]):
    """Map each implementation to None if it would run, else to the reason why not.

    Attributes:
        reasons: by name.
        chosen: what `implementation=None` would run.
        reads_pages: which of those that run read the pages of a `block_table` in place, unless
            somebody differentiates; the others gather them.
    """

    reasons: Mapping[str, str | None]
    chosen: str
    reads_pages: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> str | None:
        return self.reasons[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reasons)

    def __len__(self) -> int:
        return len(self.reasons)

    def __str__(self) -> str:
        how = {name: "runs, reads pages in place" for name in self.reads_pages}
        lines = [f"{name}: {why or how.get(name, 'runs')}" for name, why in self.reasons.items()]
        return "\n".join([*lines, f"without a name: {self.chosen}"])

    __repr__ = __str__


def explain_attention(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Explanation:
    """Say which implementations `dot_product_attention` would run on these arguments, and why not.

    Args:
        query: [B, T, N, H], an array or a `jax.ShapeDtypeStruct`, as the others.
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        return_lse: as there.
        **options: the other arguments, but for `implementation`.

    Returns:
        The reason why not, or None, by name; `chosen` is what runs without a name.

    Raises:
        ValueError: as there.
    """
    if unknown := {name: x for name, x in options.items() if name not in Options.__annotations__}:
        refuse_keywords(explain_attention, unknown, Options.__annotations__)
    call = check_call(query, key, value, return_lse=return_lse, **options)
    plans = {name: _plan(name, call) for name in IMPLEMENTATIONS}
    reasons = {name: plan if isinstance(plan, str) else None for name, plan in plans.items()}
    chosen = next(name for name in _candidates(call) if reasons[name] is None)
    in_place = (n for n, plan in plans.items() if isinstance(plan, Plan) and plan.reads_pages)
    return Explanation(reasons, chosen, frozenset(in_place))


def plan_mask(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    *,
    implementation: str | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Mask | PlannedMask | None:
    """Return a mask for many calls of `dot_product_attention`, with what they can share.

    Layers of a model have one mask and the same positions. In a `lax.scan` or under
    `jax.checkpoint` XLA would make the lists of tiles of a fused kernel again for each layer.

    Args:
        query: [B, T, N, H], as each call has it, or a `jax.ShapeDtypeStruct`.
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        implementation: as in the calls.
        **options: the mask of all the calls, and those of their arguments that change which tiles
            there are.

    Returns:
        The mask with its lists of tiles; the mask itself where there is nothing to share, and where
        axes of a mesh are explicit.
    """
    call = check_call(query, key, value, **options)
    mask, (B, T, N, S) = call.mask, call.sizes
    leaves = jax.tree.leaves((mask, call.q_positions, call.k_positions))
    if any(jax.typeof(x).sharding.mesh.explicit_axes for x in leaves):
        return mask
    # as `check_call` compares them: positions may ask a mask for other rows than 0 .. T - 1
    checked = (
        B,
        N,
        None if call.q_positions is not None else T,
        (None if call.k_positions is not None else S),
    )
    for name in _candidates(call, implementation):
        plan = _plan(name, call)
        if isinstance(plan, Plan):
            shared = IMPLEMENTATIONS[name].share(replace(call, plan=plan))
            return mask if mask is None or shared is None else PlannedMask(mask, shared, checked)
    return mask


@known_keywords
def dot_product_attention_weights(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    *,
    mask: Mask | None = None,
    bias: jax.Array | Bias | None = None,
    scale: float | jax.Array | None = None,  # a number or [N]
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    q_positions: jax.Array | None = None,  # i32[T] or [B, T]
    k_positions: jax.Array | None = None,  # i32[S] or [B, S]
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:  # f32[B, N, T, S]
    """Return what `dot_product_attention` weighs the values with.

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H], K divides N.
        mask: which keys a query sees; None is all.
        bias: broadcasts to [B, N, T, S], or is asked by position; None adds nothing.
        scale: of q.k: one number, or [N] with one for each query head; None is 1 / sqrt(H).
        softcap: above 0; None leaves the scores as they are.
        sinks: [N], logits that join the denominator of the softmax.
        q_positions: i32[T] or [B, T]; None is arange(T).
        k_positions: i32[S] or [B, S]; negative is an empty slot. None is arange(S).
        implementation: whose weights, as in `dot_product_attention`. All of ours have the same; one
            of your own returns its own by its method `weights`.

    Returns:
        f32[B, N, T, S]; a row sums to 1, to less by the share of its sink, and to 0 where it sees
        nothing.

    Raises:
        ValueError: if the arguments do not fit together.
        NotImplementedError: if an implementation of your own has no `weights`.
    """
    call = check_call(
        query,
        key,
        key,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        q_positions=q_positions,
        k_positions=k_positions,
    )
    # `type`, not `isinstance`: a subclass of yours may weigh in another way
    ours = {Xla, Blockwise, Pallas, Cudnn, Native}
    for name in _candidates(call, implementation):
        if type(one := IMPLEMENTATIONS[name]) not in ours:
            rows, tokens, heads, _ = split(query)
            spec = PartitionSpec(rows, heads, tokens)
            weights: jax.Array = by_compiler(one.weights, [call], spec)
            return weights
    return _weights(call)


# Choosing one


def _candidates(
    call: AttentionCall, implementation: str | Sequence[str] | None = None
) -> Sequence[str]:
    """Return which implementations to try, in order: those named, or the best for these sizes.

    Our kernels come first only on chips, and from lengths on, where they were measured to be the
    fastest (kernels/chips.py). On an accelerator the scores may take a gibibyte. On a CPU the sizes
    are fitted to benchmarks/results/choosing.json by benchmarks/choosing.py. The compiled kernels
    read keys as they lie for few queries of a key head. For more queries they first lay keys and
    values out and wake threads, which pays from many scores on, in the gradient too. Otherwise one
    product of XLA is fastest while scores, keys and values fit the processor's cache; beyond, and
    where few queries see many keys, tiles are, which end where a KV cache does.
    """
    if implementation is not None:
        names = [implementation] if isinstance(implementation, str) else list(implementation)
        if not names or not set(names) <= IMPLEMENTATIONS.keys():
            known = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"implementation is {implementation!r}: must be of {known}")
        return names
    B, T, N, S = call.sizes
    # an export has left sizes open: tiles need numbers
    if not known_sizes(B, T, S):
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
    # the keys of a call, which may lie in the pages of a larger pool
    rows = B * S * call.key.shape[2]
    size = 4 * (B * T * N * S + rows * (call.key.shape[3] + call.value.shape[3]))
    in_cache = T * S < 128 * 128 and size <= 2**23 and not (T <= FEW_QUERIES and S >= 64)
    return [*ours, *native, *(["xla", "blockwise"] if in_cache else ["blockwise", "xla"])]


def _plan(name: str, call: AttentionCall) -> Plan | str:
    """Return how an implementation runs a call, or why not."""
    B, T, _, S = call.sizes
    if name != "xla" and not known_sizes(B, T, S):
        return f"needs sizes that are numbers, here B, T, S are {B}, {T}, {S}: take 'xla' or None"
    return IMPLEMENTATIONS[name].plan(call)


# Running one


@program(static=("one",))
def _run(one: Implementation, call: AttentionCall) -> tuple[jax.Array, jax.Array | None]:
    """Return what an implementation attends to, given only what it reads."""
    if call.block_table is not None and not call.plan.reads_pages:
        call = call.gathered()
    if call.key_scale is not None and not call.plan.reads_int8:
        call = call.dequantised()
    # lists of tiles that another implementation has made are not even arguments of this one
    if type(one).share is Implementation.share:
        call = replace(call, shared=None)
    # arrays that a predicate reads become arguments of what is split over a mesh
    if call.mask is not None:
        call = replace(call, mask=call.mask.closed())
    # "blockwise" splits rows and heads itself where types say how: then nothing is gathered, while
    # the compiler knows no rule for its loops
    if isinstance(one, Blockwise) and parts_of_types(call) is not None:
        return one.attend(call)
    return by_compiler(one.attend, [call], split(call.query, slice(3)))


@program()
def _weights(call: AttentionCall) -> jax.Array:
    rows, tokens, heads, _ = split(call.query)
    return by_compiler(reference_weights, [call], PartitionSpec(rows, heads, tokens))
