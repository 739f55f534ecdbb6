"""Read and write the keys of config.json that many families of decoders share.

They are sizes, the rotation of queries and keys with its ways to stretch it, and windows by layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from transformer_jax.config import ModelConfig, Rope, RopeScaling
from transformer_jax.pretrained.families.table import (
    ACTIVATIONS,
    ConfigKeys,
    Fields,
    Value,
    activation_key,
)
from transformer_jax.untrusted_files import JsonObject

# Sizes


def read_common(
    keys: ConfigKeys,
    kv_heads: int | None = None,  # default of num_key_value_heads; None is num_attention_heads
    activation: str = "silu",
    name: str = "hidden_act",
    tied: bool = False,
    eps: float = 1e-6,
    norm_eps: str = "rms_norm_eps",
) -> Fields:
    """Read sizes, norm, activation and dropout as fields of ModelConfig."""
    heads = keys.integer("num_attention_heads")
    return dict(
        vocab_size=keys.integer("vocab_size"),
        d_model=keys.integer("hidden_size"),
        d_ff=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.optional_integer("num_key_value_heads", kv_heads) or heads,
        head_dim=keys.integer("head_dim", None),
        max_len=keys.integer("max_position_embeddings"),
        norm="rmsnorm",
        norm_eps=keys.positive(norm_eps, eps),
        activation=keys.choice(name, ACTIVATIONS, activation),
        glu=True,
        use_bias=False,
        tie_embeddings=keys.flag("tie_word_embeddings", tied),
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )


def write_common(config: ModelConfig) -> JsonObject:
    """Write what `read_common` reads, and the rotation."""
    return dict(write_sizes(config), rms_norm_eps=config.norm_eps) | write_rope(config)


def write_sizes(config: ModelConfig) -> JsonObject:
    """Write sizes, activation, dropout of attention and whether the output matrix is tied."""
    keys: JsonObject = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.ff_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_len,
        hidden_act=activation_key(config.activation),
        tie_word_embeddings=config.tie_embeddings,
        attention_dropout=config.attention_dropout,
    )
    if config.head_dim is not None:
        keys["head_dim"] = config.head_dim
    return keys


def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
    """Return whether query, key and value have biases, the output matrix, and the feed-forward."""
    given = config.qkv_bias, config.out_bias, config.ff_bias
    qkv, out, ff = (config.use_bias if bias is None else bias for bias in given)
    return qkv, out, ff


# Rotation

SCALINGS: dict[str, RopeScaling | None] = {
    "default": None,
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
"""Published names of the ways to stretch a rotation."""

SCALING_KEYS = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor",
    "low_freq_factor", "mscale", "mscale_all_dim", "short_factor", "truncate",
)  # fmt: skip
"""Keys of a stretch, which change nothing where there is none."""


def read_rope(
    keys: ConfigKeys,
    fields: Fields,
    layer: str | None = None,
    default: float = 10_000.0,
    part: float = 1.0,
) -> Rope:
    """Return the rotation that config.json means.

    It is said by `rope_theta` and `rope_scaling`, or by `rope_parameters`, which hold both. `layer`
    names the entry of `rope_parameters` to read in families whose layers rotate in two ways;
    `default` is the base if none is given, and `part` the share of each head that rotates. If the
    stretch depends on the length of a text (dynamic, longrope), max_len in `fields` becomes the
    trained length, for which nothing is stretched.
    """
    inner = _rope_keys(keys, layer)
    base = inner.positive("rope_theta", None, above=1)
    if base is None:
        base = keys.positive("rope_theta", default, above=1)
    keys.ignore("rope_theta")
    scaling = _scaling_kind(inner)
    dims = _rotated_dims((inner, keys), fields, part)
    longest = fields["max_len"]
    trained = inner.integer("original_max_position_embeddings", None)
    trained = keys.integer("original_max_position_embeddings", None) or trained or longest
    if scaling == "dynamic":
        trained = longest
    options: Fields = dict(base=float(base), dims=dims, scaling=scaling)
    if scaling is None:
        inner.ignore(*SCALING_KEYS)
    else:
        options["factor"] = _factor(inner, scaling, longest, trained)
    if scaling in ("dynamic", "llama3", "yarn", "longrope"):
        options["original_len"] = trained
    match scaling:
        case "llama3":
            options["low_freq_factor"] = inner.positive("low_freq_factor")
            options["high_freq_factor"] = inner.positive("high_freq_factor")
        case "yarn":
            options |= _yarn_options(inner, options["factor"])
        case "longrope":
            options |= _longrope_options(inner)
    if scaling in ("dynamic", "longrope"):
        fields["max_len"] = trained
    inner.check_all_read()
    return Rope(**options)


def _rope_keys(keys: ConfigKeys, layer: str | None) -> ConfigKeys:
    """Return the keys of `rope_parameters` or `rope_scaling`, whichever there is."""
    name, given = "rope_parameters", keys.take("rope_parameters", None)
    older = keys.take("rope_scaling", None)
    if given is not None and older is not None:
        keys.fail("rope_scaling", older, "rope_parameters says it already")
    if given is None:
        name, given = "rope_scaling", older
    elif layer is not None and isinstance(given, dict):
        if unknown := sorted(set(given) - set(LAYER_TYPES)):
            keys.fail(name, unknown[0], f"must be of {' and '.join(LAYER_TYPES)}")
        name, given = f"{name}.{layer}", given.get(layer)
    if given is not None and not isinstance(given, dict):
        keys.fail(name, given, "must be an object or null")
    return ConfigKeys(given or {}, f"{keys.where}: {name}", family="rope")


def _scaling_kind(inner: ConfigKeys) -> RopeScaling | None:
    """Return the kind of stretch from `rope_type`, or from its older name `type`."""
    older = inner.choice("type", SCALINGS, "default")
    scaling = inner.choice("rope_type", SCALINGS, inner.take("type", "default"))
    if inner.take("type", None) is not None and scaling != older:
        inner.fail("type", older, f"rope_type is {scaling!r}")
    return scaling


def _rotated_dims(holders: Iterable[ConfigKeys], fields: Fields, default: float) -> int | None:
    """Return how many dimensions of each head rotate, int(head_dim partial_rotary_factor).

    The first of the holders with such a key decides; None rotates all dimensions.
    """
    head_dim = fields["head_dim"] or fields["d_model"] // fields["num_heads"]
    found = None if default == 1 else int(head_dim * default)
    said = False
    for holder in holders:
        part = holder.positive("partial_rotary_factor", None)
        if part is None or said:
            continue
        said = True
        if part > 1:
            holder.fail("partial_rotary_factor", part, "must be at most 1")
        found = int(head_dim * part)
        if found < 2 or found % 2:
            rule = f"{found} of {head_dim} dimensions rotate: must be even and at least 2"
            holder.fail("partial_rotary_factor", part, rule)
    return None if found == head_dim else found


def _factor(inner: ConfigKeys, scaling: RopeScaling, longest: int, trained: int) -> float:
    """Return the stretch; yarn and longrope may leave it to the two lengths."""
    factor = inner.positive("factor", None)
    if factor is None and scaling in ("yarn", "longrope"):
        factor = longest / trained
        if factor < 1:
            rule = f"must be at most max_position_embeddings, {longest}"
            inner.fail("original_max_position_embeddings", trained, rule)
    if factor is None or factor < 1:
        inner.fail("factor", factor, f"{scaling} needs one of at least 1")
    return float(factor)


def _yarn_options(inner: ConfigKeys, factor: float) -> Fields:
    """Return the fields of Rope that yarn alone has (Peng et al. 2023)."""
    attention_factor = inner.positive("attention_factor", None)
    one, two = inner.number("mscale", None), inner.number("mscale_all_dim", None)
    if attention_factor is None and one and two:
        attention_factor = _magnitude(factor, one) / _magnitude(factor, two)
    return dict(
        attention_factor=attention_factor,
        beta_fast=inner.number("beta_fast", None) or 32.0,
        beta_slow=inner.number("beta_slow", None) or 1.0,
        truncate=inner.flag("truncate", True),
    )


def _magnitude(factor: float, scale: float) -> float:
    """Return yarn's multiplier of the rotated vectors, 0.1 scale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope_options(inner: ConfigKeys) -> Fields:
    """Return the fields of Rope that longrope alone has (Ding et al. 2024)."""
    options: Fields = dict(attention_factor=inner.positive("attention_factor", None))
    for field, key in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
        listed = inner.take(key)
        numbers = isinstance(listed, list) and all(type(f) in (int, float) for f in listed)
        if not numbers or not all(abs(f) < 2**63 for f in listed):
            inner.fail(key, listed, "must be a list of numbers")
        options[field] = tuple(map(float, listed))
    return options


def rope_of(config: ModelConfig) -> Rope:
    """Return the rotation to write; where there is none, one that reading back will not match."""
    return config.positions if isinstance(config.positions, Rope) else Rope()


def write_rope(config: ModelConfig) -> JsonObject:
    """Write the rotation in the older style, which all versions of transformers read."""
    rope = rope_of(config)
    keys: JsonObject = dict(rope_theta=rope.base)
    if rope.dims not in (None, config.key_dim):
        keys["partial_rotary_factor"] = _part(rope.dims, config.key_dim)
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
        keys["max_position_embeddings"] = round(rope.original_len * rope.factor)
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    return keys | dict(rope_scaling=scaling)


def _part(dims: int, head_dim: int) -> float:
    """Return the partial_rotary_factor p with int(head_dim p) = dims."""
    part = dims / head_dim
    return part if int(head_dim * part) == dims else math.nextafter(part, 1.0)


# Windows

LAYER_TYPES = ("full_attention", "sliding_attention")


def layer_types(keys: ConfigKeys, layers: int) -> list[str] | None:
    """Return the kind of every layer, "sliding_attention" being those with a window, or None."""
    types = keys.take("layer_types", None)
    if types is None:
        return None
    known = isinstance(types, list) and all(kind in LAYER_TYPES for kind in types)
    if not known or len(types) != layers:
        rule = f"must be a list of {layers} (num_hidden_layers) of {' and '.join(LAYER_TYPES)}"
        keys.fail("layer_types", types, rule)
    return types


def shortest(layers: Sequence[Value]) -> tuple[Value, ...]:
    """Return the shortest pattern that repeats to what these layers have."""
    for period in range(1, len(layers) + 1):
        if all(own == layers[i % period] for i, own in enumerate(layers)):
            return tuple(layers[:period])
    raise AssertionError


def window_pattern(types: list[str], window: int | None) -> int | tuple[int | None, ...] | None:
    """Return the shortest pattern of windows that repeats to these layers."""
    found = shortest([window if kind == "sliding_attention" else None for kind in types])
    return found[0] if len(found) == 1 else found


def write_windows(config: ModelConfig) -> JsonObject:
    """Write the kind of every layer, and the width of those with a window."""
    windows = [config.windows[i % len(config.windows)] for i in range(config.num_layers)]
    names = ["full_attention" if window is None else "sliding_attention" for window in windows]
    width = next((window for window in windows if window is not None), None)
    return dict(layer_types=names, sliding_window=width)
