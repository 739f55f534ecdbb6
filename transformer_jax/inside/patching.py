"""Put values of one prompt into the pass over another, to see which place carries the difference.

    table[p, t] = metric(logits(corrupted | value of place p at token t := that of clean))

Sources: Meng et al. 2022, "Locating and editing factual associations in GPT" (causal tracing);
Wang et al. 2023 (arXiv:2211.00593); Nanda 2023, "Attribution patching"; Syed et al. 2023
(arXiv:2310.10348).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.inside.models import Transformer, check_model, known_places, run
from transformer_jax.models.editing import axes_of
from transformer_jax.models.places import Edit
from transformer_jax.pytree import Params

Metric: TypeAlias = Callable[[jax.Array], jax.Array]
"""A function of logits f32[B, T, V], such as the difference of two tokens' at the last position."""

Axis = Literal["token", "head"]


def patch(
    model: Transformer,
    params: Params,
    clean: jax.Array,  # i32[B, T]
    corrupted: jax.Array,  # i32[B, T]
    places: str | Iterable[str],
    metric: Metric,
    *,
    each: Sequence[Axis] = ("token",),
    batch_size: int = 64,
    **arguments: Any,
) -> jax.Array:  # [P, ...]
    """Return the metric of a corrupted prompt, with one value of the clean one put in at a time.

    table[p, t] = metric(logits(corrupted | value p at token t := clean's)): activation patching
    (Meng et al. 2022; Wang et al. 2023). All entries are one compiled program, which runs the model
    `batch_size` entries at a time. Each call compiles it anew; in a `jax.jit` of yours it is
    compiled once.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder.
        params: its parameters, looped or scanned.
        clean: i32[B, T]: the prompt whose values are put in.
        corrupted: i32[B, T]: the prompt that is read.
        places: names of `transformer_jax.places`, which may hold `*`: "block_*/residual".
        metric: a function of logits f32[B, T, V] to an array, such as f32[] or f32[B].
        each: what is put in one by one: ("token",) is a table over tokens, ("head",) over heads,
            ("token", "head") over both, () the whole value of a place. All that an axis is not
            given for is put in together.
        batch_size: entries that run together: so many passes over the prompt are in memory.
        **arguments: others of `model.apply` for both prompts, such as `positions` or `source`.

    Returns:
        [P, T], [P, N], [P, T, N] or [P], with the axes of the metric after them; P places in the
        order of the names.

    Raises:
        ValueError: if the prompts differ in shape, a name is no place, or a place has no such axis.
    """
    names = check_prompts("patch", model, clean, corrupted, places, each, arguments)

    def table(params: Params, clean: jax.Array, corrupted: jax.Array) -> jax.Array:
        apply = partial(run, model, params, arguments)
        values = apply(clean, capture=names)[1]

        def entry(edit: dict[str, Edit]) -> jax.Array:
            return metric(apply(corrupted, edit=edit)[0])

        return map_entries(entry, values, each, batch_size)

    return jax.jit(table)(params, clean, corrupted)


def map_entries(
    entry: Callable[[dict[str, Edit]], jax.Array],
    values: dict[str, jax.Array],  # of each place [B, T, ...]
    each: Sequence[Axis],
    batch_size: int,
) -> jax.Array:  # [P, ...]
    """Return what `entry` makes of each edit that puts one value in: one program for all of them.

    `patch` says what `each` is, and of what shape the table.
    """
    sizes = len(values), *_sizes(values, each)

    def one(index: jax.Array) -> jax.Array:  # i32[1 + len(each)]
        def put(number: int, name: str) -> Edit:
            def edit(value: jax.Array) -> jax.Array:
                chosen = index[0] == number
                for i, axis in enumerate(each, 1):
                    shape = [1] * value.ndim
                    shape[axes_of(name, value.ndim)[axis]] = -1
                    chosen = chosen & (jnp.arange(sizes[i]) == index[i]).reshape(shape)
                return jnp.where(chosen, values[name], value)

            return edit

        return entry({name: put(number, name) for number, name in enumerate(values)})

    # entries differ in an index, not in their program, so that one compilation serves all
    grid = jnp.asarray(np.stack(np.unravel_index(np.arange(prod(sizes)), sizes), axis=1))
    found = jax.lax.map(one, grid, batch_size=min(batch_size, len(grid)))
    return found.reshape(*sizes, *found.shape[1:])


def attribution_patching(
    model: Transformer,
    params: Params,
    clean: jax.Array,  # i32[B, T]
    corrupted: jax.Array,  # i32[B, T]
    places: str | Iterable[str],
    metric: Metric,
    *,
    each: Sequence[Axis] = ("token",),
    **arguments: Any,
) -> jax.Array:  # f32[P, ...]
    """Return to first order what `patch` adds to the metric of the corrupted prompt.

    table[p, t] = sum (clean_p,t - corrupted_p,t) * d metric / d value_p,t, the slope that of the
    corrupted prompt (Nanda 2023; Syed et al. 2023): two passes and one gradient for all entries.
    `patch(...)` is about `metric(corrupted) + table` where the values are near each other.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder.
        params: its parameters, looped or scanned.
        clean: i32[B, T]: the prompt whose values would be put in.
        corrupted: i32[B, T]: the prompt that is read.
        places: names of `transformer_jax.places`, which may hold `*`.
        metric: a differentiable function of logits f32[B, T, V] to f32[].
        each: the axes of the table, as of `patch`; the others are summed.
        **arguments: others of `model.apply` for both prompts.

    Returns:
        f32[P, T], [P, N], [P, T, N] or [P].

    Raises:
        ValueError: if the prompts differ in shape, a name is no place, or a place has no such axis.
    """
    names = check_prompts("attribution_patching", model, clean, corrupted, places, each, arguments)

    def table(params: Params, clean: jax.Array, corrupted: jax.Array) -> jax.Array:
        apply = partial(run, model, params, arguments)
        values = apply(clean, capture=names)[1]
        _sizes(values, each)

        def of(deltas: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            def put(delta: jax.Array) -> Edit:
                return lambda value: value + delta

            edit = {name: put(delta) for name, delta in deltas.items()}
            logits, captured = apply(corrupted, edit=edit, capture=names)
            return metric(logits), captured

        # the slope of a delta of zeros is the slope of the value at its place
        zeros = jax.tree.map(jnp.zeros_like, values)
        slopes, own = jax.grad(of, has_aux=True)(zeros)

        def along(name: str) -> jax.Array:
            value, slope = values[name], slopes[name].astype(jnp.float32)
            axes = axes_of(name, value.ndim)
            change = (value.astype(jnp.float32) - own[name].astype(jnp.float32)) * slope
            kept = [axes[axis] for axis in each]
            summed = change.sum([i for i in range(value.ndim) if i not in kept])
            return summed.transpose(np.argsort(np.argsort(kept)))

        return jnp.stack([along(name) for name in names])

    return jax.jit(table)(params, clean, corrupted)


def check_prompts(
    tool: str,
    model: Transformer,
    clean: jax.Array,
    corrupted: jax.Array,
    places: str | Iterable[str],
    each: Sequence[Axis],
    arguments: dict[str, Any],
) -> tuple[str, ...]:
    """Return the places of the names; ValueError for what does not fit the model or each other."""
    check_model(tool, model, arguments, "capture edit")
    if np.shape(clean) != np.shape(corrupted):
        rule = f"must be that of corrupted, {list(np.shape(corrupted))}"
        raise ValueError(f"clean has shape {list(np.shape(clean))}: {rule}")
    if isinstance(each, str) or len(set(each)) < len(each) or set(each) - {"token", "head"}:
        raise ValueError(f"each is {each!r}: must be of 'token' and 'head', such as ('token',)")
    names = known_places(model, places)
    if not names:
        raise ValueError("places is empty: transformer_jax.places(config) lists them")
    for name in names:
        if name.startswith("encoder/"):
            rule = "both prompts are those of the decoder, and share their source"
            raise ValueError(f"{tool} of {name}: {rule}")
    return names


def _sizes(values: dict[str, jax.Array], each: Sequence[Axis]) -> list[int]:
    """Return the sizes of the axes of a table; ValueError where places differ in them."""
    found: dict[str, int] = {}
    for name, value in values.items():
        axes = axes_of(name, value.ndim)
        for axis in each:
            if axis not in axes:
                raise ValueError(f"each is {tuple(each)!r}: {name} has no {axis}s")
            size = value.shape[axes[axis]]
            if found.setdefault(axis, size) != size:
                rule = f"{name} has {size} {axis}s, the places before it {found[axis]}"
                raise ValueError(f"places of different sizes: {rule}")
    return [found[axis] for axis in each]
