"""Attention: one function, several implementations that mean the same, and the rules of choosing.

    dot_product_attention           softmax(scale q k + bias, masked) v
    explain_attention               which implementations would run, and why not
    dot_product_attention_weights   the weights themselves
    additive_attention              Bahdanau et al. 2015
    state_attention                 Luong et al. 2015

An implementation asked for by name runs, or raises NotImplementedError with the condition that
failed. The conditions stand here once, in `_REFUSALS`; running and explaining both read them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.arguments import Call, Options, bias_shape, check, check_states
from transformer_jax.blockwise import blockwise_attention
from transformer_jax.blockwise_parts import parts_of_types
from transformer_jax.blockwise_tiles import FEW_QUERIES
from transformer_jax.kernels import target
from transformer_jax.kernels.blocks import FASTEST
from transformer_jax.masks import And, Causal, Mask, Window, close
from transformer_jax.meshes import by_compiler, split
from transformer_jax.reference import (
    Bias,
    clean,
    einsum,
    finite_rows,
    reference_attention,
    reference_weights,
    see,
    softmax,
)

__all__ = [
    "Bias",
    "Explanation",
    "additive_attention",
    "dot_product_attention",
    "dot_product_attention_weights",
    "explain_attention",
    "state_attention",
]


def dot_product_attention(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    value: jax.Array,  # [B, S, K, Hv]
    *,
    mask: Mask | None = None,
    bias: jax.Array | Bias | None = None,
    scale: float | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    q_positions: jax.Array | None = None,  # i32[T] or [B, T]
    k_positions: jax.Array | None = None,  # i32[S] or [B, S]
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Any:  # [B, T, N, Hv], or with lse f32[B, T, N]
    """softmax(s) v with s = softcap tanh(scale q.k / softcap) + bias where the mask allows it.

    Query head n reads key head n // (N / K). A sink adds exp(sinks[n]) to the denominator of the
    softmax, and carries no value. `scale` is 1 / sqrt(H) by default; `bias` is an array that
    broadcasts to [B, N, T, S], by index, or a value that is asked by position, such as `ALiBi`.
    Positions are arange by default; a key at a negative position is an empty slot. Dropout leaves
    out weights after the softmax, the same ones in every implementation. `lse` is the natural
    logarithm of the softmax's denominator, with the sink's term.

    A query that sees nothing gets zeros, lse -inf and no gradient. NaN or inf in a query, key or
    value reaches exactly the queries that see it, whose output is NaN; if a mask is given, those
    pass no gradient on.

    `implementation` is "xla" (materialises the scores, any option, forward mode too), "blockwise"
    (memory O(T + S); the gradient, but neither forward mode nor a gradient of the gradient),
    "pallas" (the same, fused, on a TPU or an NVIDIA Hopper GPU), "pallas_unordered" (on Hopper: a
    backward pass of fewer products, whose last bits differ from run to run), "cudnn", None for the
    best that runs here, or a sequence that is tried in order. A named one runs or raises
    NotImplementedError with the reason.
    ValueError where the arguments do not fit together.
    """
    call = check(
        query, key, value, mask, bias, scale, softcap, sinks, q_positions, k_positions,
        dropout_rate, dropout_key, return_lse,
    )  # fmt: skip
    refused = []
    for name in _candidates(implementation, call):
        reason = _REFUSALS[name](call)
        if reason is None:
            try:
                where = target() if name in _PALLAS else None
                out, lse = _run(name, call.options, where, call.arrays)
                return (out, lse) if return_lse else out
            except NotImplementedError as error:
                reason = str(error)
        refused.append(f"{name}: {reason}")
    raise NotImplementedError("; ".join(refused))


@dataclass(frozen=True, eq=False)
class Explanation(Mapping[str, str | None]):
    """For each implementation None if it would run, else the reason why not."""

    reasons: Mapping[str, str | None]
    chosen: str
    """What `implementation=None` would run."""

    def __getitem__(self, name: str) -> str | None:
        return self.reasons[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reasons)

    def __len__(self) -> int:
        return len(self.reasons)

    def __str__(self) -> str:
        lines = [f"{name}: {reason or 'runs'}" for name, reason in self.reasons.items()]
        return "\n".join([*lines, f"without a name: {self.chosen}"])


def explain_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Mask | None = None,
    bias: jax.Array | Bias | None = None,
    scale: float | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    k_positions: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_lse: bool = False,
) -> Explanation:
    """Which implementations `dot_product_attention` would run on these arguments, and why not.

    Takes arrays or `jax.ShapeDtypeStruct`s. ValueError as there.
    """
    call = check(
        query, key, value, mask, bias, scale, softcap, sinks, q_positions, k_positions,
        dropout_rate, dropout_key, return_lse,
    )  # fmt: skip
    reasons = {name: refusal(call) for name, refusal in _REFUSALS.items()}
    chosen = next(name for name in _candidates(None, call) if reasons[name] is None)
    return Explanation(reasons, chosen)


def dot_product_attention_weights(
    query: jax.Array,  # [B, T, N, H]
    key: jax.Array,  # [B, S, K, H]
    *,
    mask: Mask | None = None,
    bias: jax.Array | Bias | None = None,
    scale: float | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    q_positions: jax.Array | None = None,  # i32[T] or [B, T]
    k_positions: jax.Array | None = None,  # i32[S] or [B, S]
) -> jax.Array:  # f32[B, N, T, S]
    """What `dot_product_attention` weighs the values with; a row that sees nothing is zero."""
    call = check(
        query, key, key, mask, bias, scale, softcap, sinks, q_positions, k_positions, 0.0, None,
        False,
    )  # fmt: skip
    arrays = dict(call.arrays)
    del arrays["value"], arrays["dropout_key"]
    return _weights(call.options.scale, call.options.softcap, arrays)


def additive_attention(
    query: jax.Array,  # [B, T, Dq]
    keys: jax.Array,  # [B, S, Dk]
    values: jax.Array,  # [B, S, Dv]
    *,
    w_query: jax.Array,  # [Dq, A]
    w_key: jax.Array | None,  # [Dk, A]; None where keys are [B, S, A], multiplied once for all
    v: jax.Array,  # [A]
    mask: Mask | None = None,
) -> tuple[jax.Array, jax.Array]:  # context [B, T, Dv], weights f32[B, T, S]
    """softmax_s(v . tanh(query w_query + keys w_key)) values (Bahdanau et al. 2015, A.1.2).

    Builds the hidden layer [B, T, S, A]; for the recurrent decoders it is from, T is 1.
    """
    check_states("keys", query, keys, values, mask)
    hidden, key_shape = v.shape[-1:], keys.shape[2:] if w_key is None else w_key.shape
    wanted = hidden if w_key is None else (keys.shape[2], *hidden)
    if (w_query.shape, key_shape, v.shape) != ((query.shape[2], *hidden), wanted, hidden):
        key_said = f"keys {keys.shape}" if w_key is None else f"w_key {w_key.shape}"
        key_rule = "[B, S, A]" if w_key is None else f"[{keys.shape[2]}, A]"
        raise ValueError(
            f"w_query {w_query.shape}, {key_said}, v {v.shape}: must be "
            f"[{query.shape[2]}, A], {key_rule}, [A]"
        )
    heads = [x[:, :, None] for x in (query, keys, values)]
    visible = see(heads[0], heads[1], mask)
    q, k, heads_values, poison = clean(visible, *heads)
    q = einsum("BTND,DA->BTNA", q, w_query)
    k = k if w_key is None else einsum("BSND,DA->BSNA", k, w_key)
    hidden_layer = jnp.tanh(q[:, :, None] + k[:, None])[:, :, :, 0]
    scores = einsum("BTSA,A->BTS", hidden_layer, v.astype(hidden_layer.dtype))
    result = softmax(scores[:, None], visible, poison)
    context = result.average(heads_values)[:, :, 0].astype(query.dtype)
    return context, result.weights[:, 0]


def state_attention(
    query: jax.Array,  # [B, T, Dq]
    states: jax.Array,  # [B, S, Dk]
    *,
    w: jax.Array | None = None,  # [Dq, Dk]
    scale: float = 1.0,
    mask: Mask | None = None,
) -> tuple[jax.Array, jax.Array]:  # context [B, T, Dk], weights f32[B, T, S]
    """softmax_s(scale query w states) states: Luong et al. 2015's "general", "dot" without w."""
    check_states("states", query, states, states, mask)
    given = query.shape[2] if w is None else w.shape
    wanted = states.shape[2] if w is None else (query.shape[2], states.shape[2])
    if given != wanted:
        raise ValueError(f"{'query' if w is None else 'w'} is {given} wide: must be {wanted}")
    if w is not None:
        query = einsum("BTD,DE->BTE", query, w).astype(query.dtype)
    heads = query[:, :, None], states[:, :, None]
    context, _ = reference_attention(*heads, heads[1], mask=mask, scale=scale)
    return context[:, :, 0], reference_weights(*heads, mask=mask, scale=scale)[:, 0]


# Which implementation, and why not


def _candidates(implementation: str | Sequence[str] | None, call: Call) -> list[str]:
    if implementation is None:
        return _best_first(call)
    names = [implementation] if isinstance(implementation, str) else list(implementation)
    if not names or not set(names) <= set(_REFUSALS):
        raise ValueError(f"implementation {implementation!r}: must be of {', '.join(_REFUSALS)}")
    return names


def _best_first(call: Call) -> list[str]:
    """Fused where it may run, else by size; our kernels only on chips where they were measured.

    Measured on a CPU: a head of few scores is faster in one product than in tiles, while scores,
    keys and values fit the cache; but a few queries over a cache of keys are fastest in tiles,
    which end where it is filled. On an accelerator the scores may take a gibibyte.
    """
    B, T, N, S = call.sizes
    keys, values = call.arrays["key"].size, call.arrays["value"].size
    if jax.default_backend() == "cpu":
        small = T * S < 128 * 128 and 4 * (B * T * N * S + keys + values) <= 2**23
        small = small and not (T <= FEW_QUERIES and S >= 64)
    else:
        small = 4 * B * T * N * S <= 2**30
    fused = ["pallas"] if _pallas_is_fastest() else []
    return [*fused, "cudnn", *(("xla", "blockwise") if small else ("blockwise", "xla"))]


def _pallas_is_fastest() -> bool:
    """Where our kernels were measured to be: see kernels/blocks.py."""
    where = target()
    return not isinstance(where, str) and where.chip in FASTEST


def _refuse_xla(call: Call) -> str | None:
    return None


def _refuse_blockwise(call: Call) -> str | None:
    if call.arrays["query"].dtype == np.float64:
        return "computes in float32, the inputs are float64"
    bias, (_, T, _, S) = call.arrays["bias"], call.sizes
    if isinstance(bias, Bias) and any(
        _differs_by_row(call.arrays[name], 2) for name in ("q_positions", "k_positions")
    ):
        # tiles of some rows have the positions of these; the bias cannot know which they are
        one_row = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (T, S))
        if _differs_by_row(bias_shape(bias, *one_row), 4):
            return "bias and positions differ by batch row: one of them may"
    return None


def _differs_by_row(x: Any, ndim: int) -> bool:
    """Whether what has batch rows in front, if it has so many axes, has more than one."""
    return x is not None and x.ndim == ndim and x.shape[0] > 1


def _refuse_pallas(call: Call) -> str | None:
    return _pallas().refuse(call)


def _refuse_pallas_unordered(call: Call) -> str | None:
    return _pallas().refuse(call, unordered=True)


def _refuse_cudnn(call: Call) -> str | None:
    """cuDNN as jax.nn offers it; what it would ignore, round or get wrong is refused."""
    query, value = call.arrays["query"], call.arrays["value"]
    B, T, _, S = call.sizes
    H, Hv = query.shape[3], value.shape[3]
    if jax.default_backend() not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, the backend is {jax.default_backend()}"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is None or float(capability) < 8.0:
        return f"needs compute capability 8.0, the device has {capability}"
    if str(query.dtype) not in ("bfloat16", "float16"):
        return f"needs bfloat16 or float16, the inputs are {query.dtype}"
    widest = 256 if float(capability) >= 9.0 else 128
    if H != Hv or H % 8 or H > widest:
        return f"needs one width of keys and values, a multiple of 8 up to {widest}: {H} and {Hv}"
    if 0 in (B, T, S):
        return f"an axis is empty: B {B}, T {T}, S {S}"
    for name in ("bias", "sinks", "q_positions", "k_positions", "dropout_key"):
        if call.arrays[name] is not None:
            return f"takes no {name}"
    if "scale" in call.arrays:
        return "takes no scale that is an array"
    if call.options.softcap is not None:
        return "takes no softcap"
    if call.return_lse:
        return "returns lse in the inputs' dtype and without a gradient"
    mask = call.arrays["mask"]
    if mask is not None and _causal_window(mask) is None:
        return f"honours Causal() and Causal() & Window(left), the mask is {mask!r}"
    if mask is not None and T != S:
        return f"needs as many keys as queries under a mask: T {T}, S {S}"
    return None


_REFUSALS: dict[str, Callable[[Call], str | None]] = {
    "xla": _refuse_xla,
    "blockwise": _refuse_blockwise,
    "pallas": _refuse_pallas,
    "pallas_unordered": _refuse_pallas_unordered,
    "cudnn": _refuse_cudnn,
}
_PALLAS = ("pallas", "pallas_unordered")


def _causal_window(mask: Mask) -> tuple[int | None] | None:
    """(left,) of Causal() & Window(left), (None,) of Causal(), None of anything else."""
    if mask == Causal():
        return (None,)
    if not isinstance(mask, And):
        return None
    window = mask.right if mask.left == Causal() else mask.left
    if Causal() not in (mask.left, mask.right) or not isinstance(window, Window):
        return None
    return (window.left,) if window.left and window.right is None else None


# Running one


def _pallas() -> ModuleType:
    """Imported at its first use: Pallas takes a second."""
    return importlib.import_module("transformer_jax.pallas")


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(name: str, options: Options, where: Any, arrays: dict[str, Any]) -> tuple[jax.Array, Any]:
    def run(arrays):
        if name == "cudnn":
            return _cudnn(options, arrays), None
        if name in _PALLAS:
            return _pallas().pallas_attention(where, options, name == "pallas_unordered", **arrays)
        attend = {"xla": reference_attention, "blockwise": blockwise_attention}[name]
        return attend(**dataclasses.asdict(options) | arrays)  # arrays may hold a scale

    if name == "blockwise":
        called = (arrays[name] for name in ("query", "key", "mask", "bias"))
        if parts_of_types(*called) is not None:
            return run(arrays)
    if arrays["mask"] is not None:
        arrays = arrays | dict(mask=close(arrays["mask"]))
    return by_compiler(run, [arrays], split(arrays["query"], slice(3)))


@partial(jax.jit, static_argnums=(0, 1))
def _weights(scale: float | None, softcap: float | None, arrays: dict[str, Any]) -> jax.Array:
    def run(arrays):
        return reference_weights(**dict(scale=scale, softcap=softcap) | arrays)

    rows, tokens, heads, _ = split(arrays["query"])
    return by_compiler(run, [arrays], PartitionSpec(rows, heads, tokens))


def _cudnn(options: Options, arrays: dict[str, Any]) -> jax.Array:  # [B, T, N, H]
    """jax.nn's cuDNN attention, with rows that are not finite kept from those that do not see them.

    `Window(left)` counts the query itself, jax.nn's `local_window_size` does not.
    """
    query, key, value, mask = (arrays[name] for name in ("query", "key", "value", "mask"))
    attend = partial(jax.nn.dot_product_attention, scale=options.scale, implementation="cudnn")
    if mask is None:
        return attend(query, key, value)
    (left,) = _causal_window(mask) or (None,)
    left = None if left is None or left >= key.shape[1] else left
    good_query = finite_rows(query)
    good_key = finite_rows(key) & finite_rows(value)  # [B, S, K]
    query = jnp.where(good_query[..., None], query, 0)
    key, value = (jnp.where(good_key[..., None], x, 0) for x in (key, value))
    out = attend(
        query, key, value, is_causal=True, local_window_size=None if left is None else (left - 1, 0)
    )
    bad = jnp.cumsum(~good_key, axis=1)  # so far
    if left is not None:
        bad = bad - jnp.pad(bad, ((0, 0), (left, 0), (0, 0)))[:, : bad.shape[1]]
    bad = jnp.repeat(bad > 0, query.shape[2] // key.shape[2], axis=2) | ~good_query
    return jnp.where(bad[..., None], jnp.nan, out)
