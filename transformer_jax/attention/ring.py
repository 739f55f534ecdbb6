"""Attention with lengths that are split over the devices of a mesh.

`split_lengths` reads from the types of query, key and value how T and S are split, and `attend`
computes each device's part with any implementation that has `Implementation.rows`:

    T and S over the same axes   ring: keys and values travel from device to device
                                 all-to-all: each device gets all tokens of some heads
    only S                       each device attends to its own keys, and the results are merged
    only T                       nothing is sent, because each device has all keys

If both are possible, the one that sends fewer bytes in a forward pass is chosen
(`SplitLengths.bytes`).

In the ring (Liu et al. 2023), device i has the queries and keys of block i. At shift r it attends
to block i - r, and it merges the results of all blocks, with scores s_ij of keys j:

    m_r = max_j s_ij     l_r = sum_j exp(s_ij - m_r)     o_r = sum_j exp(s_ij - m_r) v_j / l_r
    m = max_r m_r        l = sum_r l_r exp(m_r - m)      out = sum_r o_r l_r exp(m_r - m) / l

The transfer of the next block starts before the product with the current one. The backward pass
runs the same ring with the final out, m and l, from which each block's share of the gradient
follows (`AttentionCall.rows`). The gradients of keys and values follow their block in float32 and
return home after its last product. Only query, key, value, out, m and l are saved.

Positions are explicit inside, so masks and biases need nothing else, and any layout of the
positions works. If mask and positions are known, `SplitLengths.needed` tells which device sees
which block. The other blocks are neither sent nor computed: a block travels only as far as it is
needed, and a shift that no device needs is skipped. If they are traced, all blocks are sent, and
the implementation skips the tiles that the mask hides.

The all-to-all (Jacobs et al. 2023, DeepSpeed-Ulysses) moves the split from the lengths to the
heads before the call, and back after it. In between, each device computes an ordinary call with its
heads, so every implementation and every option works, and so do derivatives of any order.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh

from transformer_jax.attention.arguments import AttentionCall, Implementation, Rows
from transformer_jax.attention.biases import Bias
from transformer_jax.attention.blockwise.bias import PartOfBias
from transformer_jax.attention.blockwise.core import scaled
from transformer_jax.attention.masks import And, Everything, Mask, Or
from transformer_jax.attention.reference import Xla
from transformer_jax.checks import check_count
from transformer_jax.kernels import platform
from transformer_jax.kernels.derivatives import Passes, differentiable
from transformer_jax.kernels.sharding import HEADS, AxisNames, First, Parts, by_types
from transformer_jax.sharding import axis_names, by_compiler, explicit_mesh, split, vary
from transformer_jax.tracing import concrete_value

QUERIES: AxisNames = ("b", "t", "n", None)
KEYS: AxisNames = ("b", "s", "k", None)
TRAVELLING = "key", "value", "k_positions", "key_scale", "value_scale"
"""Fields of a call that belong to a block of keys."""
HEADS_MOVE = "query", "key", "value", "key_scale", "value_scale"
"""Fields of a call whose heads an all-to-all splits."""

Pairs = tuple[tuple[int, int], ...]
"""(from, to) devices of a transfer."""


@dataclass(frozen=True)
class Step:
    """Step of the ring: the products of one shift, and the transfers that follow them."""

    shift: int
    needed: tuple[bool, ...]  # whether each device sees the block that it has now
    onward: Pairs  # transfers of the blocks that a later step needs
    home: Pairs  # transfers of the gradients of the other blocks


@dataclass(frozen=True)
class SplitLengths:
    """How the lengths of a call are split over the devices of a mesh."""

    axes: tuple[str, ...]  # the mesh axes that split T, S or both
    devices: int  # number of devices along these axes
    queries: bool  # whether T is split
    keys: bool  # whether S is split
    needed: tuple[tuple[bool, ...], ...] = ()  # [device][block of keys], in a ring
    repeats: int = 0  # in an all-to-all, the copies of each key head; otherwise 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """Steps of the ring."""
        P, needed = self.devices, self.needed
        sees = {(j, (i - j) % P) for i in range(P) for j in range(P) if needed[i][j]}
        shifts = sorted({0} | {shift for _, shift in sees})
        last = [max((r for j, r in sees if j == block), default=0) for block in range(P)]
        steps = []
        for r, following in zip(shifts, [*shifts[1:], P], strict=True):
            places = [(j, (j + r) % P) for j in range(P)]
            steps.append(
                Step(
                    r,
                    tuple(needed[i][(i - r) % P] for i in range(P)),
                    tuple((i, (j + following) % P) for j, i in places if last[j] >= following),
                    tuple((i, j) for j, i in places if last[j] == r and r > 0),
                )
            )
        return tuple(steps)

    def parts(self, call: AttentionCall) -> Parts:
        """Return the split of rows, heads and lengths."""
        B, T, N, S = call.sizes
        full = dict(b=B, n=N, k=call.key.shape[2])
        mesh = explicit_mesh(call.query, call.key, call.value)
        assert mesh is not None
        parts = Parts.of(mesh, [split(call.query)], [("b", None, "n", None)], full)
        axes = dict(t=self.axes if self.queries else (), s=self.axes if self.keys else ())
        return dataclasses.replace(parts, full=full | dict(t=T, s=S), axes=parts.axes | axes)

    def local(self, call: AttentionCall) -> AttentionCall:
        """Return the shapes of one device's part of a call, for the plan of an implementation."""
        parts, (B, T, N, S) = self.parts(call), call.sizes
        share = {name: parts.full[name] // parts.number(name) for name in parts.full}
        if parts.number("n") > parts.number("k"):
            share["k"] = 1
        if self.repeats:
            heads = parts.number("n") * self.devices
            share |= dict(t=T, s=S, n=N // heads, k=parts.full["k"] * self.repeats // heads)
        wide = call.query.dtype if call.scale_array is None else jnp.promote_types(
            call.query.dtype, jnp.float32
        )  # fmt: skip
        b, t, n, k, s = (share[name] for name in "btnks")
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, wide)  # noqa: E731
        place = lambda n: jax.ShapeDtypeStruct((1, n), jnp.int32)  # noqa: E731
        bias: Any = call.bias
        if bias is not None and not isinstance(bias, Bias):
            sizes = zip(bias.shape, (B, N, T, S), (b, n, t, s), strict=True)
            bias = jax.ShapeDtypeStruct(
                tuple(part if size == whole else size for size, whole, part in sizes), bias.dtype
            )
        arrays: Any = dict(
            query=shape(b, t, n, call.query.shape[3]),
            key=shape(b, s, k, call.key.shape[3]),
            value=shape(b, s, k, call.value.shape[3]),
            q_positions=place(t),
            k_positions=place(s),
            bias=bias,
        )
        return dataclasses.replace(
            call, **arrays, scale_array=None, key_scale=None, value_scale=None, shared=None
        )

    def bytes(self, call: AttentionCall) -> int:
        """Return the number of bytes that the forward pass of a ring or all-to-all sends."""
        P, (B, T, N, S) = self.devices, call.sizes
        size = lambda x: 0 if x is None else x.size * x.dtype.itemsize  # noqa: E731
        of_keys = [getattr(call, name) for name in ("key", "value", "key_scale", "value_scale")]
        if not self.repeats:
            parts, local = self.parts(call), self.local(call)
            # each part of the query heads has a ring of its own, and parts may share key heads
            copies = local.key.shape[2] * parts.number("n") // call.key.shape[2]
            keys_at = call.k_positions
            places = 4 * S if keys_at is None else size(keys_at)
            same = keys_at is None or len(keys_at) == 1  # for all rows
            places *= parts.number("n") * (parts.number("b") if same else 1)
            block = (copies * sum(map(size, of_keys)) + places) // P
            return sum(len(step.onward) for step in self.steps) * block
        out = B * T * N * call.value.shape[3] * call.query.dtype.itemsize
        lse = 4 * B * T * N if call.return_lse else 0
        heads = size(call.query) + self.repeats * sum(map(size, of_keys)) + out + lse
        at = call.q_positions, call.k_positions
        gathered = sum(size(x) for x in at if _splits(x, self.axes))
        return (P - 1) * heads // P + (P - 1) * gathered

    def describe(self, call: AttentionCall) -> str:
        """Return how a call is computed, and how many bytes its forward pass sends."""
        over = f"over {', '.join(map(repr, self.axes))} ({self.devices} devices)"
        if not self.keys:
            return f"T is split {over}: nothing is sent"
        if not self.queries:
            return f"S is split {over}: each device attends to its own keys, results are merged"
        if self.repeats:
            copies = f", with {self.repeats} copies of each key head" if self.repeats > 1 else ""
            ring = "" if call.score_mod is None else "; no ring, because it supports no score_mod"
            return f"all-to-all {over}: sends {self.bytes(call)} bytes{copies}{ring}"
        sent, most = sum(len(step.onward) for step in self.steps), self.devices**2 - self.devices
        reason = _refuse_heads(call, self.axes, self.devices)
        no_other = "" if reason is None else f"; no all-to-all, because {reason}"
        count = f"sends {sent} of {most} blocks of keys, {self.bytes(call)} bytes"
        return f"ring {over}: {count}{no_other}"

    def left_to_compiler(self, one: Implementation, call: AttentionCall) -> bool:
        """Whether the compiler splits the heads of an all-to-all, because `attend` cannot."""
        has_parts = type(one).refuse_part is not Implementation.refuse_part
        return self.repeats > 0 and (call.score_mod is not None or not has_parts)

    def repeated(self, call: AttentionCall) -> AttentionCall:
        """Return the shapes of all heads of an all-to-all, for a plan that the compiler splits."""
        arrays: Any = {name: getattr(call, name) for name in HEADS_MOVE if name != "query"}
        for name, x in arrays.items():
            if x is not None:
                shape = (*x.shape[:2], x.shape[2] * self.repeats, *x.shape[3:])
                arrays[name] = jax.ShapeDtypeStruct(shape, x.dtype)
        return dataclasses.replace(call, **arrays)

    def with_split_heads(self, call: AttentionCall) -> AttentionCall:
        """Return the call with all tokens of some heads on each device."""
        rows, _, heads, *_ = split(call.query)
        spec = jax.sharding.PartitionSpec(rows, self.axes, heads)
        arrays: Any = {name: getattr(call, name) for name in HEADS_MOVE}
        for name, x in arrays.items():
            if x is not None:
                copies = 1 if name == "query" else self.repeats
                copy = partial(jnp.repeat, repeats=copies, axis=2)
                arrays[name] = self._moved(by_compiler(copy, [x], spec), 2, 1)
        return dataclasses.replace(call, **arrays, shared=None)

    def with_split_lengths(self, x: jax.Array) -> jax.Array:
        """Return a result of the call `with_split_heads`, split like the query was."""
        return self._moved(x, 1, 2)

    def _moved(self, x: jax.Array, to: int, source: int) -> jax.Array:
        """Move the split over `axes` from one axis of an array to another."""
        before = [*map(axis_names, split(x, slice(3)))]
        after = list(before)
        if to == 2:
            after[1:] = (), before[2] + self.axes
        else:
            after[1:] = self.axes, before[2][: -len(self.axes)]
        exchange = partial(
            lax.all_to_all, axis_name=self.axes, split_axis=to, concat_axis=source, tiled=True
        )
        specs = (jax.sharding.PartitionSpec(*(one or None for one in x)) for x in (before, after))
        found: jax.Array = jax.shard_map(
            exchange, mesh=explicit_mesh(x), in_specs=next(specs), out_specs=next(specs)
        )(x)
        return found


CHUNK = 512
"""Minimum number of tokens in a chunk of `zigzag_positions` if a device has more than two chunks.
Most tiles of attention are no larger, so they do not span two chunks."""


def zigzag_chunks(length: int, devices: int) -> np.ndarray:  # i32[chunks]
    """Return the order of the chunks of a row in `zigzag_positions`."""
    turns = range(2, length // (devices * CHUNK) + 1, 2)
    turn = max((n for n in turns if length % (n * devices) == 0), default=2)
    dealt = np.arange(turn * devices, dtype=np.int32).reshape(turn, devices)
    dealt[1::2] = dealt[1::2, ::-1]
    return dealt.T.ravel()


def zigzag_positions(length: int, devices: int) -> np.ndarray:  # i32[T]
    """Return positions in an order that gives each device the same share of a causal mask.

    The positions are cut into an even number of chunks for each of the P devices: two, or more if
    each has at least 512 tokens. The chunks are dealt to the devices in turn, and in reverse in
    every second turn. More chunks also spread the tokens of each document over the devices. In the
    usual order, the last device computes 2P - 1 times as many pairs as the first, and the others
    wait. Permute the tokens with the result, and pass it as their positions:

        at = zigzag_positions(T, P)
        model.apply(params, tokens[:, at], positions=jnp.broadcast_to(at, tokens.shape))

    `numpy.argsort(at)` restores the order.

    Args:
        length: T, the number of tokens, a multiple of 2P.
        devices: P, the number of devices that split the tokens.

    Raises:
        ValueError: If `length` is not a multiple of 2P.
    """
    check_count("devices", devices, 1)
    check_count("length", length, 0)
    if length % (2 * devices):
        raise ValueError(f"length is {length}: must be a multiple of {2 * devices}, 2 * devices")
    chunks = zigzag_chunks(length, devices)
    positions = np.arange(length, dtype=np.int32)
    return positions.reshape(len(chunks), -1)[chunks].ravel()


def split_lengths(call: AttentionCall) -> list[SplitLengths] | str | None:
    """Return the ways to compute with T and S split, starting with the one that sends least.

    The result is the reason if they must be gathered, or None if they are whole.
    """
    mesh = explicit_mesh(call.query, call.key, call.value)
    if mesh is None or call.block_table is not None:
        return None
    t, s, v = (axis_names(split(x)[1]) for x in (call.query, call.key, call.value))
    if not (t or s or v):
        return None
    if len(mesh.explicit_axes) < len(mesh.axis_names):
        return "the mesh has an axis that is not explicit"
    if s != v or (t and s and t != s):
        return f"query, key and value are split over {t}, {s} and {v}: must be the same axes"
    if 0 in (*call.query.shape, *call.key.shape, *call.value.shape):
        return "an array is empty"
    axes = t or s
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if devices == 1:
        return None
    lengths = SplitLengths(axes, devices, bool(t), bool(s))
    user_bias = isinstance(call.bias, Bias) and not type(call.bias).__module__.startswith(
        Bias.__module__
    )
    if user_bias or (call.mask is not None and call.mask.calls_user_code):
        reason = _refuse_code(call, mesh, axes)
        if reason is not None:
            return reason
    ways = []
    if call.score_mod is None:
        needed = _needed(call, devices) if t and s else ()
        ways.append(dataclasses.replace(lengths, needed=needed))
    both = "T and S are not both split"
    refused = _refuse_heads(call, axes, devices) if t and s else both
    if refused is None:
        K = call.key.shape[2]
        repeats = math.lcm(K, _parts_of_heads(call, devices)) // K
        ways.append(dataclasses.replace(lengths, repeats=repeats))
    if not ways:
        return f"score_mod is not supported in a ring, and all-to-all is not, because {refused}"
    return sorted(ways, key=lambda way: way.bytes(call)) if len(ways) > 1 else ways


def _parts_of_heads(call: AttentionCall, devices: int) -> int:
    """Return the number of parts into which an all-to-all splits the heads."""
    mesh = explicit_mesh(call.query)
    assert mesh is not None
    return devices * math.prod(mesh.shape[one] for one in axis_names(split(call.query)[2]))


def _refuse_heads(call: AttentionCall, axes: tuple[str, ...], devices: int) -> str | None:
    """Return the reason why an all-to-all cannot split the heads, or None."""
    # each device needs the same number of query heads, and whole key heads or one copy of one
    N, K, parts = call.query.shape[2], call.key.shape[2], _parts_of_heads(call, devices)
    if N % math.lcm(K, parts):
        rule = f"{math.lcm(K, parts)}, the least common multiple of {parts} parts and {K} key heads"
        return f"there are {N} query heads: must be a multiple of {rule}"
    return "the mesh also splits the bias over these axes" if _splits(call.bias, axes) else None


def _splits(tree: Any, axes: tuple[str, ...]) -> bool:
    """Whether one of the mesh axes splits an array."""
    specs = (split(x) for x in jax.tree.leaves(tree))
    return any(set(axes) & {*axis_names(one)} for spec in specs for one in spec)


def _refuse_code(call: AttentionCall, mesh: AbstractMesh, axes: tuple[str, ...]) -> str | None:
    """Return the reason why a mask or bias of the user cannot be traced on a device, or None."""
    mask = None if call.mask is None else call.mask.closed()

    def trial(mask: Any, bias: Any) -> jax.Array:
        at = lax.axis_index(axes) + jnp.zeros((1, 1), jnp.int32)
        mask, bias = vary((mask, bias), at)
        found = [] if mask is None else [mask.allows(at, at)]
        found += [bias.materialize(at, at)] if isinstance(bias, Bias) else []
        return sum((x.astype(jnp.float32).sum() for x in found), jnp.zeros(())) + at.sum()

    bias = call.bias if isinstance(call.bias, Bias) else None
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (mask, bias))
    none = jax.sharding.PartitionSpec()
    spec = jax.sharding.PartitionSpec(axes)
    mapped = jax.shard_map(
        lambda *trees: trial(*trees)[None], mesh=mesh, in_specs=(none, none), out_specs=spec
    )
    try:
        jax.eval_shape(mapped, *whole)
    except Exception as error:  # a user's function may raise anything
        return f"the mask or bias cannot be traced on one device: {type(error).__name__}: {error}"
    return None


def _needed(call: AttentionCall, devices: int) -> tuple[tuple[bool, ...], ...]:
    """Return whether the queries of each device may see each block of keys, as far as known."""
    _, T, _, S = call.sizes
    q = np.arange(T, dtype=np.int32) if call.q_positions is None else call.q_positions
    k = np.arange(S, dtype=np.int32) if call.k_positions is None else call.k_positions
    q_at, k_at = concrete_value(q), concrete_value(k)

    def table(mask: Mask) -> np.ndarray:  # bool[devices, devices]
        # traced documents within a known window: the window excludes blocks
        if type(mask) is And:
            return table(mask.left) & table(mask.right)
        if type(mask) is Or:
            return table(mask.left) | table(mask.right)
        leaves, structure = jax.tree.flatten(mask.closed())
        known = [concrete_value(x) for x in leaves]
        if q_at is None or k_at is None or any(x is None for x in known):
            return np.ones((devices, devices), bool)
        mask = jax.tree.unflatten(structure, known)
        plan = mask.block_plan(q_at, k_at, block_q=T // devices, block_k=S // devices)
        classes = concrete_value(plan.classes)
        if classes is None:
            return np.ones((devices, devices), bool)
        return np.asarray((classes > 0).any(axis=(0, 1)))

    found = table(Everything() if call.mask is None else call.mask)
    return tuple(map(tuple, found.tolist()))


def attend(
    one: Implementation, call: AttentionCall, lengths: SplitLengths
) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, T, N, Hv] and lse [B, T, N], split like the query.

    `call.plan` is the plan for `lengths.local(call)`.
    """
    if lengths.repeats:
        whole = SplitLengths((), 1, False, False)
        results = attend(one, lengths.with_split_heads(call), whole)
        out, lse = map(lengths.with_split_lengths, results)
        return out, lse
    query, (q_at, k_at) = call.query, call.positions()
    changes: dict[str, Any] = {}
    if call.scale_array is not None:
        changes = dict(query=scaled(query, call.scale_array), scale=1.0, scale_array=None)
    call = dataclasses.replace(
        call,
        **changes,
        sinks=None if call.sinks is None else call.sinks.astype(jnp.float32)[None],
        q_positions=q_at,
        k_positions=k_at,
        dropout_words=call.head_words(),
        dropout_key=None,
        shared=None,
    )
    parts, (B, _, N, _) = lengths.parts(call), call.sizes
    names = [QUERIES, KEYS, KEYS]
    names += [] if call.mask is None else call.mask.leaf_axes
    if isinstance(call.bias, Bias):
        names += [(None,) * jnp.ndim(x) for x in jax.tree.leaves(call.bias)]
    elif call.bias is not None:
        names += [("b", "n", "t", "s" if not lengths.queries else None)]
    names += [] if call.sinks is None else [HEADS]
    names += [("b", "t"), ("b", "s")]
    names += [] if call.dropout_words is None else [(None, "b", "n")]
    names += [] if call.key_scale is None else [KEYS[:3]] * 2
    leaves, structure = jax.tree.flatten(call)

    def of_part(first: First, *leaves: jax.Array) -> tuple[jax.Array, jax.Array]:
        call = jax.tree.unflatten(structure, leaves)
        rows, _, heads, _ = call.query.shape
        if (rows, heads) != (B, N):
            mask, bias = call.mask, call.bias
            if mask is not None:
                mask = mask.part(first, (B, N), (rows, heads))
            if isinstance(bias, Bias):
                bias = PartOfBias(bias, first[0], first[1], (B, N), (rows, heads))
            call = dataclasses.replace(call, mask=mask, bias=bias)
        sinks, call = call.sinks, dataclasses.replace(call, sinks=None)
        if lengths.queries and lengths.keys:
            return _Ring(one, lengths).attend(call, sinks)
        if lengths.keys:
            index = lax.axis_index(lengths.axes)
            return _merged(one, lengths, _part(call, lengths, index), sinks)
        sinks = None if sinks is None else sinks[0]
        part = dataclasses.replace(_part(call, lengths, 0), sinks=sinks)
        out, lse = one.attend(part)
        assert lse is not None
        return out, lse

    shapes = (*query.shape[:3], call.value.shape[3]), query.shape[:3]
    axes = QUERIES, QUERIES[:3]
    wanted = split(query, slice(3))
    out, lse = by_types(of_part, leaves, names, shapes, axes, parts, wanted)
    return out.astype(query.dtype), lse


def _part(
    call: AttentionCall,
    lengths: SplitLengths,
    source: jax.Array | int,
    rows: Rows | None = None,
) -> AttentionCall:
    """Return the call of a device's queries and the keys of block `source`."""
    T, S, bias, first = call.query.shape[1], call.key.shape[1], call.bias, None
    if call.dropout_rate:
        index = lax.axis_index(lengths.axes) if lengths.queries else 0
        first = jnp.stack([jnp.int32(index * T), jnp.int32(source * S)])
    # a ring splits the rows of a bias array and keeps all its columns
    ring = lengths.queries and lengths.keys
    if ring and bias is not None and not isinstance(bias, Bias) and bias.shape[3] > 1:
        bias = lax.dynamic_slice_in_dim(bias, source * S, S, 3)
    call = dataclasses.replace(call, bias=bias, first=first, rows=rows)
    call = call if call.key_scale is None else call.dequantized()
    key, value = (x.astype(call.query.dtype) for x in (call.key, call.value))
    return dataclasses.replace(call, key=key, value=value)


def _after(results: Any, tree: Any) -> Any:
    """Return arrays that a device can send only when it has computed all `results`.

    Otherwise, a compiler may run all transfers first, and keep all blocks.
    """
    results, tree = lax.optimization_barrier((results, tree))
    if platform() != "cpu":
        return tree
    # XLA removes barriers on a CPU, but does not know that this is always True
    parts = (~(x.ravel()[0] > jnp.inf) for x in jax.tree.leaves(results))
    ready = reduce(operator.and_, parts)
    return jax.tree.map(lambda x: jnp.where(ready, x, jnp.zeros_like(x)), tree)


def _merge(a: Rows, b: Rows) -> Rows:
    """Return the results over the keys of both."""
    row_max = jnp.maximum(a.row_max, b.row_max)
    base = jnp.where(jnp.isneginf(row_max), 0, row_max)
    one, two = (jnp.exp(x.row_max - base + x.log_sum) for x in (a, b))
    total = one + two
    masked = total == 0
    total = jnp.where(masked, 1, total)
    out = one[..., None] * a.out + two[..., None] * b.out
    return Rows(out / total[..., None], jnp.where(masked, -jnp.inf, row_max), jnp.log(total))


def _with_sinks(rows: Rows, sinks: jax.Array | None) -> Rows:
    """Add the sinks [1, N] to the results, except in fully masked rows."""
    if sinks is None:
        return rows
    row_max = jnp.broadcast_to(sinks[None].astype(rows.row_max.dtype), rows.row_max.shape)
    row_max = jnp.where(jnp.isneginf(rows.row_max), -jnp.inf, row_max)
    return _merge(rows, Rows(jnp.zeros_like(rows.out), row_max, jnp.zeros_like(rows.log_sum)))


def _merged(
    one: Implementation, lengths: SplitLengths, call: AttentionCall, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Attend to this device's keys, and merge the results of all devices."""
    out, lse = one.attend(call)
    assert lse is not None
    masked, sum_over = jnp.isneginf(lse), partial(lax.psum, axis_name=lengths.axes)
    nothing = sum_over((~masked).astype(jnp.int32)) == 0
    broken = sum_over(jnp.isnan(lse).astype(jnp.int32)) > 0
    # select before the exponential, so that a masked or broken row has no gradient
    dead = masked | broken
    lse = jnp.where(dead, 0, lse)
    out = jnp.where(dead[..., None], 0, out.astype(lse.dtype))
    top = jnp.where(dead, -jnp.inf, lse)
    if sinks is not None:
        # only one device adds the sink
        is_first = lax.axis_index(lengths.axes) == 0
        sink = jnp.where(is_first & ~nothing, sinks[None].astype(lse.dtype), -jnp.inf)
        top = jnp.maximum(top, sink)
    row_max = lax.pmax(lax.stop_gradient(top), lengths.axes)
    row_max = jnp.where(jnp.isneginf(row_max), 0, row_max)
    weight = jnp.where(dead, 0, jnp.exp(lse - row_max))
    total = sum_over(weight if sinks is None else weight + jnp.exp(sink - row_max))
    total = jnp.where(nothing | broken, 1, total)
    out = sum_over(weight[..., None] * out) / total[..., None]
    lse = jnp.where(nothing, -jnp.inf, row_max + jnp.log(total))
    out, lse = (jnp.where(bad, jnp.nan, x) for bad, x in ((broken[..., None], out), (broken, lse)))
    return out.astype(call.query.dtype), lse


@dataclass(frozen=True, eq=False)
class _Ring:
    """Ring of one device, inside a `shard_map`."""

    one: Implementation
    lengths: SplitLengths

    def attend(self, call: AttentionCall, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        passes = Passes(self.forward, self.backward, self.plain)
        compute = lambda tree: self.forward(tree)[0]  # noqa: E731
        out, lse = differentiable(compute, passes, vary((call, sinks)))
        return out, lse

    def _sent(self, tree: Any, pairs: Pairs) -> Any:
        send = partial(lax.ppermute, axis_name=self.lengths.axes, perm=pairs)
        return jax.tree.map(send, tree)

    def _if_needed(self, step: Step, compute: Callable[[], Any], like: jax.Array) -> Any:
        """Return `compute()`, or empty results on a device that does not see its block."""
        if all(step.needed):
            return compute()
        here = jnp.asarray(step.needed)[lax.axis_index(self.lengths.axes)]

        def empty() -> Any:
            shapes = jax.eval_shape(compute)
            found = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            if isinstance(found, Rows):
                found = found._replace(row_max=jnp.full_like(found.row_max, -jnp.inf))
            return vary(found, like)

        return lax.cond(here, lambda: vary(compute(), like), empty)

    def forward(self, tree: Any) -> tuple[tuple[jax.Array, jax.Array], Rows]:
        call, sinks = tree
        index, P = lax.axis_index(self.lengths.axes), self.lengths.devices
        block, total = {name: getattr(call, name) for name in TRAVELLING}, None
        for step in self.lengths.steps:
            # the transfer does not depend on the products below, so they overlap
            following = self._sent(block, step.onward) if step.onward else block
            of_block = dataclasses.replace(call, **block)
            part = _part(of_block, self.lengths, (index - step.shift) % P)
            rows = self._if_needed(step, partial(self.one.rows, part), call.query)
            total = rows if total is None else _merge(total, rows)
            block = _after(total, following)
        assert total is not None
        rows = _with_sinks(total, sinks)
        return (rows.out.astype(call.query.dtype), rows.row_max + rows.log_sum), rows

    def backward(
        self, tree: Any, rows: Rows, cotangents: tuple[jax.Array, ...], wanted: Any
    ) -> Any:
        (call, sinks), (do, dlse) = tree, cotangents
        index, P = lax.axis_index(self.lengths.axes), self.lengths.devices
        leaves, structure = jax.tree.flatten(call)
        marks = dataclasses.replace(
            jax.tree.map(lambda _: False, call),
            **{name: True for name in TRAVELLING if getattr(call, name) is not None},
        )
        at = [i for i, is_wanted in enumerate(jax.tree.leaves(wanted[0])) if is_wanted]
        travels = [jax.tree.leaves(marks)[i] for i in at]
        wide = rows.out.dtype

        def share(block: dict[str, Any], shift: int) -> list[jax.Array]:
            """Return the gradients of the wanted arrays from the products with one block."""
            inputs = jax.tree.leaves(dataclasses.replace(call, **block))
            known = rows if self.one.reads_rows else None

            def attend(wanted: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array | None]:
                all_inputs = list(inputs)
                for i, x in zip(at, wanted, strict=True):
                    all_inputs[i] = x
                of_block = jax.tree.unflatten(structure, all_inputs)
                return self.one.attend(_part(of_block, self.lengths, (index - shift) % P, known))

            (out, lse), pull = jax.vjp(attend, [inputs[i] for i in at])
            if known is not None:
                (found,) = pull((do, dlse))
            else:
                assert lse is not None
                # of out = sum_r w_r out_r with the weights w_r = exp(lse_r - lse)
                total = rows.row_max + rows.log_sum
                weight = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - total))
                change = (do.astype(wide) * (out.astype(wide) - rows.out)).sum(axis=-1) + dlse
                alive = jnp.isfinite(total) & ~jnp.isneginf(lse)
                d_out = jnp.where(alive[..., None], weight[..., None] * do.astype(wide), 0)
                d_lse = jnp.where(alive, weight * change, 0)
                (found,) = pull((d_out.astype(out.dtype), d_lse.astype(lse.dtype)))
            return [x.astype(wide) for x in found]

        block: dict[str, Any] = {name: getattr(call, name) for name in TRAVELLING}
        # otherwise, XLA would keep the blocks that the forward pass received
        block = _after(do, block)
        total = [vary(jnp.zeros(leaves[i].shape, wide), do) for i in at]
        sums: list[jax.Array] = []  # of this step's block, from the shifts before
        for step in self.lengths.steps:
            following = self._sent(block, step.onward) if step.onward else block
            found = self._if_needed(step, partial(share, block, step.shift), call.query)
            own = [
                x for x, moves in zip(found, travels, strict=True) if not moves or not step.shift
            ]
            moving = [x for x, moves in zip(found, travels, strict=True) if moves and step.shift]
            if sums:
                moving = [x + y for x, y in zip(sums, moving, strict=True)]
            back = iter(self._sent(moving, step.home) if step.home else [])
            mine = iter(own)
            for n, moves in enumerate(travels):
                if not moves or not step.shift:
                    total[n] = total[n] + next(mine)
                elif step.home:
                    total[n] = total[n] + next(back)
            sums = self._sent(moving, step.onward) if step.onward and step.shift else []
            block, sums = _after(total, (following, sums))
        gradients = jax.tree.map(jnp.zeros_like, leaves)
        for i, x in zip(at, total, strict=True):
            gradients[i] = x.astype(leaves[i].dtype)
        d_sinks = None
        if sinks is not None:
            lse = rows.row_max + rows.log_sum
            D = (do.astype(wide) * rows.out).sum(axis=-1) - dlse
            weight = jnp.exp(sinks[None] - rows.row_max - rows.log_sum)
            d_sinks = -jnp.where(jnp.isfinite(lse), weight * D, 0).sum(axis=(0, 1))[None]
            d_sinks = d_sinks.astype(sinks.dtype)
        return jax.tree.unflatten(structure, gradients), d_sinks

    def plain(self, tree: Any) -> tuple[jax.Array, jax.Array]:
        """Attend to gathered keys with "xla", for forward mode and second derivatives."""
        call, sinks = tree
        gather = partial(lax.all_gather, axis_name=self.lengths.axes, axis=1, tiled=True)
        fields = {name: getattr(call, name) for name in TRAVELLING}
        whole = _part(dataclasses.replace(call, **jax.tree.map(gather, fields)), self.lengths, 0)
        wide = jnp.promote_types(call.query.dtype, jnp.float32)
        arrays = {name: getattr(whole, name).astype(wide) for name in ("query", "key", "value")}
        sinks = None if sinks is None else sinks[0]
        out, lse = Xla().attend(dataclasses.replace(whole, **arrays, sinks=sinks))
        return out.astype(call.query.dtype), lse
