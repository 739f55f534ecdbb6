"""Arguments of an attention call, checked once and then passed as one value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.biases import Bias
from transformer_jax.attention.dropout import key_words
from transformer_jax.attention.mask import Mask, check_mask
from transformer_jax.attention.score_mod import ScoreFunction, ScoreMod, traced_score_mod
from transformer_jax.checks import as_int32, as_number, check_factor, check_finite, check_key
from transformer_jax.kernels.caches import dequantize, rows_of_pages
from transformer_jax.kernels.contract import Refused as Refused
from transformer_jax.kernels.contract import Shaped
from transformer_jax.kernels.dropout import exact_rate, head_words
from transformer_jax.sharding import by_compiler, split
from transformer_jax.tracing import traced
from transformer_jax.values import short_repr, value_class

POOLS = ("key", "value", "key_scale", "value_scale")
POSITIONS = "q_positions", "k_positions", "block_table"  # integers
ARRAYS = jax.Array, jax.ShapeDtypeStruct
DTYPES = {jnp.dtype(name): name for name in ("bfloat16", "float16", "float32", "float64")}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of an implementation for a call, which depends on shapes, options and the device.

    A plan is hashable. It is made once, outside the compiled program, and is part of the program's
    cache key.
    """

    reads_pages: bool = False
    """Whether the pages of a block table are read in place instead of being gathered."""
    reads_int8: bool = False
    """Whether int8 keys and values are read directly instead of being dequantized."""


@short_repr
class Rows(NamedTuple):
    """Results of some queries: the output, and the two terms of lse.

    The lse is row_max + log_sum. If the scores are large, rounding this sum would lose log_sum. In
    a fully masked row, row_max is -inf. In a broken row, at least one of the three is NaN.
    """

    out: jax.Array  # f32[B, T, N, Hv]
    row_max: jax.Array  # f32[B, T, N]
    log_sum: jax.Array  # f32[B, T, N]


class Options(TypedDict, total=False):
    """Arguments of `dot_product_attention` other than query, key and value."""

    mask: Mask | PlannedMask | None
    bias: jax.Array | Bias | None
    score_mod: ScoreFunction | None
    scale: float | jax.Array | None
    softcap: float | None
    sinks: jax.Array | None
    q_positions: jax.Array | None
    k_positions: jax.Array | None
    dropout_rate: float
    dropout_key: jax.Array | None
    broadcast_dropout: bool
    key_scale: jax.Array | None
    value_scale: jax.Array | None
    block_table: jax.Array | None


@value_class(
    kw_only=True,
    arrays=(
        "query",
        "key",
        "value",
        "mask",
        "bias",
        "score_mod",
        "sinks",
        "scale_array",
        "q_positions",
        "k_positions",
        "dropout_key",
        "dropout_words",
        "key_scale",
        "value_scale",
        "block_table",
        "shared",
        "first",
        "rows",
    ),
    static=("scale", "softcap", "dropout_rate", "broadcast_dropout", "return_lse", "plan"),
    eq=False,
)
class AttentionCall:
    """Checked arguments of one attention call. Arrays are leaves, and numbers are static."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array  # [B, S, K, Hv]
    mask: Mask | None = None
    bias: jax.Array | Bias | None = None  # [B or 1, N or 1, T or 1, S or 1], or a Bias
    score_mod: ScoreMod | None = None
    sinks: jax.Array | None = None  # [N]
    scale: float | None = None  # None means 1 / sqrt(H), unless `scale_array` is set
    scale_array: jax.Array | None = None  # [] or [N], if the scale may be traced
    softcap: float | None = None
    q_positions: jax.Array | None = None  # i32[T] or [B or 1, T]
    k_positions: jax.Array | None = None  # i32[S] or [B or 1, S]
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None  # None if the rate is 0
    dropout_words: jax.Array | None = None  # u32[2, B, N], a hash of the key, set by "blockwise"
    broadcast_dropout: bool = False
    return_lse: bool = False
    key_scale: jax.Array | None = None  # f32[B, S, K] if key is int8
    value_scale: jax.Array | None = None  # f32[B, S, K] if value is int8
    block_table: jax.Array | None = None  # i32[B, M]; then key, value and scales are [P, page, ..]
    plan: Plan = Plan()  # from `Implementation.plan`
    shared: object = None  # from `Implementation.share`, for calls like this one
    # set by `ring`, for a call with some of the queries and keys of a larger call
    first: jax.Array | None = None  # i32[2], the indices of its first query and key, for dropout
    rows: Rows | None = (
        None  # results over all keys; `attend` returns them and has its own gradient
    )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return (B, T, N, S)."""
        (B, T, N, _), S = self.query.shape, self.key.shape[1]
        return B, T, N, S if self.block_table is None else self.block_table.shape[1] * S

    def positions(
        self, T: int | None = None, S: int | None = None
    ) -> tuple[jax.Array, jax.Array]:  # i32[B or 1, T], i32[B or 1, S]
        """Return the positions of queries and keys, by default their indices.

        Known positions remain known inside a trace. Under `eagerly`, a plan made from them also
        remains known.
        """
        T, S = self.query.shape[1] if T is None else T, self.sizes[3] if S is None else S
        q, k = (
            jnp.arange(n, dtype=jnp.int32) if x is None else x
            for x, n in ((self.q_positions, T), (self.k_positions, S))
        )
        return q if q.ndim == 2 else q[None], k if k.ndim == 2 else k[None]

    def gathered(self) -> AttentionCall:
        """Return the call with the pages of each row copied into contiguous keys and values."""
        assert self.block_table is not None
        names = [name for name in POOLS if getattr(self, name) is not None]
        pools = [getattr(self, name) for name in names]

        def gather(table: jax.Array, *pools: jax.Array) -> list[jax.Array]:
            return [rows_of_pages(x, table) for x in pools]

        # shard rows like those of the query, and the other axes like those of the pool
        rows = partial(split, self.query, slice(1))
        specs = [rows((None, *split(x, slice(2, None)))) for x in pools]
        results = by_compiler(gather, [self.block_table, *pools], specs)
        gathered: dict[str, Any] = dict(zip(names, results, strict=True))
        return dataclasses.replace(self, **gathered, block_table=None)

    def dequantized(self) -> AttentionCall:
        """Return the call with keys and values in the query's dtype."""
        assert self.key_scale is not None and self.value_scale is not None
        key = dequantize(self.key, self.key_scale, self.query.dtype)
        value = dequantize(self.value, self.value_scale, self.query.dtype)
        return dataclasses.replace(self, key=key, value=value, key_scale=None, value_scale=None)

    def plain_shapes(self) -> AttentionCall:
        """Return the call with the shapes of gathered, dequantized keys and values."""
        B, _, _, S = self.sizes

        def plain(x: jax.Array) -> Any:
            rows = x.shape[:2] if self.block_table is None else (B, S)
            dtype = x.dtype if self.key_scale is None else self.query.dtype
            return jax.ShapeDtypeStruct((*rows, *x.shape[2:]), dtype)

        key, value = plain(self.key), plain(self.value)
        return dataclasses.replace(
            self, key=key, value=value, key_scale=None, value_scale=None, block_table=None
        )

    def head_words(self) -> jax.Array | None:  # u32[2, B, N]
        """Return a hash of the dropout key for each batch row and each head."""
        if self.dropout_key is None:
            return self.dropout_words
        B, _, N, _ = self.query.shape
        rows_heads = (1, 1) if self.broadcast_dropout else (B, N)
        # computed once per call: each tile only mixes in its queries and keys
        words = jnp.stack(head_words(key_words(self.dropout_key), *rows_heads))
        return jnp.broadcast_to(words, (2, B, N))


@value_class(arrays=("mask", "shared"), static=("checked",))
class PlannedMask:
    """Mask, with arrays that an implementation computed from the mask and the positions.

    Pass it as the mask to later calls with the same positions, which they do not check. A call
    computes its own arrays if its sizes or its implementation differ, or if it has positions but
    the plan had none.
    """

    mask: Mask
    shared: object
    checked: tuple[int | None, ...]  # arguments of `check_mask`, which calls with these sizes skip


class Implementation:
    """Base class of attention implementations. Instances must be hashable."""

    def refuse(self, call: AttentionCall) -> str | None:
        """Return the reason why this implementation does not support a call, or None."""
        raise NotImplementedError

    def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array | None]:
        """Return the output [B, T, N, Hv] and lse f32[B, T, N] (None if it is not supported)."""
        raise NotImplementedError

    reads_score_mod: ClassVar[bool] = False
    """Whether `attend` applies `call.score_mod`; otherwise, calls with it are refused."""

    reads_rows: ClassVar[bool] = False
    """Whether `attend` reads `call.rows`, so that the gradient of a part of the keys needs no
    forward pass."""

    def refuse_part(self, call: AttentionCall) -> str | None:
        """Return the reason why `rows` cannot compute a part of the keys of a call, or None."""
        return f"{type(self).__name__} has no method refuse_part"

    def rows(self, call: AttentionCall) -> Rows:
        """Return the results of `attend` in float32, for a part of the keys (see `ring`)."""
        out, lse = self.attend(call)
        if lse is None:
            raise Refused(f"{type(self).__name__} returns no lse")
        wide = jnp.promote_types(out.dtype, jnp.float32)
        return Rows(out.astype(wide), lse.astype(wide), jnp.zeros_like(lse, wide))

    def weights(self, call: AttentionCall) -> jax.Array:
        """Return the attention weights of `attend` before dropout, f32[B, N, T, S].

        This method is needed to capture or edit weights. The built-in implementations share one
        softmax. Your own implementation must return the weights that `attend` uses to average the
        values.
        """
        name = type(self).__name__
        rule = f"give {name} a method `weights(call)` that returns f32[B, N, T, S]"
        raise Refused(f"the weights of {name} are not known: {rule}")

    def plan(self, call: AttentionCall) -> Plan | str:
        """Return the plan for a call, or the reason why this implementation cannot run it.

        `attend` receives the plan as `call.plan`. `refuse` receives the shapes of gathered,
        dequantized keys and values.
        """
        if call.block_table is not None or call.key_scale is not None:
            call = call.plain_shapes()
        reason = self.refuse(call)
        return Plan() if reason is None else reason

    def share(self, call: AttentionCall) -> object:
        """Return a pytree that calls with this plan, mask and positions can share, or None.

        The pytree must not depend on the values of `query`, `key` and `value`. `attend` receives it
        as `call.shared`.
        """
        return None


def check_call(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> AttentionCall:
    """Check the arguments of `dot_product_attention` and return them as one value.

    Arrays may be `jax.ShapeDtypeStruct`s. Raise ValueError if an argument is invalid.
    """
    mask, bias, scale = options.get("mask"), options.get("bias"), options.get("scale")
    softcap, dropout_key = options.get("softcap"), options.get("dropout_key")
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value}
    optional = "sinks", "key_scale", "value_scale", *POSITIONS
    arrays |= {name: x for name in optional if (x := options.get(name)) is not None}
    for name, x in arrays.items():
        x = as_int32(name, x) if name in POSITIONS else x
        # `jnp.asarray` would return the same array, but takes ten times as long as this type check
        arrays[name] = x if isinstance(x, ARRAYS) else jnp.asarray(x)
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    sinks, key_scale, value_scale = map(arrays.get, optional[:3])
    q_positions, k_positions, block_table = map(arrays.get, POSITIONS)
    inputs = {"query": query, "key": key, "value": value}
    # a function, because formatting takes longer than all the checks of an eager call
    shapes = lambda: "shapes are " + ", ".join(f"{name} {x.shape}" for name, x in inputs.items())  # noqa: E731
    for name, x in inputs.items():
        if x.ndim != 4:
            raise ValueError(f"{shapes()}: {name} must be [batch, length, heads, width]")
    compared = inputs
    if key_scale is not None or value_scale is not None:
        for name, x, s in (("key", key, key_scale), ("value", value, value_scale)):
            if s is None or x.dtype != jnp.int8:
                scale_dtype = None if s is None else s.dtype
                rule = "int8 key and value need key_scale and value_scale"
                raise ValueError(f"{name} is {x.dtype} and {name}_scale is {scale_dtype}: {rule}")
            if s.shape != x.shape[:3] or s.dtype != jnp.float32:
                rule = f"must be float32{x.shape[:3]}, one scale for each row of {name}"
                raise ValueError(f"{name}_scale is {s.dtype}{s.shape}: {rule}")
        compared = {"query": query}
    if query.dtype not in DTYPES or any([x.dtype != query.dtype for x in compared.values()]):
        dtypes = {name: str(x.dtype) for name, x in compared.items()}
        named = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        scales = "; int8 needs key_scale and value_scale" * ("int8" in dtypes.values())
        raise ValueError(f"{named}: must be one dtype of {', '.join(DTYPES.values())}{scales}")
    (B, T, N, H), (keys_B, S, K, keys_H) = query.shape, key.shape
    if block_table is not None:
        table, is_whole = block_table, jnp.issubdtype(block_table.dtype, jnp.integer)
        if table.ndim != 2 or table.shape[0] != B or not is_whole:
            rule = f"must be integers ({B}, M), the pages of each row"
            raise ValueError(f"block_table is {table.dtype}{table.shape}: {rule}")
        if keys_B == 0:
            rule = "with a block_table it must be [pages, page, heads, width] with pages >= 1"
            raise ValueError(f"key has shape {key.shape}: {rule}")
        S = block_table.shape[1] * S
    elif B != keys_B:
        raise ValueError(f"{shapes()}: query has {B} batch rows, but key has {keys_B}")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"{shapes()}: value must have the batch, length and heads of key")
    if H != keys_H or H == 0:
        rule = "the widths must be equal and not 0"
        raise ValueError(f"{shapes()}: query has width {H} and key has width {keys_H}, but {rule}")
    if K == 0 or N == 0 or N % K:
        rule = "the number of key heads must divide the number of query heads"
        raise ValueError(f"{shapes()}: query has {N} heads and key has {K}, but {rule}")
    shared, checked = None, None
    if isinstance(mask, PlannedMask):
        shared, checked = mask.shared, mask.checked
        mask = mask.mask
    # a mask may be shorter than T or S if positions select its entries
    sizes = B, N, T if q_positions is None else None, S if k_positions is None else None
    # the layers of a model share a mask, so check it only once
    if sizes != checked:
        check_mask(mask, *sizes)
    if bias is not None:
        bias = _check_bias(bias, (B, N, T, S), q_positions, k_positions)
    score_mod, function = None, options.get("score_mod")
    if function is not None:
        score_mod = traced_score_mod(function, B, N, query.dtype)
    if sinks is not None and (sinks.shape != (N,) or not _floating(sinks)):
        rule = f"must be floating-point ({N},), one for each head"
        raise ValueError(f"sinks is {sinks.dtype}{sinks.shape}: {rule}")
    for name, positions, length in (
        ("q_positions", q_positions, T),
        ("k_positions", k_positions, S),
    ):
        if positions is not None:
            fits = positions.shape in ((length,), (1, length), (B, length))
            if not fits or not jnp.issubdtype(positions.dtype, jnp.integer):
                rule = f"must be integers ({length},) or ({B}, {length})"
                raise ValueError(f"{name} is {positions.dtype}{positions.shape}: {rule}")
    is_list = isinstance(scale, list | tuple)
    # a known scale remains a constant, which costs nothing in a kernel; an array has a gradient
    known = not traced(*scale) if is_list else isinstance(scale, np.ndarray)  # type: ignore[misc]
    numbers: Any = np.ravel(scale) if known else ()  # type: ignore[arg-type]
    if is_list or np.ndim(scale):  # type: ignore[arg-type]  # one number for each head
        scale = jnp.asarray(scale)
    scale_array = scale if isinstance(scale, jax.Array) else None
    if isinstance(scale, jax.Array):
        real = jnp.issubdtype(scale.dtype, jnp.floating) | jnp.issubdtype(scale.dtype, jnp.integer)
        if scale.shape not in ((), (N,)) or not real:
            rule = f"must be one number, or floating-point ({N},), one for each head"
            raise ValueError(f"scale is {scale.dtype}{scale.shape}: {rule}")
        scale = None
    elif scale is not None:
        scale = as_number("scale", scale)
        numbers = [scale]
    for one in numbers:
        check_finite("scale", float(one))
        if one:  # 0 is allowed, but a device would flush numbers below 2^-126 to 0
            check_factor("scale", abs(float(one)))
    if softcap is not None:
        check_factor("softcap", as_number("softcap", softcap))
    dropout_rate = as_number("dropout_rate", options.get("dropout_rate", 0.0))
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate is {dropout_rate}: must be at least 0 and below 1")
    if dropout_rate > 0 and dropout_key is None:
        raise ValueError(f"dropout_rate is {dropout_rate}: a rate above 0 needs a dropout_key")
    if dropout_key is not None:
        check_key("dropout_key", dropout_key)
    broadcast_dropout = options.get("broadcast_dropout", False)
    if not isinstance(broadcast_dropout, bool | np.bool_):
        raise ValueError(f"broadcast_dropout is {broadcast_dropout!r}: must be True or False")
    rate = exact_rate(dropout_rate) if dropout_rate else 0.0
    return AttentionCall(
        **arrays,
        mask=mask,
        bias=bias,
        score_mod=score_mod,
        scale=scale,
        scale_array=scale_array,
        softcap=None if softcap is None else float(softcap),
        dropout_rate=rate,
        dropout_key=dropout_key if rate else None,
        broadcast_dropout=bool(broadcast_dropout and rate),
        return_lse=return_lse,
        shared=shared,
    )


def _check_bias(
    bias: jax.Array | Bias,
    full: tuple[int, ...],
    q_positions: jax.Array | None,
    k_positions: jax.Array | None,
) -> jax.Array | Bias:
    """Check a bias and return it, with all four axes if it is an array."""
    if isinstance(bias, type):
        raise ValueError(f"bias is the class {bias.__name__}: must be an instance of it")
    if isinstance(bias, Bias):
        if jax.tree_util.all_leaves([bias]):
            name = type(bias).__name__
            raise ValueError(
                f"bias is an instance of {name}, which is not registered as a pytree: write "
                f"{_DECORATORS} above class {name}"
            )
        positions = [
            jax.ShapeDtypeStruct((1, n), jnp.int32) if p is None else p
            for p, n in ((q_positions, full[2]), (k_positions, full[3]))
        ]
        array: Any = bias_shape(bias, *positions)
    elif callable(bias):
        raise ValueError(
            f"bias is a function: must be an array or a value with the method materialize("
            f"q_positions, k_positions), in a class under {_DECORATORS}"
        )
    else:
        bias = array = bias if isinstance(bias, ARRAYS) else jnp.asarray(bias)
    # broadcast from the right, as NumPy does
    pairs = zip(array.shape[::-1], full[::-1], strict=False)
    if len(array.shape) > 4 or any(n not in (1, size) for n, size in pairs):
        shape = tuple(array.shape)
        raise ValueError(f"bias has shape {shape}: must broadcast to [B, N, T, S], {full}")
    if not _floating(array):
        raise ValueError(f"bias is {array.dtype}: must be floating-point; to hide keys, use a mask")
    shape = (1,) * (4 - len(array.shape)) + array.shape
    if isinstance(bias, Bias) or shape == array.shape:
        return bias
    shaped: Any = jax.ShapeDtypeStruct(shape, array.dtype)
    return shaped if isinstance(bias, jax.ShapeDtypeStruct) else bias.reshape(shape)


_DECORATORS = "@jax.tree_util.register_dataclass and @dataclass(frozen=True)"


def bias_shape(bias: Bias, q_positions: Shaped, k_positions: Shaped) -> jax.ShapeDtypeStruct:
    """Return the shape of a materialized bias, regardless of the devices of its arrays."""
    bare = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))  # noqa: E731
    shapes = jax.tree.map(bare, (bias, q_positions, k_positions))
    return jax.eval_shape(lambda bias, q, k: bias.materialize(q, k), *shapes)


def check_states(
    name: str, query: jax.Array, keys: jax.Array, values: jax.Array, mask: Mask | None
) -> None:
    """Raise ValueError if the arguments of a recurrent decoder's attention do not match."""
    shapes = f"shapes are query {query.shape}, {name} {keys.shape}, values {values.shape}"
    if query.ndim != 3 or keys.ndim != 3 or values.ndim != 3:
        raise ValueError(f"{shapes}: must be [B, T, D], [B, S, D], [B, S, D]")
    if query.shape[0] != keys.shape[0] or keys.shape[:2] != values.shape[:2]:
        raise ValueError(f"{shapes}: batch rows and lengths must be equal")
    check_mask(mask, query.shape[0], 1, query.shape[1], keys.shape[1])


def _floating(x: Shaped) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
