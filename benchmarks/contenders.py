"""Contenders in the attention benchmarks, each with its fastest layout and options.

`builders` returns, for each contender, a function that builds its call. If the contender is not
installed, cannot express a case, or does not fit into memory, it raises `Absent` with the reason.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from benchmarks import timing
from benchmarks.peers import Absent, imported, onnx_session, torch_and_device
from benchmarks.specs import AttentionCase, Direction
from transformer_jax import ALiBi, dot_product_attention, explain_attention
from transformer_jax.attention.api import Explanation

OURS = "ours"
WITHOUT = "ours without softcap and sinks"
IN_JAX = ("jax.nn", "jax.nn cudnn", "flax", "tokamax", "jax-linear-attention", "jax pallas")
FA3 = "FlashAttention-3"
PEERS = (*IN_JAX, FA3, "torch", "torch flash", "torch cudnn", "torch flex", "onnxruntime")
JLA_HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
"""(H, Hv) that jax-linear-attention 0.1.0 supports."""


@dataclass(frozen=True)
class Work:
    """Work that `begin` starts and `wait` completes. A call does both."""

    begin: Callable[[], Any]
    wait: Callable[[Any], tuple[Any, ...]]

    def __call__(self) -> tuple[Any, ...]:
        return self.wait(self.begin())


Attend = Callable[..., Any]
"""Function of the inputs of a case. In JAX, it is a `Partial` whose arrays are arguments of the
program. The compiler would fold a large constant mask, and creating the mask inside the program
would take time."""


def builders(
    case: AttentionCase, direction: Direction, options: argparse.Namespace
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return, for each contender, a function that builds its call or raises `Absent`."""

    def jax_call(attend: Attend, case: AttentionCase, *arguments: Any, runs: str) -> Any:
        return partial(_jax_call, case, direction, options, partial(attend, case, *arguments), runs)

    explained = explain(case)
    chosen = options.ours or explained.chosen
    calls = {OURS: jax_call(ours, case, options.ours, runs=chosen)}
    if case.softcap is not None or case.sinks:
        calls[WITHOUT] = jax_call(ours, plain(case), options.ours, runs=chosen)
    for name, reason in explained.items():
        same = (
            name == "pallas_unordered" and direction == "forward"
        )  # differs from pallas only in the backward pass
        if reason is None and name != chosen and not same:
            calls[f"{OURS} {name}"] = jax_call(ours, case, name, runs=name)
    calls["torch"] = partial(_torch_call, case, direction, options)
    calls["jax.nn"] = jax_call(jax_nn, case, "xla", runs="xla")
    if jax.default_backend() in ("gpu", "cuda"):
        calls["jax.nn cudnn"] = jax_call(jax_nn, case, "cudnn", runs="cudnn")
        for name in ("flash", "cudnn", "flex"):
            calls[f"torch {name}"] = partial(_torch_call, case, direction, options, name)
        calls["tokamax"] = jax_call(_tokamax, case, runs="tokamax")
        calls["jax-linear-attention"] = jax_call(_jax_linear_attention, case, runs="mosaic")
        calls[FA3] = jax_call(_flash_attention_3, case, runs="cuda")
        calls["jax pallas"] = jax_call(_jax_pallas, case, runs="pallas")
    else:
        calls["onnxruntime"] = partial(_onnxruntime_call, case, direction, options)
    calls["flax"] = jax_call(_flax, case, runs="xla")
    return calls


def lacking(case: AttentionCase, name: str) -> str:
    """Return the reason why `builders` has no such contender."""
    if name in PEERS:
        return f"does not run on {jax.default_backend()}"
    return explain(case).get(name.removeprefix(f"{OURS} ")) or f"is {OURS}, by another name"


def explain(case: AttentionCase) -> Explanation:
    """Return an explanation of which of our implementations can run."""
    inputs = jax.eval_shape(case.inputs)
    given = settings(case) | case.positions() | case.learned(*inputs[3:])
    return explain_attention(*inputs[:3], **given)


def plain(case: AttentionCase) -> AttentionCase:
    """Return the case without softcap and sinks."""
    return replace(case, softcap=None, sinks=False)


# In JAX


def ours(case: AttentionCase, name: str | None) -> Attend:
    """Return our attention with a named implementation or the choice of `None`."""
    fixed = dict(settings(case), implementation=name)
    arrays = dict(mask=fixed.pop("mask")) | case.positions()

    def attend(arrays, query, key, value, *more):
        arguments = fixed | case.learned(*more) | arrays
        return dot_product_attention(query, key, value, **arguments)

    return Partial(attend, arrays)


def settings(case: AttentionCase) -> dict[str, Any]:
    """Return the arguments of `dot_product_attention`, except the inputs of the case."""
    bias = ALiBi(case.slopes()) if case.bias == "alibi" else None
    return dict(mask=case.mask(), bias=bias, softcap=case.softcap)


def jax_nn(case: AttentionCase, implementation: str) -> Attend:
    """Return jax.nn's attention, with its own mask arguments if possible and a mask otherwise."""
    if case.softcap is not None or case.sinks:
        raise Absent("no softcap and no sinks")
    mask = None
    arguments = _lengths(case) | _window(case)
    arguments.update(is_causal=case.causal, implementation=implementation)
    if case.documents is not None:
        documents = replace(case, causal=False, window=None, padded=False)
        mask = jnp.asarray(documents.dense_mask()[:, None])
    attend = partial(jax.nn.dot_product_attention, **arguments)
    return Partial(lambda more, *inputs: attend(*inputs, **more), _arrays(case, mask))


def _flax(case: AttentionCase) -> Attend:
    import flax.linen as nn

    if case.heads != case.kv_heads:
        raise Absent("flax's function has no grouped heads")
    if case.softcap is not None or case.sinks:
        raise Absent("no softcap and no sinks")
    mask = jnp.asarray(case.seen()[:, None]) if case.causal or case.is_dense else None
    attend = partial(nn.dot_product_attention, deterministic=True)
    return Partial(lambda more, *inputs: attend(*inputs, **more), _arrays(case, mask))


def _tokamax(case: AttentionCase) -> Attend:
    try:
        import tokamax
    except ImportError as error:
        raise Absent("tokamax is not installed") from error
    if case.documents is not None:
        raise Absent("no documents, but as an array")
    if case.sinks:
        raise Absent("no sinks")
    if case.softcap is not None and case.bias is not None:
        raise Absent("its softcap is of the scores with their bias")
    arguments = _lengths(case) | _window(case)
    arguments.update(is_causal=case.causal, logits_soft_cap=case.softcap)
    arguments.update(implementation=("mosaic", "triton"))  # by default, it may silently use XLA
    attend = partial(tokamax.dot_product_attention, **arguments)
    return Partial(lambda more, *inputs: attend(*inputs, **more), _arrays(case))


def _jax_linear_attention(case: AttentionCase) -> Attend:
    """Return the library's softmax attention for Hopper with the reproducible backward pass."""
    try:
        from jla.ops.mosaic_gpu.attention import flash_attention
    except ImportError as error:
        raise Absent(f"jax-linear-attention: {error}") from error
    if not case.causal or case.queries != case.keys or case.padded:
        raise Absent("causal alone, of as many queries as keys, without lengths")
    if case.bias is not None or case.softcap is not None:
        raise Absent("no bias and no softcap")
    if (case.head_dim, case.value_dim) not in JLA_HEAD_DIMS:
        raise Absent("head dims 64, 128, or 192 with 128")
    ids = None if case.documents is None else jnp.asarray(case.document_ids())

    def attend(ids, query, key, value, *more):
        return flash_attention(
            query, key, value, segment_ids=ids, sliding_window=case.window, **case.learned(*more)
        )

    return Partial(attend, ids)


def _flash_attention_3(case: AttentionCase) -> Attend:
    """Return FlashAttention-3, whose backward pass adds in any order, from dew-flash-attn-cu13."""
    for folder in map(Path, sys.path):  # the library finds a CUDA runtime that is loaded
        for path in folder.glob("nvidia/*/lib/libcudart.so.13"):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    try:
        from dew_flash_attn import flash_mha, flash_mha_varlen
    except (ImportError, OSError) as error:
        raise Absent(f"dew-flash-attn-cu13: {timing.brief(error)}") from error
    if case.queries != case.keys or case.head_dim != case.value_dim or case.padded:
        raise Absent("as many queries as keys, values as wide as keys, and no lengths")
    if case.bias is not None or case.softcap is not None:
        raise Absent("no bias and no softcap")
    window = (-1, -1) if case.window is None else _window(case)["local_window_size"]
    fixed = dict(is_causal=case.causal, window_size=window)
    if case.documents is None:
        attend = partial(flash_mha, **fixed)
        return Partial(lambda _, *inputs: attend(*inputs[:3], **case.learned(*inputs[3:])), None)
    ids = case.document_ids()
    first = np.diff(ids, axis=1, prepend=-1).ravel() != 0  # of each document, in all rows
    starts = np.append(np.flatnonzero(first), ids.size)
    packed = partial(flash_mha_varlen, max_seqlen=int(np.diff(starts).max()), **fixed)

    def attend_packed(starts, *inputs):
        flat = (x.reshape(-1, *x.shape[2:]) for x in inputs[:3])
        out = packed(*flat, starts, **case.learned(*inputs[3:]))
        return out.reshape(inputs[0].shape)

    return Partial(attend_packed, jnp.asarray(starts, jnp.int32))


def _jax_pallas(case: AttentionCase) -> Attend:
    """Return JAX's Pallas-Triton kernel, because its Mosaic kernel has no causal backward pass."""
    try:
        from jax.experimental.pallas.ops.gpu import attention
    except ImportError as error:
        raise Absent("jax has no Pallas kernel here") from error
    if case.heads != case.kv_heads or case.window is not None or case.padded:
        raise Absent("no grouped heads, windows or lengths")
    if case.bias is not None or case.softcap is not None or case.sinks:
        raise Absent("no bias, softcap or sinks")
    ids = None if case.documents is None else jnp.asarray(case.document_ids())
    attend = partial(attention.mha, sm_scale=1 / math.sqrt(case.head_dim), causal=case.causal)
    return Partial(lambda ids, *inputs: attend(*inputs, ids), ids)


def _lengths(case: AttentionCase) -> dict[str, Any]:
    return dict(key_value_seq_lengths=case.valid().sum(axis=1)) if case.padded else {}


def _window(case: AttentionCase) -> dict[str, Any]:
    if case.window is None:
        return {}
    return dict(local_window_size=(case.window - 1, 0 if case.causal else case.window - 1))


def _arrays(case: AttentionCase, mask: jax.Array | None = None) -> dict[str, jax.Array]:
    """Return the mask and the ALiBi bias as arrays, which all of these functions require."""
    found = {} if mask is None else dict(mask=mask)
    return found | (dict(bias=_alibi(case, case.dtype)) if case.bias == "alibi" else {})


def _alibi(case: AttentionCase, dtype: str) -> jax.Array:  # [1, N, T, S]
    def make(slopes):
        positions = (jnp.arange(n, dtype=jnp.int32) for n in (case.queries, case.keys))
        return ALiBi(slopes).materialize(*positions).astype(dtype)

    return jax.jit(make)(case.slopes())  # one program, because a float32 copy may not fit


def _jax_call(
    case: AttentionCase,
    direction: Direction,
    options: argparse.Namespace,
    build: Callable[[], Attend],
    runs: str,
) -> Callable[[], Any]:
    if runs == "xla":
        # the forward pass has scores and their exponentials, and the backward pass also has their
        # gradients
        needed = case.score_bytes() * (2 if direction == "forward" else 4)
        if needed > options.memory * 2**30:
            raise Absent(f"materialised scores need {needed / 2**30:.1f} GiB")
    attend = build()
    inputs = case.inputs()
    cotangent = cotangent_of(case)
    run: Callable[..., Any]
    if direction == "forward":
        run = partial(jax.jit(lambda attend, *inputs: attend(*inputs)), attend, *inputs)
    elif direction == "backward":
        _, pull = jax.jit(lambda attend, *inputs: jax.vjp(attend, *inputs))(attend, *inputs)
        run = partial(jax.jit(lambda pull, cotangent: pull(cotangent)), pull, cotangent)
    else:
        run = partial(jax.jit(with_gradients), attend, cotangent, *inputs)

    def wait(begun: Any) -> tuple[Any, ...]:
        result = jax.block_until_ready(begun)
        return result if isinstance(result, tuple) else (result,)

    return Work(run, wait)


def cotangent_of(case: AttentionCase) -> jax.Array:
    """Draw a gradient of the output from the same distribution as the inputs."""
    shape = case.batch, case.queries, case.heads, case.value_dim
    return jax.random.normal(jax.random.key(3), shape, case.dtype)


def with_gradients(attend: Attend, cotangent: jax.Array, *inputs: jax.Array) -> tuple[Any, ...]:
    """Return the output and the gradients of all inputs."""
    out, pull = jax.vjp(attend, *inputs)
    return (out, *pull(cotangent.astype(out.dtype)))


# In torch


def _torch_call(
    case: AttentionCase, direction: Direction, options: argparse.Namespace, name: str = ""
) -> Callable[[], Any]:
    """Return torch's attention in its layout [B, N, T, H]. The transposition is not timed.

    `name` selects one of its kernels ("flash", "cudnn", or "flex"). By default, torch chooses one.
    """
    torch, device = torch_and_device()
    attend = (
        _flex(torch, case, device) if name == "flex" else _sdpa(torch, case, device, options, name)
    )

    def tensor(x: jax.Array, transposed: bool = True) -> Any:
        given = torch.from_numpy(np.array(x, np.float32)).to(device, getattr(torch, case.dtype))
        return given.transpose(1, 2).contiguous() if transposed else given

    inputs = [tensor(x, index < 3) for index, x in enumerate(case.inputs())]
    if case.bias == "dense" and name != "flex":
        inputs[3] = _hiding(torch, case, inputs[3])
    cotangent = tensor(cotangent_of(case))
    if direction != "forward":
        inputs = [x.requires_grad_() for x in inputs]
    once = attend(*inputs) if direction == "backward" else None

    def begin():
        if direction == "forward":
            with torch.no_grad():
                outputs, gradients = (attend(*inputs),), ()
        else:
            out = attend(*inputs) if once is None else once
            outputs = (out.detach(),) if once is None else ()
            gradients = torch.autograd.grad(out, inputs, cotangent, retain_graph=once is not None)
        return _Torch((*outputs, *gradients[:3]), gradients[3:])

    def wait(begun: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        return begun

    return Work(begin, wait)


def _sdpa(
    torch: Any, case: AttentionCase, device: str, options: argparse.Namespace, name: str
) -> Attend:
    """Return scaled_dot_product_attention, with all noncausal masks as a float bias."""
    if case.softcap is not None or case.sinks:
        raise Absent("no softcap and no sinks")
    attend = torch.nn.functional.scaled_dot_product_attention
    if name:
        attend = _one_kernel(torch, attend, name)
    attend = partial(attend, enable_gqa=case.heads != case.kv_heads)
    if not case.is_dense and case.bias is None:
        if not (case.cached and case.causal):
            return partial(attend, is_causal=case.causal)
        if case.queries == 1:  # the last query sees all keys
            return attend
    if name == "flash":
        raise Absent("takes no mask and no bias as an array")
    rows = max(map(len, case.ranges()))
    if case.bias == "dense" and rows > 1:
        raise Absent("its bias says the mask too, here of each row another")
    size = rows * case.queries * case.keys
    needed = size * (
        3 if case.bias is None else 3 + 8 * case.heads
    )  # temporary memory to create it
    if needed > options.memory * 2**30:
        raise Absent(f"the mask or bias as an array needs {needed / 2**30:.1f} GiB")
    if case.bias is None:
        return partial(attend, attn_mask=torch.from_numpy(case.seen()[:, None]).to(device))
    if case.bias == "dense":
        return attend
    bias = torch.from_numpy(np.array(_alibi(case, "float32"))).to(device)
    return partial(attend, attn_mask=_hiding(torch, case, bias.to(getattr(torch, case.dtype))))


def _hiding(torch: Any, case: AttentionCase, bias: Any) -> Any:
    """Return the bias, with -inf for hidden pairs."""
    return bias.masked_fill(~torch.from_numpy(case.seen()[:, None]).to(bias.device), -math.inf)


def _one_kernel(torch: Any, attend: Attend, name: str) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name]

    def only(*inputs, **arguments):
        with sdpa_kernel(backend):
            return attend(*inputs, **arguments)

    return only


def _flex(torch: Any, case: AttentionCase, device: str) -> Attend:
    """Return FlexAttention, compiled for this case, with a block mask.

    A sink multiplies the result without a sink by l / (l + e^sink).
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    torch._dynamo.reset()  # otherwise, the eighth case would run uncompiled
    ids = valid = slopes = None
    if case.documents is not None:
        ids = torch.from_numpy(case.document_ids()).to(device)
    if case.padded:
        valid = torch.from_numpy(case.valid()).to(device)
    if case.bias == "alibi":
        slopes = torch.from_numpy(np.array(case.slopes())).to(device)

    def sees(b, h, q, k):
        result = q >= k if case.causal else q == q
        if case.window is not None:
            # avoid differences of positions, which would be integer arrays over all pairs
            result = result & (q - case.window < k) & (q + case.window > k)
        if ids is not None:
            result = result & (ids[b, q] == ids[b, k])
        return result if valid is None else result & valid[b, k]

    blocks = create_block_mask(sees, case.batch, None, case.queries, case.keys, device=device)

    def attend(query, key, value, *more):
        learned = case.learned(*more)

        def change(score, b, h, q, k):
            if case.softcap is not None:
                score = case.softcap * torch.tanh(score / case.softcap)
            if slopes is not None:
                score = score - slopes[h] * (q - k).abs()
            return score + learned["bias"][0, h, q, k] if "bias" in learned else score

        unchanged = case.softcap is None and case.bias is None
        arguments = dict(block_mask=blocks, enable_gqa=case.heads != case.kv_heads)
        arguments["score_mod"] = None if unchanged else change
        if not case.sinks:
            return flex_attention(query, key, value, **arguments)
        arguments["return_aux"] = AuxRequest(lse=True)
        out, found = flex_attention(query, key, value, **arguments)
        share = torch.sigmoid(found.lse - learned["sinks"][:, None].float())
        return (out * share[..., None]).to(out.dtype)

    return torch.compile(attend, dynamic=False)


# In onnxruntime


def _onnxruntime_call(
    case: AttentionCase, direction: Direction, options: argparse.Namespace
) -> Callable[[], Any]:
    """Return GroupQueryAttention, or ONNX's Attention if the former cannot express the case."""
    if direction != "forward":
        raise Absent("has no gradient")
    if case.dtype != "float32":
        raise Absent("computes in float32 on a processor")
    if case.sinks:
        raise Absent("no sinks")
    if case.softcap is not None and case.bias is not None:
        raise Absent("its softcap is of the scores with their bias")
    scores = case.score_bytes() + max(map(len, case.ranges())) * case.queries * case.keys
    if scores > options.memory * 2**30:
        raise Absent(f"materialised scores need {scores / 2**30:.1f} GiB")
    onnx = imported("onnx")
    square = case.queries == case.keys and case.head_dim == case.value_dim
    simple = case.causal and case.bias is None and case.documents is None and not case.padded
    build = _group_query_attention if square and simple else _onnx_attention
    node, feeds, shape = build(onnx, case, [np.array(x, np.float32) for x in case.inputs()])
    session = onnx_session(node, feeds, shape, opset=23)
    return lambda: _Onnx(session.run(["y"], feeds)[0], case.heads)


def _group_query_attention(onnx: Any, case: AttentionCase, inputs: list[np.ndarray]) -> Any:
    """Return causal self-attention with merged heads, and window and softcap as attributes."""
    feeds = {
        name: x.reshape(case.batch, case.keys, -1)
        for name, x in zip(("q", "k", "v"), inputs, strict=True)
    }
    feeds["last"] = np.full(case.batch, case.keys - 1, np.int32)
    feeds["all"] = np.array([case.keys], np.int32)
    names = ["q", "k", "v", "", "", "last", "all"]  # no cached keys
    node = onnx.helper.make_node(
        "GroupQueryAttention", names, ["y", "keys", "values"], domain="com.microsoft",
        num_heads=case.heads, kv_num_heads=case.kv_heads, softcap=case.softcap or 0.0,
        local_window_size=case.window or -1,
    )  # fmt: skip
    return node, feeds, feeds["q"].shape


def _onnx_attention(onnx: Any, case: AttentionCase, inputs: list[np.ndarray]) -> Any:
    """Return ONNX's Attention with heads first and all noncausal masks as a float bias."""
    feeds = {
        name: np.ascontiguousarray(x.swapaxes(1, 2))
        for name, x in zip(("q", "k", "v"), inputs, strict=False)
    }
    if case.bias is not None:
        bias = inputs[3] if case.bias == "dense" else np.array(_alibi(case, "float32"))
        feeds["mask"] = np.where(case.seen()[:, None], bias, -np.inf).astype(np.float32)
    elif case.is_dense or case.cached:  # with the flag, the first query sees only one key
        feeds["mask"] = case.seen()[:, None]
    flag = int(case.causal and "mask" not in feeds)
    node = onnx.helper.make_node(
        "Attention", list(feeds), ["y"], is_causal=flag, softcap=case.softcap or 0.0
    )
    return node, feeds, (case.batch, case.heads, case.queries, case.value_dim)


@dataclass(frozen=True)
class _Onnx:
    """Result of onnxruntime, which is converted to our layout when it is read."""

    array: np.ndarray  # [B, N, T, H] or [B, T, N * H]
    heads: int

    def __iter__(self) -> Iterator[np.ndarray]:
        merged = self.array.ndim == 3
        yield (
            self.array.reshape(*self.array.shape[:2], self.heads, -1)
            if merged
            else self.array.swapaxes(1, 2)
        )


@dataclass(frozen=True)
class _Torch:
    """Results of torch, which are converted to arrays when they are read."""

    heads: Sequence[Any]  # [B, N, T, H], returned as [B, T, N, H]
    others: Sequence[Any]

    def __iter__(self) -> Iterator[np.ndarray]:
        arrays = (x.float().cpu().numpy() for x in (*self.heads, *self.others))
        return (x.swapaxes(1, 2) if i < len(self.heads) else x for i, x in enumerate(arrays))
