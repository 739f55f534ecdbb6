"""Turn a config into a model: build it, initialise it, count it, give it a cache."""

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

from transformer_jax.attention.api import IMPLEMENTATIONS
from transformer_jax.cache import paged_cache
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
from transformer_jax.tracing import traced

Model = Encoder | Decoder | EncoderDecoder


def _check_config(config: AnyModelConfig) -> None:
    """Raise ValueError where this is no config, naming what it was taken for."""
    if isinstance(config, AnyModelConfig):
        return
    given, rule = f"a {type(config).__name__}", "as preset('tiny') or ModelConfig(...) is"
    if isinstance(config, str):
        given = repr(config)
        rule = f"preset({config!r}) for a size, load_pretrained(folder) for published weights"
    elif isinstance(config, type):
        given, rule = f"the class {config.__name__}", f"a value {config.__name__}(...)"
    elif isinstance(config, nn.Module):
        rule = "model.config of a model"
    elif isinstance(config, Mapping):
        rule += "; parameters have none"
    elif hasattr(config, "model"):
        rule = "step.model.config of a step"
    raise ValueError(f"config is {given}: must be a config, {rule}")


@overload
def build(config: ModelConfig) -> Model: ...
@overload
def build(config: AnyModelConfig) -> Any: ...
@overload
def build(config: CheckedModule) -> CheckedModule: ...
def build(config: AnyModelConfig | CheckedModule) -> Any:
    """Build the linen module of a config; hashable, so a legal static argument of `jax.jit`.

    Args:
        config: of a model of any kind. A model is returned as it is, with its edits.

    Raises:
        ConfigError: if `config.implementation` names none of `IMPLEMENTATIONS`.
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
    """Draw fresh f32 parameters, as a nested dict.

    Args:
        config: of an n-gram model its `nodes` must be known: the parameters are zeros of their
            shapes, a place for what `count_ngrams` counted.
        key: a single key.

    Raises:
        ConfigError: if the `nodes` of an n-gram model are None.
        ValueError: if `key` is not a single key.
    """
    _check_config(config)
    check_key("key", key)
    if traced(jax.random.key_data(key)):  # which it is inside a trace, whatever the key is
        return _init(config, key)
    # one compiled program of the whole initialisation takes much longer to compile than to run
    found = _init.trace(config=config, key=key)
    return jax.tree.unflatten(jax.tree.structure(found.out_info), draw(found.jaxpr, key))


@program(static=("config",))
def _init(config: AnyModelConfig, key: jax.Array) -> Params:
    model, tokens = build(config), jnp.zeros((1, 1), jnp.int32)
    source: jax.Array = tokens
    if config.inputs is not None:
        source = example_inputs(config.inputs, 1, 1)
    if config.kind == "encoder-decoder":
        return model.init({"params": key}, tokens, source=source)["params"]
    return model.init({"params": key}, source)["params"]


def num_params(config: AnyModelConfig) -> int:
    """Count the parameters of a config; nothing is allocated."""
    if isinstance(config, Mapping):
        rule = "must be a config; of arrays, sum(x.size for x in jax.tree.leaves(params))"
        raise ValueError(f"config is a {type(config).__name__}: {rule}")
    _check_config(config)
    shapes = jax.eval_shape(lambda: _init(config, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@known_keywords
def init_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike | None = None,  # None is the compute dtype
    slack: int = 0,
) -> ModelCache:
    """Make an empty cache of a decoder.

    An encoder-decoder reads its source first: `model.apply(..., method="init_cache")`.

    Args:
        config: of a decoder.
        batch: B, rows.
        capacity: positions of a row. With a window it may be as small as the window and the sink
            tokens: the cache is then a ring that never fills. Of a window pattern, full layers have
            `capacity` slots and windowed ones are rings of min(capacity, window + sink_tokens +
            slack).
        dtype: of keys and values: int8, at an error that `transformer_jax.cache` states, or
            floating with 16 bits or more. None is the compute dtype.
        slack: more slots of the rings of a window pattern, at least 0, as room for `rewind_cache`.

    Raises:
        ValueError: if the config is of another kind, or a size or the dtype cannot be.
    """
    _check_config(config)
    if not config.supports("cache"):
        rule = "its state comes from init_decode_state, which serves every model"
        raise ValueError(f"config is a {type(config).__name__}: {rule}")
    if config.kind != "decoder":
        rule = "an encoder has no cache"
        if config.kind == "encoder-decoder":
            rule = "its cache starts from a source: model.apply(..., source, method='init_cache')"
        raise ValueError(f"kind is {config.kind!r}: {rule}")
    check_count("batch", batch, 0)
    return ModelCache(empty_layers(config, config.num_layers, batch, capacity, dtype, slack))


@known_keywords
def init_paged_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    *,
    num_pages: int,
    page_size: int = 128,
    dtype: jax.typing.DTypeLike | None = None,  # None is the compute dtype
) -> ModelCache:
    """Make an empty cache of a decoder whose rows take pages as they grow.

    With a window, too, every position is kept. Fused kernels read pages in place whose size is a
    multiple of 64 (NVIDIA) or 128 (TPU).

    Args:
        config: of a decoder whose stack is looped.
        batch: B, rows.
        capacity: the most positions of a row, a multiple of `page_size`.
        num_pages: pages of each layer, for all rows together.
        page_size: tokens of a page.
        dtype: of keys and values, as in `init_cache`; None is the compute dtype.

    Raises:
        ValueError: if the config is of another kind, its stack is scanned, or a size or the dtype
            cannot be.
    """
    _check_config(config)
    if not config.supports("cache") or config.kind != "decoder":
        given = config.kind if config.supports("cache") else type(config).__name__
        raise ValueError(f"kind is {given!r}: a paged cache is of a decoder")
    if config.scan_layers:
        raise ValueError("scan_layers is True: a paged cache is of a looped stack")
    sizes = batch, capacity, config.kv_heads, config.key_dim, config.value_dim
    dtype = config.dtype if dtype is None else dtype
    pages = dict(num_pages=num_pages, page_size=page_size)
    layers = [paged_cache.init(*sizes, dtype, **pages) for _ in range(config.num_layers)]
    return ModelCache(tuple(layers))


@known_keywords
def cache_bytes(
    config: ModelConfig,
    batch: int,
    capacity: int,
    dtype: jax.typing.DTypeLike | None = None,
    source_length: int | None = None,  # of an encoder-decoder; of its vectors or frames, if any
    slack: int = 0,
) -> int:
    """Count the bytes of the arrays of a cache; nothing is allocated.

    Args:
        config: of a decoder or an encoder-decoder.
        batch: B, rows.
        capacity: positions of a row, as in `init_cache`.
        dtype: of keys and values; None is the compute dtype.
        source_length: of an encoder-decoder, how many tokens, vectors or frames its source has,
            which is cached too; of images it may be None.
        slack: as in `init_cache`.

    Raises:
        ValueError: if the config has no cache, `source_length` is missing or of no use, or a size
            cannot be.
    """
    _check_config(config)
    if not config.supports("cache"):
        raise ValueError(f"config is a {type(config).__name__}: it has no cache")
    arguments: dict[str, Any] = dict(capacity=capacity, dtype=dtype, slack=slack)
    if config.kind == "encoder-decoder":
        images = isinstance(config.inputs, Patches)
        if source_length is None and not images:
            raise ValueError("source_length is None: an encoder-decoder also caches its source")
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
            raise ValueError(f"source_length is {source_length}: kind is {config.kind!r}")
        empty = partial(init_cache, config, batch, **arguments)
    leaves = jax.tree.leaves(jax.eval_shape(empty))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@known_keywords
def init_decode_state(
    config: AnyModelConfig | CheckedModule,
    params: Params | None,  # read where there is a source only
    batch: int,
    capacity: int,
    *,
    source: Array | None = None,  # i32[B, S], or what the config's inputs describe
    source_valid: Array | None = None,  # bool[B, S]
    dtype: jax.typing.DTypeLike | None = None,
) -> Any:
    """Make what `make_step(build(config))` reads first, for every model that writes tokens.

    A decoder has an empty cache; an encoder-decoder reads its source into one. A recurrent model
    has zeros, or the states of its source; the convolutional, the feed-forward and the n-gram model
    have the last tokens, and none yet: these are f32 and have no capacity. `config`, `batch`,
    `capacity` and `dtype` are static under `jax.jit`.

    Args:
        config: of a model that writes tokens, or such a model, which reads its source as it is
            edited.
        params: its parameters, which are read where there is a source only.
        batch: B, rows.
        capacity: positions of a row of a cache, as in `init_cache`.
        source: i32[B, S], or what the config's inputs describe, of a model that reads one.
        source_valid: bool[B, S], False is padding; None has none.
        dtype: of a cache's keys and values; None is the compute dtype.

    Raises:
        ValueError: if a source is missing, or given to a model that reads none, the model writes no
            tokens, `dtype` is given to a model without a cache, or a size cannot be.
    """
    model: Any = build(config)
    own: AnyModelConfig = model.config
    reads = own.kind == "encoder-decoder"
    if own.kind == "encoder" and own.supports("cache"):
        raise ValueError("kind is 'encoder': it writes no tokens, so it has no state")
    if dtype is not None and not own.supports("cache"):
        rule = f"a {type(own).__name__} has no cache"
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
        raise ValueError(f"dtype is {name}: {rule}")
    if source is None and reads:
        raise ValueError("source is None: this model reads a source first")
    if source is not None and not reads:
        raise ValueError(f"source is of shape {np.shape(source)}: this model reads none")
    if source is None and source_valid is not None:
        raise ValueError("source_valid is given without a source")
    if source is not None and len(source) != batch:
        raise ValueError(f"source has {len(source)} rows: batch is {batch}")
    if not reads:
        if isinstance(own, ModelConfig):
            return init_cache(own, batch, capacity, dtype)
        return own.init_state(batch)
    state: Any
    if not own.supports("cache"):
        state = model.apply({"params": params}, source, valid=source_valid, method="init_state")
        return state
    positions = None
    if source_valid is not None:
        assert source is not None
        rows = source if source.ndim == 2 else source[:, :, 0]  # a frame has one place
        valid = check_valid("source", rows, source_valid)
        positions = jnp.where(valid, jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, -1)
    given = dict(capacity=capacity, dtype=dtype, positions=positions)
    state = model.apply({"params": params}, source, **given, method="init_cache")
    return state


def merged(fresh: Params, given: Params) -> tuple[Params, list[str]]:
    """Return fresh parameters with those that are given in their places, and lines about the rest.

    A leaf whose first axis is longer keeps its own last rows. The lines name what stayed fresh, and
    what was given and has no place.
    """
    found, old = flatten_dict(fresh), flatten_dict(given)
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
            rule = f"the model to start from has {list(value.shape)}"
            raise ConfigError(f"{name} has shape {list(leaf.shape)}: {rule}")
    unused = ["/".join(map(str, path)) for path in old if path not in found]
    lines = [f"new parameters: {', '.join(new)}"] if new else []
    lines += [f"parameters that the new model has not: {', '.join(unused)}"] if unused else []
    return unflatten_dict(found), lines
