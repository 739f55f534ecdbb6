"""Adapters that call each library for a case as a user would."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.conformance.cases import Case
from benchmarks.peers import Absent, imported, onnx_session

OPTIONS = ("causal", "window", "segments", "lengths", "mask", "bias", "scale", "softcap", "sinks")
Attend = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Implementation:
    """Attention function of a library.

    Attributes:
        package: name of the module to import.
        takes: options of a case for which the function has an argument. If `mask` is one of them,
            the adapter converts the other mask options to a single bool mask.
        build: function that returns the attention function of (query, key, value) for a case.
        run: function that computes the output and the gradients of the attention function.
        gradient: whether the function has a gradient on a CPU. If not, only the output is compared.
    """

    package: str
    takes: tuple[str, ...]
    build: Callable[[Case], Attend]
    run: Callable[[Case, Attend], dict[str, np.ndarray]]
    gradient: bool = True

    def version(self) -> str:
        """Return the version of the library, or raise `Absent` if it cannot be imported."""
        module = imported(self.package)
        return getattr(module, "__version__", None) or importlib.metadata.version(self.package)

    def __call__(self, case: Case) -> dict[str, np.ndarray]:
        """Return `out` and, if compared, the gradients. Raise `Absent` if an option is missing."""
        for option in OPTIONS:
            value = getattr(case, option)
            if value is None or value is False or option in self.takes:
                continue
            if option in ("causal", "window", "segments", "lengths") and "mask" in self.takes:
                continue
            raise Absent(f"no argument for {option}")
        case = case if self.gradient else case.changed(grads=False)
        return self.run(case, self.build(case))


def bool_mask(case: Case, *native: str) -> np.ndarray | None:
    """Return all mask options except `native` as one bool array, or None if there are none."""
    options = dict(causal=False, window=None, segments=None, lengths=None, mask=None)
    rest = case.changed(**{name: options[name] for name in native})
    if all(getattr(rest, name) is value for name, value in options.items()):
        return None
    return rest.visible()


# Running a function


def in_jax(case: Case, attend: Attend) -> dict[str, np.ndarray]:
    import jax
    import jax.numpy as jnp

    q, k, v, dout = (jnp.asarray(x) for x in case.inputs)
    if not case.grads:
        return {"out": np.asarray(jax.jit(attend)(q, k, v)).astype(np.float64)}

    def both(q: Any, k: Any, v: Any) -> Any:
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(dout.astype(out.dtype))

    results = jax.jit(both)(q, k, v)
    return _named([np.asarray(x).astype(np.float64) for x in results])


def in_torch(case: Case, attend: Attend) -> dict[str, np.ndarray]:
    import torch

    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (torch.tensor(x.astype(np.float32)).to(dtype) for x in case.inputs)
    for x in (q, k, v):
        x.requires_grad_(case.grads)
    out = attend(q, k, v)
    results = [out]
    if case.grads:
        results += torch.autograd.grad(out, (q, k, v), dout.to(out.dtype), allow_unused=True)
    # torch returns None as the gradient of an input that has no effect
    results = [
        torch.zeros_like(z) if x is None else x for x, z in zip(results, (q, q, k, v), strict=False)
    ]
    return _named([x.detach().to(torch.float64).numpy() for x in results])


def in_numpy(case: Case, attend: Attend) -> dict[str, np.ndarray]:
    """Run a function that has no gradient."""
    return _named([attend(*case.inputs[:3]).astype(np.float64)])


def _named(arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    names = ("out", "query", "key", "value")[: len(arrays)]
    return dict(zip(names, arrays, strict=True))


# Adapters


def ours(name: str | None, case: Case) -> Attend:
    from transformer_jax import Causal, Dense, Padding, Segments, Window, dot_product_attention

    parts: list[Any] = [Causal()] if case.causal else []
    if case.window is not None:
        left, right = case.window
        parts.append(
            Window(
                None if left is None else left + 1,
                None if right is None else right + 1,
            )
        )
    if case.segments is not None:
        parts.append(Segments(*case.segments))
    if case.lengths is not None:
        parts.append(Padding(np.arange(case.shape[2]) < case.lengths[:, None]))
    if case.mask is not None:
        T, S = case.shape[1:3]
        parts.append(Dense(np.broadcast_to(case.mask, (*case.mask.shape[:2], T, S))))
    mask = functools.reduce(lambda a, b: a & b, parts) if parts else None
    return functools.partial(
        dot_product_attention, mask=mask, bias=case.bias, scale=case.scale, softcap=case.softcap,
        sinks=case.sinks, implementation=name,
    )  # fmt: skip


def jax_nn(case: Case) -> Attend:
    import jax

    return functools.partial(
        jax.nn.dot_product_attention, bias=case.bias,
        mask=bool_mask(case, "causal", "window", "lengths"), scale=case.scale,
        is_causal=case.causal, key_value_seq_lengths=case.lengths,
        local_window_size=_both_sides(case),
    )  # fmt: skip


def _both_sides(case: Case) -> tuple[int, int] | None:
    """Return a window as two numbers. If a side has no limit, its number is the number of keys."""
    if case.window is None:
        return None
    left, right = (case.shape[2] if side is None else side for side in case.window)
    return left, right


def flax_linen(case: Case) -> Attend:
    from flax import linen

    return functools.partial(_flax, linen.dot_product_attention, case, bool_mask(case))


def flax_nnx(case: Case) -> Attend:
    from flax import nnx

    attend = functools.partial(nnx.dot_product_attention, is_causal=case.causal)
    return functools.partial(_flax, attend, case, bool_mask(case, "causal"))


def _flax(attend: Attend, case: Case, mask: np.ndarray | None, q: Any, k: Any, v: Any) -> Any:
    """Scale the query, because flax divides by sqrt(H) and has no argument for a scale."""
    if case.scale is not None:
        q = q * (case.scale * q.shape[-1] ** 0.5)
    return attend(q, k, v, bias=case.bias, mask=mask)  # type: ignore[call-arg]


def keras(case: Case) -> Attend:
    import keras

    return functools.partial(
        keras.ops.dot_product_attention, bias=case.bias, mask=bool_mask(case, "causal"),
        scale=case.scale, is_causal=case.causal, attn_logits_soft_cap=case.softcap,
    )  # fmt: skip


def tokamax(name: str | None, case: Case) -> Attend:
    import jax.numpy as jnp
    import tokamax

    mask = bool_mask(case, "causal", "window", "lengths")
    return functools.partial(
        tokamax.dot_product_attention, bias=None if case.bias is None else jnp.asarray(case.bias),
        mask=None if mask is None else jnp.asarray(mask), scale=case.scale,
        is_causal=case.causal, key_value_seq_lengths=case.lengths,
        local_window_size=_both_sides(case), logits_soft_cap=case.softcap, implementation=name,
    )  # fmt: skip


def attnax(case: Case) -> Attend:
    import attnax

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        if case.scale is not None:
            q = q * (case.scale * q.shape[-1] ** 0.5)
        mask = bool_mask(case)
        # one compiled step per block: several blocks for short lengths, few for long ones
        size = 4 if case.shape[2] < 100 else 64 if case.shape[2] < 1000 else 1024
        attend = functools.partial(attnax.memory_efficient_attention, block_size=size)
        return attend(q, k, v, mask=mask).swapaxes(1, 2)

    return attend


def ejkernel(case: Case) -> Attend:
    from ejkernel.modules import flash_attention
    from ejkernel.types.mask import MaskInfo

    options: dict[str, Any] = {}
    if (mask := bool_mask(case, "causal", "window", "segments")) is not None:
        options["mask_info"] = MaskInfo.from_attention_mask(mask)
    if case.segments is not None:
        if options:
            raise Absent("no mask in addition to segments")
        options["mask_info"] = MaskInfo.from_segments(*case.segments)
    B, T, S, N = case.shape[:4]
    bias = None if case.bias is None else np.broadcast_to(case.bias, (B, N, T, S))
    # documented as [num_heads, num_sinks]; a vector is [num_sinks], which all heads share
    sinks = None if case.sinks is None else case.sinks[:, None]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return flash_attention(
            q, k, v, bias, None, None, sinks, None, softmax_scale=case.scale,
            causal=case.causal, sliding_window=_both_sides(case), logits_soft_cap=case.softcap,
            platform="xla", **options,
        )  # fmt: skip

    return attend


def torch_sdpa(case: Case) -> Attend:
    import torch

    N, K = case.shape[3:5]
    mask = bool_mask(case, "causal") if case.bias is None else bool_mask(case)
    bias = None if case.bias is None else torch.tensor(case.bias)
    if bias is not None:
        if mask is not None:
            bias = torch.where(torch.tensor(mask), bias, -torch.inf)
        bias = bias.to(getattr(torch, case.dtype))
    attn_mask = torch.tensor(mask) if bias is None and mask is not None else bias

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask,
            is_causal=case.causal and bias is None, scale=case.scale, enable_gqa=N != K,
        )  # fmt: skip
        return out.transpose(1, 2)

    return attend


def torch_flex(case: Case) -> Attend:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, T, S, N, K, _ = case.shape
    seen = bool_mask(case)
    block_mask = None
    if seen is not None:
        table = torch.tensor(np.ascontiguousarray(np.broadcast_to(seen, (B, N, T, S))))
        block_mask = create_block_mask(
            lambda b, h, q, k: table[b, h, q, k], B, N, T, S, device="cpu"
        )
    bias = (
        None if case.bias is None else torch.tensor(np.broadcast_to(case.bias, (B, N, T, S)).copy())
    )

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if case.softcap is not None:
            score = case.softcap * torch.tanh(score / case.softcap)
        return score if bias is None else score + bias[b, h, q, k]

    changes = case.softcap is not None or bias is not None

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = flex_attention(
            q, k, v, score_mod=score_mod if changes else None, block_mask=block_mask,
            scale=case.scale, enable_gqa=N != K,
        )  # fmt: skip
        return out.transpose(1, 2)

    return attend


def x_transformers(case: Case) -> Attend:
    import torch
    from x_transformers.attend import Attend as Module

    module = Module(
        causal=case.causal,
        scale=case.scale,
        softclamp_logits=case.softcap is not None,
        logit_softclamp_value=case.softcap or 50.0,
    )
    B, T, S, N = case.shape[:4]
    mask = bool_mask(case, "causal")
    if mask is not None:
        mask = np.broadcast_to(mask, (B, N, T, S)).copy()
    bias = None if case.bias is None else torch.tensor(case.bias)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = module(q, k, v, mask=None if mask is None else torch.tensor(mask), attn_bias=bias)
        return out.transpose(1, 2)

    return attend


def onnxruntime(case: Case) -> Attend:
    """Build a single `Attention` node of opset 24, with a bool mask or a float bias."""
    onnx = imported("onnx")
    if case.dtype == "bfloat16":
        raise Absent("no bfloat16 arrays of NumPy")
    B, T, S, N, _, H = case.shape
    feeds = {name: _heads_first(x) for name, x in zip("qkv", case.inputs, strict=False)}
    mask = bool_mask(case, "causal")
    if case.bias is not None:
        bias = case.bias if mask is None else np.where(mask, case.bias, -np.inf)
        mask = bias.astype(case.inputs[0].dtype)
    if mask is not None:
        feeds["mask"] = np.ascontiguousarray(np.broadcast_to(mask, (B, N, T, S)))
    options = dict(scale=case.scale, softcap=case.softcap)
    node = onnx.helper.make_node(
        "Attention", [*feeds], ["y"], is_causal=int(case.causal),
        **{name: value for name, value in options.items() if value is not None},
    )  # fmt: skip
    session = onnx_session(node, feeds, (B, N, T, H), opset=24)
    return lambda q, k, v: session.run(["y"], feeds)[0].swapaxes(1, 2)


def _heads_first(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.swapaxes(1, 2))


COMMON = ("causal", "mask", "bias", "scale", "softcap")
NO_SOFTCAP = ("causal", "mask", "bias", "scale")
LIKE_JAX = ("causal", "window", "lengths", "mask", "bias", "scale")
IMPLEMENTATIONS: dict[str, Implementation] = {
    **{
        f"transformer_jax {name}": Implementation(
            "transformer_jax", OPTIONS, functools.partial(ours, name), in_jax
        )
        for name in ("xla", "blockwise", "native", "invariant")
    },
    "jax.nn": Implementation("jax", LIKE_JAX, jax_nn, in_jax),
    "flax.linen": Implementation("flax", ("mask", "bias", "scale"), flax_linen, in_jax),
    "flax.nnx": Implementation("flax", NO_SOFTCAP, flax_nnx, in_jax),
    "keras": Implementation("keras", COMMON, keras, in_jax),
    "tokamax": Implementation(
        "tokamax", (*LIKE_JAX, "softcap"), functools.partial(tokamax, "xla"), in_jax
    ),
    "tokamax xla_chunked": Implementation(
        "tokamax", (*LIKE_JAX, "softcap"), functools.partial(tokamax, "xla_chunked"), in_jax
    ),
    "attnax": Implementation("attnax", ("mask", "scale"), attnax, in_jax),
    "ejkernel": Implementation("ejkernel", OPTIONS, ejkernel, in_jax),
    "torch SDPA": Implementation("torch", NO_SOFTCAP, torch_sdpa, in_torch),
    "torch FlexAttention": Implementation("torch", COMMON, torch_flex, in_torch, gradient=False),
    "x-transformers": Implementation("x_transformers", COMMON, x_transformers, in_torch),
    "onnxruntime": Implementation("onnxruntime", COMMON, onnxruntime, in_numpy, gradient=False),
}
"""All implementations, keyed by name."""
