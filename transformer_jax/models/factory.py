"""Functions that build a model, initialize its parameters, or create its caches from a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from transformer_jax.attention.api import IMPLEMENTATIONS
from transformer_jax.cache import paged_cache
from transformer_jax.cache.kv_cache import check_cache_dtype
from transformer_jax.cache.model_cache import ModelCache, empty_layers
from transformer_jax.checks import check_count, check_key
from transformer_jax.config import AnyModelConfig, ModelConfig, Patches
from transformer_jax.config.fields import ConfigError, fail
from transformer_jax.config.keywords import known_keywords
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.models.drawing import draw
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.inputs import example_inputs
from transformer_jax.models.packing import check_valid
from transformer_jax.models.transformer import Decoder, Encoder
from transformer_jax.programs import program
from transformer_jax.pytree import Array, Params, cast
from transformer_jax.sharding import axis_names
from transformer_jax.tracing import traced

Model = Encoder | Decoder | EncoderDecoder


def _check_config(config: AnyModelConfig) -> None:
    """Raise ValueError if this is not a config. The message helps with common mistakes."""
    if isinstance(config, AnyModelConfig):
        return
    value, rule = f"of type {type(config).__name__}", "such as preset('tiny') or ModelConfig(...)"
    if isinstance(config, str):
        value = repr(config)
        rule = f"preset({config!r}) for a size, load_pretrained(folder) for published weights"
    elif isinstance(config, type):
        value, rule = f"the class {config.__name__}", f"an instance {config.__name__}(...)"
    elif isinstance(config, nn.Module):
        rule = "here model.config"
    elif isinstance(config, Mapping):
        rule += "; parameters do not contain one"
    elif hasattr(config, "model"):
        rule = "here step.model.config"
    raise ValueError(f"config is {value}: must be a config, {rule}")


@overload
def build(config: ModelConfig) -> Model: ...
@overload
def build(config: AnyModelConfig) -> Any: ...
@overload
def build(config: CheckedModule) -> CheckedModule: ...
def build(config: AnyModelConfig | CheckedModule) -> Any:
    """Build the linen module for a config. It is hashable, so it can be static under `jax.jit`.

    Args:
        config: config of any kind of model. If you pass a model, it is returned unchanged, with its
            edits.

    Raises:
        ConfigError: If `config.implementation` is not a key of `IMPLEMENTATIONS`.
    """
    if isinstance(config, CheckedModule):
        return config
    _check_config(config)
    if not isinstance(config, ModelConfig):
        return config.build()
    if config.implementation not in (None, *IMPLEMENTATIONS):
        rule = f"must be one of {', '.join(map(repr, IMPLEMENTATIONS))} or None"
        fail("implementation", config.implementation, rule)
    match config.kind:
        case "encoder":
            return Encoder(config)
        case "decoder":
            return Decoder(config)
        case "encoder-decoder":
            return EncoderDecoder(config)


@known_keywords
def init_params(config: AnyModelConfig, key: jax.Array) -> Params:
    """Initialize a nested dict of f32 parameters.

    Args:
        config: config of any kind of model. An n-gram config must specify `nodes`. Its parameters
            are an empty table, which `count_ngrams` fills.
        key: a single key.

    Raises:
        ConfigError: If `nodes` is None for an n-gram model.
        ValueError: If `key` is not a single key.
    """
    _check_config(config)
    check_key("key", key)
    if traced(jax.random.key_data(key)):  # True inside any trace, even with a concrete key
        return _init(config, key)
    # a single program for the whole initialization would take much longer to compile than to run
    found = _init.trace(config=config, key=key)
    return jax.tree.unflatten(jax.tree.structure(found.out_info), draw(found.jaxpr, key))


@program(static=("config",))
def _init(config: AnyModelConfig, key: jax.Array) -> Params:
    # The shapes of the parameters do not depend on the input, so the smallest input is enough.
    model, tokens = build(config), jnp.zeros((1, 1), jnp.int32)
    source: jax.Array = tokens
    if config.inputs is not None:
        source = example_inputs(config.inputs, 1, 1)
    if config.kind == "encoder-decoder":
        return model.init({"params": key}, tokens, source=source)["params"]
    return model.init({"params": key}, source)["params"]


def num_params(config: AnyModelConfig) -> int:
    """Return the number of parameters of a model without allocating them."""
    if isinstance(config, Mapping):
        rule = "must be a config; for arrays, use sum(x.size for x in jax.tree.leaves(params))"
        raise ValueError(f"config is of type {type(config).__name__}: {rule}")
    _check_config(config)
    shapes = jax.eval_shape(lambda: _init(config, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@known_keywords
def init_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike | None = None,  # None means the compute dtype
    slack: int = 0,
    sharding: NamedSharding | None = None,
) -> ModelCache:
    """Create an empty cache for a decoder.

    For an encoder-decoder, call `model.apply(..., method="init_cache")` instead, because its cache
    contains the source.

    Args:
        config: config of a decoder.
        batch: B, the number of rows.
        capacity: number of positions per row. With a window, the window size plus the number of
            sink tokens is enough, because the cache is then a ring that never fills up. With a
            window pattern, layers without a window have `capacity` slots, and the others are rings
            of min(capacity, window + sink_tokens + slack) slots. A layer with a state has
            the same size for every capacity. A latent_attention layer stores its latent vectors as
            keys, and its rotated keys as values.
        dtype: dtype of keys and values, either int8, with the error documented in
            `transformer_jax.cache`, or a floating-point dtype of at least 16 bits. None means the
            compute dtype.
        slack: number of tokens that `rewind_cache` can drop, at least 0. Each needs a slot in the
            rings of a window pattern, and its inputs in a layer with a state. The ring of a single
            window needs a larger `capacity` instead.
        sharding: how the devices of a mesh split the rows, the slots and the key heads of the
            cache, such as `NamedSharding(mesh, P(None, "context"))`. If slots are split, windowed
            layers also have `capacity` slots. None means one device.

    Raises:
        ValueError: If the config does not describe a decoder, if a size or the dtype is invalid, or
            if the devices do not divide the capacity.
    """
    _check_config(config)
    if not config.supports("cache"):
        rule = "it has no cache; use init_decode_state, which supports every model"
        raise ValueError(f"config is of type {type(config).__name__}: {rule}")
    if config.kind != "decoder":
        rule = "an encoder has no cache"
        if config.kind == "encoder-decoder":
            rule = "its cache contains a source: model.apply(..., source, method='init_cache')"
        raise ValueError(f"kind is {config.kind!r}: {rule}")
    check_count("batch", batch, 0)
    if sharding is not None:
        return _init_on_mesh(config, batch, capacity, dtype, slack, sharding)
    return ModelCache(empty_layers(config, config.num_layers, batch, capacity, dtype, slack))


def _init_on_mesh(
    config: ModelConfig,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike | None,
    slack: int,
    sharding: NamedSharding,
) -> ModelCache:
    """Create an empty cache, of which each device only stores its own part."""
    if len(sharding.spec) > 3:
        rule = "must have at most three entries, for rows, slots and key heads"
        raise ValueError(f"sharding is {sharding.spec}: {rule}")
    rows, slots, heads = (*sharding.spec, None, None, None)[:3]
    devices = math.prod(sharding.mesh.shape[axis] for axis in axis_names(slots))
    if devices > 1:
        if config.has_state:
            rule = "layers with a state have no slots, so a mesh may split only rows"
            raise ValueError(f"sharding is {sharding.spec}: {rule}")
        if capacity % devices:
            rule = f"must be a multiple of {devices}, the devices that split the slots"
            raise ValueError(f"capacity is {capacity}: {rule}")
        # a ring would have too few slots to be split
        slack = capacity if isinstance(config.window, tuple) else 0

    def empty() -> ModelCache:
        return ModelCache(empty_layers(config, config.num_layers, batch, capacity, dtype, slack))

    def place(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        axes = dict(k=(slots, heads), v=(slots, heads), k_scale=(slots, heads),
                    v_scale=(slots, heads), positions=(slots,)).get(name, ())  # fmt: skip
        layers = (None,) if config.scan_layers else ()
        return NamedSharding(sharding.mesh, PartitionSpec(rows, *layers, *axes))

    places = jax.tree_util.tree_map_with_path(place, jax.eval_shape(empty))
    cache: ModelCache = jax.jit(empty, out_shardings=places)()
    return cache


@known_keywords
def init_paged_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    *,
    num_pages: int,
    page_size: int = 128,
    dtype: jax.typing.DTypeLike | None = None,  # None means the compute dtype
) -> ModelCache:
    """Create an empty paged cache for a decoder, whose rows allocate pages as they grow.

    All positions are stored, even with a window. The fused kernels read pages in place if the page
    size is a multiple of 64 (NVIDIA) or 128 (TPU).

    Args:
        config: config of a decoder with a looped stack.
        batch: B, the number of rows.
        capacity: maximum number of positions per row, a multiple of `page_size`.
        num_pages: number of pages per layer, shared by all rows.
        page_size: number of tokens per page.
        dtype: dtype of keys and values, as in `init_cache`; None means the compute dtype.

    Raises:
        ValueError: If the config does not describe a looped decoder, or if a size or the dtype is
            invalid.
    """
    _check_config(config)
    if not config.supports("cache") or config.kind != "decoder":
        kind = config.kind if config.supports("cache") else type(config).__name__
        raise ValueError(f"kind is {kind!r}: only a decoder can have a paged cache")
    if config.scan_layers:
        raise ValueError("scan_layers is True: a paged cache requires a looped stack")
    if config.has_state:
        raise ValueError(
            f"mixers is {config.mixers}: a paged cache supports no layers with a state"
        )
    heads = map(config.cached_heads, range(config.num_layers))
    dtype = config.dtype if dtype is None else dtype
    pages = dict(num_pages=num_pages, page_size=page_size)
    layers = [paged_cache.init(batch, capacity, *sizes, dtype, **pages) for sizes in heads]
    return ModelCache(tuple(layers))


@known_keywords
def cache_bytes(
    config: ModelConfig,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike | None = None,
    source_length: int | None = None,  # only for an encoder-decoder
    slack: int = 0,
) -> int:
    """Return the size of a cache in bytes without allocating it.

    Args:
        config: config of a decoder or an encoder-decoder.
        batch: B, the number of rows.
        capacity: number of positions per row, as in `init_cache`.
        dtype: dtype of keys and values; None means the compute dtype.
        source_length: number of tokens, vectors or frames in an encoder-decoder's source, which is
            also cached. It must be None for a decoder, and may be None for images.
        slack: as in `init_cache`.

    Raises:
        ValueError: If the model has no cache, or if `source_length` or a size is invalid.
    """
    _check_config(config)
    if not config.supports("cache"):
        raise ValueError(f"config is of type {type(config).__name__}: it has no cache")
    arguments: dict[str, Any] = dict(capacity=capacity, dtype=dtype, slack=slack)
    if config.kind == "encoder-decoder":
        images = isinstance(config.inputs, Patches)
        if source_length is None and not images:
            raise ValueError("source_length is None: an encoder-decoder also caches its source")
        # The size of an image is part of the config, so its length is ignored.
        length = 1 if source_length is None else source_length
        check_count("source_length", length, 1)

        def empty() -> Any:
            source = jnp.zeros((batch, length), jnp.int32)
            if config.inputs is not None:
                source = example_inputs(config.inputs, batch, length)
            params = {"params": _init(config, jax.random.key(0))}
            model: Any = build(config)
            return model.apply(params, source, **arguments, method="init_cache")
    else:
        if source_length is not None:
            raise ValueError(f"source_length is {source_length}, but kind is {config.kind!r}")
        empty = partial(init_cache, config, batch, **arguments)
    leaves = jax.tree.leaves(jax.eval_shape(empty))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@known_keywords
def init_decode_state(
    config: AnyModelConfig | CheckedModule,
    params: Params | None,  # only read if there is a source
    batch: int,
    capacity: int,
    *,
    source: Array | None = None,  # i32[B, S], or an array that matches the config's inputs
    source_valid: Array | None = None,  # bool[B, S]
    dtype: jax.typing.DTypeLike | None = None,
) -> Any:
    """Create the initial state for `make_step(build(config))`, for any generative model.

    The state of a decoder is an empty cache. The state of an encoder-decoder is a cache that
    contains its source. A recurrent model starts from zeros or from the states of its source.
    Convolutional, feed-forward and n-gram models start without previous tokens. The states of these
    models are f32 and have no capacity. `config`, `batch`, `capacity` and `dtype` are static under
    `jax.jit`.

    Args:
        config: config of a generative model, or the model itself. The edits of a model apply to the
            source.
        params: parameters of the model, which are read only if there is a source.
        batch: B, the number of rows.
        capacity: number of positions per cache row, as in `init_cache`.
        source: token IDs i32[B, S], or an array that matches the config's `inputs`; None if the
            model has no source.
        source_valid: bool[B, S]; False means padding. None means no padding.
        dtype: dtype of a cache's keys and values; None means the compute dtype.

    Raises:
        ValueError: If a required source is missing, if an unsupported source is passed, if the
            model is not generative, if `dtype` is passed to a model without a cache, or if a size
            is invalid.
    """
    model: Any = build(config)
    cfg: AnyModelConfig = model.config
    has_source = cfg.kind == "encoder-decoder"
    if cfg.kind == "encoder" and cfg.supports("cache"):
        raise ValueError("kind is 'encoder': it does not generate tokens, so it has no state")
    if dtype is not None and not cfg.supports("cache"):
        rule = f"{type(cfg).__name__} has no cache"
        name = dtype if isinstance(dtype, str) else check_cache_dtype("dtype", dtype)
        raise ValueError(f"dtype is {name}: {rule}")
    if source is None and has_source:
        raise ValueError("source is None: this model requires a source")
    if source is not None and not has_source:
        raise ValueError(
            f"source has shape {np.shape(source)}: this model does not accept a source"
        )
    if source is None and source_valid is not None:
        raise ValueError("source_valid requires a source")
    if source is not None and len(source) != batch:
        raise ValueError(f"source has {len(source)} rows, but batch is {batch}")
    if not has_source:
        if isinstance(cfg, ModelConfig):
            return init_cache(cfg, batch, capacity, dtype)
        return cfg.init_state(batch)
    apply = partial(model.apply, {"params": params}, source)
    if not cfg.supports("cache"):
        return apply(valid=source_valid, method="init_state")
    positions = None
    if source_valid is not None:
        assert source is not None
        tokens = source if source.ndim == 2 else source[:, :, 0]  # one value per frame
        valid = check_valid("source", tokens, source_valid)
        # Only real tokens are counted, so padding may be at either end of a row.
        positions = jnp.where(valid, jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, -1)
    return apply(capacity=capacity, dtype=dtype, positions=positions, method="init_cache")


def merged(fresh: Params, loaded: Params) -> tuple[Params, list[str]]:
    """Replace newly initialized parameters with loaded ones and describe the differences.

    If a new array has more rows than the loaded one, its last rows are not replaced. The returned
    lines of text list the parameters that were not replaced, and the loaded parameters that the new
    model does not have.
    """
    found, old = flatten_dict(fresh), flatten_dict(loaded)
    new = []
    for path, leaf in found.items():
        name = "/".join(map(str, path))
        if path not in old:
            new.append(name)
            continue
        value = cast(name, jnp.asarray(old[path]), leaf.dtype)
        if value.shape == leaf.shape:
            found[path] = value
        elif value.shape[1:] == leaf.shape[1:] and len(value) < len(leaf):
            found[path] = leaf.at[: len(value)].set(value)
            new.append(f"{name}[{len(value)}:]")
        else:
            rule = f"the model to start from has shape {list(value.shape)}"
            raise ConfigError(f"{name} has shape {list(leaf.shape)}, but {rule}")
    unused = ["/".join(map(str, path)) for path in old if path not in found]
    lines = [f"new parameters: {', '.join(new)}"] if new else []
    lines += [f"parameters that the new model lacks: {', '.join(unused)}"] if unused else []
    return unflatten_dict(found), lines
