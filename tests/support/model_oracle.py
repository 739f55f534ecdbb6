"""Reference models from the papers' formulas, in NumPy float64 without library code.

Tests compare every configuration of the library with this file. It uses only the names of the
parameters and of the config's fields, and reads sizes from the parameters. It computes one
sequence, one head and, if that is clearest, one pair of positions at a time.

    block     pre: x + f(n(x))      post: n(x + f(x))      sandwich: x + m(f(n(x)))
              output: x + n(f(x))
              parallel: x + f(n(x)) + g(m(x)), with n = m if the norm is shared
    head      softmax over k of  cap(scale * <q, k>) + bias(q, k), and exp(sink) in the denominator
    q, k, v   x W + b, optionally RMS-normalised (q, k), then rotated (q, k)
    Shaw      adds scale * <q, a[k - q]> to the bias, and sum_k weight * c[k - q] to the output
    norm      scale, or 1 + scale, times the normalised
    logits    (scale x) E^T + b, capped
    pooled    act(P h + p) of the first token
    inputs    W x + b of vectors; of patches, row by row, after a class token; gelu(conv) of frames

Sources: Vaswani et al. 2017, Shaw et al. 2018, Devlin et al. 2019, Radford et al. 2019, Zhang and
Sennrich 2019, Raffel et al. 2020, Shazeer 2019 and 2020, Henry et al. 2020 (QK-norm), Su et al.
2021, Press et al. 2022, Lewis et al. 2020 (separate tables and norms of the two sides), Gemma Team
2024 (caps, sandwich norm, unit offset), Gemma Team 2025 (rotary base of windows), Xiao et al. 2024
(both kinds of sinks).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Params = Mapping[str, Any]
Visible = Callable[[int, int], bool]  # arguments: two indices into the sequence


class Sequence(NamedTuple):
    """Positions in one row: for attention and, counted within a document, for the embedding."""

    place: list[int]  # negative for padding
    token_place: list[int]
    segment: list[int]


def forward(
    config: Any,
    params: Params,
    tokens: np.ndarray,  # [B, T]
    *,
    positions: np.ndarray | None = None,  # [B, T]
    segments: np.ndarray | None = None,  # [B, T]
    types: np.ndarray | None = None,  # [B, T]
    source: np.ndarray | None = None,  # [B, S]
    source_positions: np.ndarray | None = None,  # [B, S]
    record: list[np.ndarray] | None = None,
    hidden: list[np.ndarray] | None = None,
) -> np.ndarray:  # [B, T, V]
    """Return the logits of any of the three kinds of model; those of padding have no meaning.

    For each row, the weights [N, T, S] of every attention of the last stack are appended to
    `record`: block by block, self-attention before cross-attention. An array with the stream
    [T, D] before each block of this stack, and with the stack's output, is appended to `hidden`.
    """
    params = _double(params)
    embed = params["embed"]
    rows = []
    for b in range(len(tokens)):
        row = _sequence(tokens.shape[1], _row(positions, b), _row(segments, b))
        if config.kind == "encoder":
            x = _encode(config, params, tokens[b], row, _row(types, b), record, hidden)
            if config.masked_token_head:
                x = _affine(x, params["head_dense"])
                x = _norm(config, params["head_norm"], ACTIVATIONS[config.activation](x))
        else:
            memory = memory_row = None
            if config.kind == "encoder-decoder":
                assert source is not None
                x, memory_row = _read(config, params, source[b], _row(source_positions, b))
                memory = _encode(config, params, x, memory_row, None)
            side = "target_" if config.kind == "encoder-decoder" else ""
            x = _embed(config, embed, tokens[b], row.token_place, None, side)
            p = params["decoder"]
            x = _stack(config, p, x, row, True, memory, memory_row, record, hidden)
        table = embed["tokens"] if config.tie_embeddings else embed["output"]
        logits = (x if config.logit_scale is None else x * config.logit_scale) @ table.T
        if config.logit_bias:
            logits = logits + embed["bias"]
        rows.append(_cap(logits, config.logit_softcap))
    return np.stack(rows)


def pool(
    config: Any,
    params: Params,
    tokens: np.ndarray,
    *,
    positions: np.ndarray | None = None,
    types: np.ndarray | None = None,
) -> np.ndarray:  # [B, D] or [B, T, D]
    """Return act(P h + p) of the first token that is not padding, of the mean, or of each token."""
    params = _double(params)
    rows = []
    for b in range(len(tokens)):
        read, row = _read(config, params, tokens[b], _row(positions, b))
        x = _encode(config, params, read, row, _row(types, b))
        real = x[np.asarray(row.place) >= 0]
        x = {"first": real[:1], "mean": real.mean(axis=0)[None], "each": x}[config.pooler_reads]
        if config.pooler == "transform":
            x = _affine(x, params["head_dense"])
            x = _norm(config, params["head_norm"], ACTIVATIONS[config.activation](x))
        else:
            x = _affine(x, params["pooler"])
            x = {**ACTIVATIONS, None: np.tanh, "tanh": np.tanh}[config.pooler](x)
        rows.append(x if config.pooler_reads == "each" else x[0])
    return np.stack(rows)


def classify(config: Any, params: Params, tokens: np.ndarray, **arguments) -> np.ndarray:  # [B, C]
    """Return W x + w of the pooled vectors."""
    pooled = pool(config, params, tokens, **arguments)
    flat = pooled.reshape(-1, pooled.shape[-1])
    return _affine(flat, _double(params)["classifier"]).reshape(*pooled.shape[:-1], -1)


def encode(
    config: Any, params: Params, inputs: np.ndarray, *, positions: np.ndarray | None = None
) -> list[np.ndarray]:  # of each row [T', D]
    """Return the hidden states of an encoder, without those of padded frames."""
    params = _double(params)
    rows = []
    for b in range(len(inputs)):
        x, row = _read(config, params, inputs[b], _row(positions, b))
        rows.append(_encode(config, params, x, row, None))
    return rows


def _read(config, params: Params, x: np.ndarray, positions) -> tuple[np.ndarray, Sequence]:
    """Return the tokens of a row, or the vectors computed from it, and their positions."""
    kind = type(config.inputs).__name__
    if kind == "NoneType":
        return x, _sequence(len(x), positions, None)
    p, x = params["inputs"], x.astype(np.float64)
    if kind == "Patches":
        made = _patches(config.inputs, p, x)
        return made, _sequence(len(made), positions, None)
    if kind == "Vectors":
        return _affine(x, p["projection"]), _sequence(len(x), positions, None)
    if positions is not None:
        x = x[positions >= 0]
    for i in range(config.inputs.layers):
        x = _convolution(p[f"conv_{i}"], x, config.inputs.stride)
    return x, _sequence(len(x), None, None)


def _patches(inputs, p: Params, image: np.ndarray) -> np.ndarray:
    made = [p["class_token"]] if inputs.class_token else []
    for top in range(0, inputs.height, inputs.size):
        for left in range(0, inputs.width, inputs.size):
            patch = image[top : top + inputs.size, left : left + inputs.size]
            made.append(np.tensordot(patch, p["projection"]["kernel"], 3) + p["projection"]["bias"])
    return np.stack(made)


def _convolution(p: Params, x: np.ndarray, stride: int) -> np.ndarray:
    """Return gelu(sum_k W_k x_(s t + k - (K - 1) / 2) + b) for every t with frame s t in x."""
    kernel, made = p["kernel"], []
    for middle in range(0, len(x), stride):
        y = p["bias"].copy()
        for k in range(len(kernel)):
            at = middle + k - len(kernel) // 2
            if 0 <= at < len(x):
                y += x[at] @ kernel[k]
        made.append(_gelu(y))
    return np.stack(made)


def _encode(config, params, tokens, row: Sequence, types, record=None, hidden=None) -> np.ndarray:
    x = _embed(config, params.get("embed", {}), tokens, row.token_place, types)
    return _stack(config, params["encoder"], x, row, False, None, None, record, hidden)


def kind_of(positions) -> str:
    """Return the name of the config's kind of positions: Learned, Rope, ..., NoneType."""
    return type(positions).__name__


def _embed(config, params: Params, tokens, token_place: list[int], types, side="") -> np.ndarray:
    if tokens.ndim == 2:
        x = tokens.copy()
    else:
        own = side == "" and config.source_vocab_size is not None
        x = params["source_tokens" if own else "tokens"][tokens]
        x = x * math.sqrt(x.shape[1]) if config.scale_embeddings else x
        x = x if config.embedding_scale is None else x * config.embedding_scale
    width = x.shape[1]
    for i, place in enumerate(token_place):
        if place < 0:
            continue  # values of padding must not affect other tokens
        if kind_of(config.positions) == "Learned":
            x[i] += params[f"{side}positions"][config.positions.offset + place]
        if kind_of(config.positions) == "Sinusoidal":
            angles = sinusoid(place + config.positions.offset, width, config.positions.base)
            if config.positions.layout == "halves":
                angles = np.concatenate([angles[0::2], angles[1::2]])
            x[i] += angles
    if config.type_vocab_size is not None:
        x = x + params["types"][np.zeros_like(tokens) if types is None else types]
    x = _norm(config, params[f"{side}norm"], x) if config.embedding_norm else x
    return _affine(x, params["projection"]) if config.embedding_dim is not None else x


def _stack(
    config, params: Params, x, row: Sequence, causal: bool, memory, memory_row, record, hidden=None
):
    def window_of(layer: int) -> int | None:
        window = config.window
        return window[layer % len(window)] if isinstance(window, tuple) else window

    def visible(i: int, j: int, layer: int) -> bool:
        if row.place[j] < 0 or row.segment[i] != row.segment[j]:
            return False
        ahead = row.place[j] - row.place[i]
        if causal and ahead > 0:
            return False
        window = window_of(layer)
        return window is None or abs(ahead) < window or row.token_place[j] < config.sink_tokens

    def position_bias(i: int, j: int, n: int, heads: int) -> float:
        ahead = row.place[j] - row.place[i]
        if kind_of(config.positions) == "Alibi":
            return -alibi_slope(n, heads) * abs(ahead)
        if "relative_bias" in params:
            table = params["relative_bias"]
            longest = config.positions.max_distance
            return table[t5_bucket(ahead, len(table), longest, two_sided=not causal), n]
        return 0.0

    stream = []
    depth = sum(name.startswith("block_") for name in params)
    for i in range(config.num_layers if config.share_layers else depth):
        block = params["block_0" if config.share_layers else f"block_{i}"]
        stream.append(x)

        def attend(x, p=block, layer=i):
            seen = partial(visible, layer=layer)
            p, kind = p["attention"], config.positions
            far = kind_of(kind) != "Rope" or window_of(layer) is None
            base = None if far else kind.window_base
            pattern = getattr(kind, "pattern", None) or (True,)
            kind = kind if pattern[layer % len(pattern)] else None
            return _attention(config, p, x, x, row, row, seen, position_bias, kind, record, base)

        def cross(x, p=block):
            def seen(_, j):
                return memory_row.place[j] >= 0

            p = p["cross_attention"]
            return _attention(config, p, x, memory, row, memory_row, seen, None, None, record)

        def feed_forward(x, p=block):
            return _feed_forward(config, p["feed_forward"], x)

        branches = {"attention": attend, "cross_attention": cross, "feed_forward": feed_forward}
        if memory is None:
            del branches["cross_attention"]
        if config.d_ff == 0:
            del branches["feed_forward"]
        if config.norm_order.startswith("parallel"):
            shared = config.norm_order == "parallel_shared"
            norms = {name: block["norm" if shared else f"norm_{name}"] for name in branches}
            scale = 1.0 if config.residual_scale is None else config.residual_scale
            x = x + scale * sum(f(_norm(config, norms[name], x)) for name, f in branches.items())
            continue
        for name, function in branches.items():
            x = _branch(config, block, name, x, function)
    x = x if config.norm_order == "post" else _norm(config, params["norm"], x)
    if hidden is not None:
        hidden.append(np.stack([*stream, x]))
    return x


def _branch(config, block: Params, name: str, x: np.ndarray, function) -> np.ndarray:
    scale = 1.0 if config.residual_scale is None else config.residual_scale
    if config.norm_order == "output":
        return x + scale * _norm(config, block[f"out_norm_{name}"], function(x))
    if not config.first_norm and name == "attention" and "norm_attention" not in block:
        return x + scale * function(x)
    inner = block[f"norm_{name}"]
    if config.norm_order == "post":
        return _norm(config, inner, x + scale * function(x))
    y = function(_norm(config, inner, x))
    if config.norm_order == "sandwich":
        y = _norm(config, block[f"out_norm_{name}"], y)
    return x + scale * y


def _attention(
    config, p: Params, x, context, row, context_row, visible, position_bias, kind, record, base=None
):
    q, k, v = _affine(x, p["query"]), _affine(context, p["key"]), _affine(context, p["value"])
    if config.qk_norm and not config.qk_norm_after_rope:
        q, k = _normalised(config, q, p, "query"), _normalised(config, k, p, "key")
    if kind_of(kind) == "Rope":
        q = _rotate(q, row.token_place, kind, base)
        k = _rotate(k, context_row.token_place, kind, base)
    if config.qk_norm_after_rope:
        q, k = _normalised(config, q, p, "query"), _normalised(config, k, p, "key")
    queries, heads, width = q.shape
    group = heads // k.shape[1]
    scale = 1 / math.sqrt(width) if config.attention_scale is None else config.attention_scale
    out = np.zeros((queries, heads, v.shape[2]))
    weights = np.zeros((heads, queries, len(k)))
    for n in range(heads):
        for i in range(queries):
            seen = [j for j in range(len(k)) if visible(i, j)]
            if not seen:
                continue
            scores, values = [], []
            for j in seen:
                score = _cap(scale * (q[i, n] @ k[j, n // group]), config.attention_softcap)
                value = v[j, n // group]
                if position_bias is not None:
                    score = score + position_bias(i, j, n, heads)
                if kind_of(kind) == "Shaw":
                    clip = (len(p["shaw_key"]) - 1) // 2
                    at = max(-clip, min(clip, row.place[j] - row.place[i])) + clip
                    score = score + scale * (q[i, n] @ p["shaw_key"][at])
                    value = value + p["shaw_value"][at]
                scores.append(score)
                values.append(value)
            total = np.exp(scores)
            sink = math.exp(p["sinks"][n]) if config.attention_sinks else 0.0
            weights[n, i, seen] = total / (total.sum() + sink)
            out[i, n] = weights[n, i, seen] @ np.stack(values)
    if record is not None:
        record.append(weights)
    if config.attention_gate:
        out = out / (1 + np.exp(-_affine(x, p["gate"])))
    return _affine(out, p["out"])


def _normalised(config, x: np.ndarray, p: Params, name: str) -> np.ndarray:  # [T, N, H]
    scale = config.norm_unit_offset + p[f"{name}_scale"]
    bias = p[f"{name}_norm_bias"] if config.qk_norm_bias else 0.0
    rows = x.reshape(len(x), -1) if config.qk_norm_over == "heads" else x
    if config.qk_norm_kind == "layernorm":
        rows = rows - rows.mean(axis=-1, keepdims=True)
    return (_rms(rows, config.norm_eps) * scale + bias).reshape(x.shape)


def _xielu(x: np.ndarray, p: Params) -> np.ndarray:
    positive, negative = (np.log1p(np.exp(p[f"alpha_{side}"])) for side in ("positive", "negative"))
    left = (np.exp(np.minimum(x, 0)) - 1 - x) * (0.5 + negative)
    return np.where(x > 0, positive * x * x, left) + 0.5 * x


def _feed_forward(config, p: Params, x: np.ndarray) -> np.ndarray:
    if config.activation == "xielu":
        return _affine(_xielu(_affine(x, p["up"]), p), p["down"])
    act = ACTIVATIONS[config.activation]
    if config.glu:
        gate, up = _affine(x, p["gate"]), _affine(x, p["up"])
        if (limit := config.glu_limit) is not None:
            gate, up = np.minimum(gate, limit), np.maximum(np.minimum(up, limit), -limit)
        return _affine(act(gate) * (up + config.glu_unit_offset), p["down"])
    return _affine(act(_affine(x, p["up"])), p["down"])


def _affine(x: np.ndarray, p: Params) -> np.ndarray:
    """Return x W + b, contracting the trailing axes of x with the leading axes of W."""
    kernel = p["kernel"]
    inputs = x.reshape(len(x), -1)
    split = next(i for i in range(1, kernel.ndim) if math.prod(kernel.shape[:i]) == inputs.shape[1])
    y = inputs @ kernel.reshape(inputs.shape[1], -1)
    y = y.reshape(len(x), *kernel.shape[split:])
    return y + p["bias"] if "bias" in p else y


def _norm(config, p: Params, x: np.ndarray) -> np.ndarray:
    scale = config.norm_unit_offset + p["scale"]
    if config.norm == "rmsnorm":
        return _rms(x, config.norm_eps) * scale
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    y = centred / deviation * scale
    return y + p["bias"] if "bias" in p else y


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def _rotate(x: np.ndarray, places: list[int], rope: Any, base=None) -> np.ndarray:  # [T, N, H]
    """Rotate pair k by place * base^(-2k/dims), as one complex multiplication.

    Linear scaling applies only to the base of `rope`, not to a separate `base`.
    """
    assert rope.scaling in (None, "linear"), "other frequencies are not part of this oracle"
    base, stretch = (rope.base, rope.factor) if base is None else (base, 1.0)
    dims = x.shape[-1] if rope.dims is None else rope.dims
    y = x.copy()
    for k in range(dims // 2):
        one, two = (2 * k, 2 * k + 1) if rope.pairing == "interleaved" else (k, k + dims // 2)
        for i, place in enumerate(places):
            turn = np.exp(1j * place / stretch * base ** (-2 * k / dims))
            z = (x[i, :, one] + 1j * x[i, :, two]) * turn
            y[i, :, one], y[i, :, two] = z.real, z.imag
    return y


def sinusoid(place: int, width: int, base: float) -> np.ndarray:
    angles = [place / base ** (2 * i / width) for i in range(width // 2)]
    return np.array([f(a) for a in angles for f in (math.sin, math.cos)])


def alibi_slope(n: int, heads: int) -> float:
    """Return 2^(-8 (n + 1) / N); other N take the rest from the next power of two, as published."""
    power = 2 ** int(math.log2(heads))
    if n < power:
        return 2 ** (-8 * (n + 1) / power)
    return 2 ** (-8 * (2 * (n - power) + 1) / (2 * power))


def t5_bucket(ahead: int, buckets: int, longest: int, *, two_sided: bool) -> int:
    """Return a bucket: half of them are exact distances, the rest grow logarithmically."""
    offset = 0
    if two_sided:
        buckets //= 2
        offset = buckets if ahead > 0 else 0
        distance = abs(ahead)
    else:
        distance = max(0, -ahead)
    exact = buckets // 2
    if distance >= exact:
        grown = math.log(distance / exact) / math.log(longest / exact) * (buckets - exact)
        distance = min(exact + math.floor(grown), buckets - 1)
    return offset + distance


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.where(x > 0, x * x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
}


def _cap(x, limit: float | None):
    return x if limit is None else limit * np.tanh(x / limit)


def _sequence(length: int, positions, segments) -> Sequence:
    place = list(range(length)) if positions is None else [int(p) for p in positions]
    if segments is None:
        return Sequence(place, place, [0] * length)
    segment = [int(s) for s in segments]
    within: list[int] = []
    for i, s in enumerate(segment):
        within.append(within[-1] + 1 if i and segment[i - 1] == s else 0)
    return Sequence(place, within, segment)


def _row(array: np.ndarray | None, b: int) -> np.ndarray | None:
    return None if array is None else np.asarray(array)[b]


def _double(params: Params) -> dict[str, Any]:
    return {
        name: _double(value) if isinstance(value, Mapping) else np.asarray(value, np.float64)
        for name, value in params.items()
    }


def randomised(params: Params, rng: np.random.Generator) -> dict[str, Any]:
    """Return random parameters, so that a leaf that the library ignores changes the result.

    Matrices keep activations at unit variance, so that every branch affects the logits.
    """
    out: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            out[name] = randomised(value, rng)
            continue
        shape = value.shape
        noise = rng.standard_normal(shape)
        if "scale" in name:
            leaf = 1 + 0.3 * noise
        elif name == "kernel":
            fan_in = math.prod(shape[:-1]) if len(shape) < 3 else shape[0]
            leaf = noise / math.sqrt(fan_in)
        elif name in ("bias", "positions", "target_positions", "types", "shaw_key", "shaw_value"):
            leaf = 0.4 * noise
        else:
            leaf = noise * (0.3 if name in ("tokens", "source_tokens", "output") else 1.0)
        out[name] = leaf.astype(np.float32)
    return out
