"""Keys of config.json that many decoder families share.

They define sizes, RoPE and its scaling, and the windows of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from transformer_jax.config import ModelConfig, Rope, RopeScaling
from transformer_jax.pretrained.families import keys as k
from transformer_jax.untrusted_files import JsonObject

# Sizes


def decoder_sizes(
    kv_heads: int | None = None,  # default of num_key_value_heads; None means num_attention_heads
    tied: bool = False,
    head_dim: int | None = None,
) -> list[k.Entry]:
    """List the sizes and other keys of nearly all decoders. The arguments are default values."""
    width = k.Key("head_dim", "head_dim", k.integer, None, optional=True)
    if head_dim is not None:
        width = k.Key("head_dim", "head_dim", k.integer_or_default, head_dim)
    return [
        *k.standard_sizes(),
        k.Key(
            "num_key_value_heads", "num_kv_heads", k.optional_integer, kv_heads, null="num_heads"
        ),
        width,
        k.Key("tie_word_embeddings", "tie_embeddings", k.flag, tied),
        k.Key("attention_dropout", "attention_dropout", k.rate, 0.0),
    ]


def gated(
    kv_heads: int | None = None,
    tied: bool = False,
    head_dim: int | None = None,
    *,
    eps: float = 1e-6,
) -> list[k.Entry]:
    """List the keys of Llama and its descendants, which have RMSNorm and gates with silu."""
    return [
        *decoder_sizes(kv_heads, tied, head_dim),
        k.Fixed(norm="rmsnorm", glu=True, use_bias=False),
        k.Key("rms_norm_eps", "norm_eps", k.positive, eps),
        k.Key("hidden_act", "activation", k.activation(), "silu"),
    ]


ATTENTION_BIAS = k.Flag(
    "attention_bias", False, on=dict(use_bias=True, ff_bias=False), off=dict(use_bias=False)
)
"""Biases in attention, for models whose feed-forward network never has biases."""
OWN_HEAD_NORMS: k.Fields = dict(qk_norm=True, qk_norm_kind="layernorm", qk_norm_over="own_head")
"""Fields of a model that normalizes each head of queries and keys."""
BIASES = (
    k.Key("attention_bias", "use_bias", k.flag, False),
    k.Key("mlp_bias", "ff_bias", k.flag, False, unless="use_bias"),
)


# RoPE

SCALINGS: dict[str, RopeScaling | None] = {
    "default": None, "linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "yarn": "yarn",
    "longrope": "longrope", "su": "longrope",
}  # fmt: skip
"""Names of RoPE scalings in published files."""

SCALING_KEYS = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor",
    "low_freq_factor", "mscale", "mscale_all_dim", "short_factor", "truncate",
)  # fmt: skip
"""Keys that define a RoPE scaling. They have no effect if there is no scaling."""


def read_rope(
    keys: k.ConfigKeys,
    fields: k.Fields,
    layer: str | None = None,
    default: float = 10_000.0,
    part: float = 1.0,
) -> Rope:
    """Return the RoPE that config.json specifies.

    RoPE is defined by `rope_theta` and `rope_scaling`, or by `rope_parameters`, which contains
    both. `layer` names the entry of `rope_parameters` to read in families with two kinds of
    rotation. `default` is the default base, and `part` is the default fraction of each head that
    rotates. If the scaling depends on the sequence length (dynamic, longrope), max_len in `fields`
    is set to the trained length, up to which nothing is scaled.
    """
    name, spec = "rope_parameters", keys.take("rope_parameters", None)
    older = keys.take("rope_scaling", None)
    if spec is not None and older is not None:
        keys.fail("rope_scaling", older, "must be absent, because rope_parameters is present")
    if spec is None:
        name, spec = "rope_scaling", older
    elif layer is not None and isinstance(spec, dict):
        if unknown := sorted(set(spec) - set(LAYER_TYPES)):
            keys.fail(name, unknown[0], f"keys must be {' and '.join(LAYER_TYPES)}")
        name, spec = f"{name}.{layer}", spec.get(layer)
    if spec is not None and not isinstance(spec, dict):
        keys.fail(name, spec, "must be an object or null")
    inner = k.ConfigKeys(spec or {}, f"{keys.where}: {name}", family="rope")
    base = inner.positive("rope_theta", None, above=1)
    if base is None:
        base = keys.positive("rope_theta", default, above=1)
    # rope_theta may also be present with rope_parameters, whose base takes precedence.
    keys.ignore("rope_theta")
    other = inner.choice("type", SCALINGS, "default")  # older name of rope_type
    scaling = inner.choice("rope_type", SCALINGS, inner.take("type", "default"))
    if inner.take("type", None) is not None and scaling != other:
        inner.fail("type", other, f"must match rope_type, {scaling!r}")
    dims = _rotated_dims((inner, keys), fields, part)
    longest = fields["max_len"]
    trained = inner.integer("original_max_position_embeddings", None)
    # Phi 3 stores it outside the object, and that value takes precedence.
    trained = keys.integer("original_max_position_embeddings", None) or trained or longest
    if scaling == "dynamic":
        # Transformers ignores the key for dynamic and uses max_position_embeddings.
        trained = longest
    options: k.Fields = dict(base=float(base), dims=dims, scaling=scaling)
    if scaling is None:
        inner.ignore(*SCALING_KEYS)
    else:
        factor = inner.positive("factor", None)
        if factor is None and scaling in ("yarn", "longrope"):  # determined by the two lengths
            factor = longest / trained
            if factor < 1:
                rule = f"must be at most max_position_embeddings, {longest}"
                inner.fail("original_max_position_embeddings", trained, rule)
        if factor is None or factor < 1:
            inner.fail("factor", factor, f"must be at least 1 for {scaling} scaling")
        options["factor"] = float(factor)
    if scaling in ("dynamic", "llama3", "yarn", "longrope"):
        options["original_len"] = trained
    match scaling:
        case "llama3":
            options["low_freq_factor"] = inner.positive("low_freq_factor")
            options["high_freq_factor"] = inner.positive("high_freq_factor")
        case "yarn":  # Peng et al. 2023
            attention_factor = inner.positive("attention_factor", None)
            one, two = inner.number("mscale", None), inner.number("mscale_all_dim", None)
            # The two keys of DeepSeek form a quotient. One of them without the other has no effect.
            if attention_factor is None and one and two:
                attention_factor = magnitude(options["factor"], one)
                attention_factor /= magnitude(options["factor"], two)
            options |= dict(
                attention_factor=attention_factor,
                beta_fast=inner.number("beta_fast", None) or 32.0,
                beta_slow=inner.number("beta_slow", None) or 1.0,
                truncate=inner.flag("truncate", True),
            )
        case "longrope":  # Ding et al. 2024
            options["attention_factor"] = inner.positive("attention_factor", None)
            for field, key in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
                listed = inner.take(key)
                numbers = isinstance(listed, list) and all(type(f) in (int, float) for f in listed)
                if not numbers or not all(abs(f) < 2**63 for f in listed):
                    inner.fail(key, listed, "must be a list of numbers")
                options[field] = tuple(map(float, listed))
    if scaling in ("dynamic", "longrope"):
        fields["max_len"] = trained
    inner.check_all_read()
    return Rope(**options)


def _rotated_dims(holders: Iterable[k.ConfigKeys], fields: k.Fields, default: float) -> int | None:
    """Return int(head_dim partial_rotary_factor), the number of dimensions of each head to rotate.

    The first of the `holders` that has the key decides. Return None if all dimensions rotate.
    """
    head_dim = fields.get("head_dim") or fields["d_model"] // fields["num_heads"]
    found = None if default == 1 else int(head_dim * default)
    decided = False
    for holder in holders:  # read both, so that neither is considered unknown
        part = holder.positive("partial_rotary_factor", None)
        if part is None or decided:
            continue
        decided = True
        if part > 1:
            holder.fail("partial_rotary_factor", part, "must be at most 1")
        found = int(head_dim * part)
        if found < 2 or found % 2:
            rule = f"{found} of {head_dim} dimensions rotate: must be even and at least 2"
            holder.fail("partial_rotary_factor", part, rule)
    return None if found == head_dim else found


def magnitude(factor: float, scale: float) -> float:
    """Return YaRN's multiplier of the rotated vectors, 0.1 scale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_of(config: ModelConfig) -> Rope:
    """Return the RoPE to write.

    If there is none, return the default, which is rejected when the config is read back.
    """
    return config.positions if isinstance(config.positions, Rope) else Rope()


def write_rope(config: ModelConfig) -> JsonObject:
    """Return the RoPE keys in the older style, which all versions of transformers can read."""
    rope = rope_of(config)
    keys: JsonObject = dict(rope_theta=rope.base)
    if rope.dims not in (None, config.key_dim):
        keys["partial_rotary_factor"] = rotated_part(rope.dims, config.key_dim)
    if rope.scaling is None:
        return keys
    scaling: JsonObject = dict(rope_type=rope.scaling, factor=rope.factor)
    if rope.original_len is not None and rope.scaling != "dynamic":
        scaling["original_max_position_embeddings"] = rope.original_len
    if rope.scaling == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    if rope.scaling == "yarn":
        scaling |= dict(beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, truncate=rope.truncate)
    if rope.scaling == "longrope":
        assert rope.short_factors and rope.long_factors and rope.original_len
        scaling["short_factor"] = list(rope.short_factors)
        scaling["long_factor"] = list(rope.long_factors)
        # Other libraries expect the scaled length here; max_len is the trained length.
        keys["max_position_embeddings"] = round(rope.original_len * rope.factor)
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    return keys | dict(rope_scaling=scaling)


def rotated_part(dims: int, head_dim: int) -> float:
    """Return a partial_rotary_factor p such that int(head_dim * p) equals dims."""
    part = dims / head_dim  # its product with head_dim may round to just below dims
    return part if int(head_dim * part) == dims else math.nextafter(part, 1.0)


def rope(
    default: float = 10_000.0,
    part: float = 1.0,
    pairing: Literal["half", "interleaved"] = "half",
) -> k.Code:
    """List the RoPE keys. `default` and `part` are default values, as in `read_rope`.

    This entry must come after the sizes, because a scaling may change max_len.
    """

    def read(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
        positions = read_rope(keys, fields, default=default, part=part)
        return dict(positions=replace(positions, pairing=pairing), max_len=fields["max_len"])

    return k.Code(read, write_rope)


# Windows

LAYER_TYPES = ("full_attention", "sliding_attention")


WINDOW = k.Code(
    lambda keys, fields: dict(window=keys.optional_integer("sliding_window", None)),
    lambda config: dict(sliding_window=config.windows[0]),
)
"""Keys for the same window in every layer, or for no window."""


def layer_types(keys: k.ConfigKeys, layers: int) -> list[str] | None:
    """Return the type of every layer, such as "sliding_attention", or None if not specified."""
    types = keys.take("layer_types", None)
    if types is None:
        return None
    known = isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)
    if not known or len(types) != layers:
        rule = f"must be a list of {layers} (num_hidden_layers) of {' and '.join(LAYER_TYPES)}"
        keys.fail("layer_types", types, rule)
    return types


def shortest(layers: Sequence[k.Value]) -> tuple[k.Value, ...]:
    """Return the shortest pattern whose repetition starts with `layers`."""
    for period in range(1, len(layers) + 1):
        if all(one == layers[i % period] for i, one in enumerate(layers)):
            return tuple(layers[:period])
    raise AssertionError


def window_pattern(types: list[str], window: int | None) -> int | tuple[int | None, ...] | None:
    """Return the shortest pattern of windows whose repetition matches these layer types."""
    found = shortest([window if kind == "sliding_attention" else None for kind in types])
    return found[0] if len(found) == 1 else found


def every(period: int) -> Callable[[int], bool]:
    """Return a predicate for layers with a window, which are all except every `period`-th layer."""
    return lambda layer: (layer + 1) % period != 0


def types_or(keys: k.ConfigKeys, layers: int, has_window: Callable[[int], bool]) -> list[str]:
    """Return the type of every layer from `layer_types`, or from `has_window` if it is missing."""
    return layer_types(keys, layers) or [LAYER_TYPES[has_window(i)] for i in range(layers)]


def windows(has_window: Callable[[int], bool], width: int | None = 4096) -> k.Code:
    """List `layer_types` and the window width. The arguments are default values.

    The width must be a number even if no layer has a window.
    """

    def read(keys: k.ConfigKeys, fields: k.Fields) -> k.Fields:
        types = types_or(keys, fields["num_layers"], has_window)
        return dict(window=window_pattern(types, keys.integer("sliding_window", width)))

    def write(config: ModelConfig) -> JsonObject:
        keys = write_windows(config)
        return keys if keys["sliding_window"] is not None else keys | dict(sliding_window=width)

    return k.Code(read, write)


def rotated_in_windows(types: list[str], positions: Rope) -> k.Fields:
    """Return the positions of a model in which only layers with a window rotate."""
    pattern = shortest([kind == "sliding_attention" for kind in types])
    if pattern == (False,):
        return dict(positions=None)
    return dict(positions=replace(positions, pattern=None if pattern == (True,) else pattern))


def write_windows(config: ModelConfig) -> JsonObject:
    """Return the keys for the type of every layer and for the window width."""
    windows = [config.windows[i % len(config.windows)] for i in range(config.num_layers)]
    names = ["full_attention" if window is None else "sliding_attention" for window in windows]
    width = next((window for window in windows if window is not None), None)
    return dict(layer_types=names, sliding_window=width)
