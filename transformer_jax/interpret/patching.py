"""Activation patching and attribution patching, which find the places that make two prompts differ.

Sources: Meng et al. 2022, "Locating and editing factual associations in GPT" (causal tracing);
Wang et al. 2023 (arXiv:2211.00593); Nanda 2023, "Attribution patching"; Syed et al. 2023
(arXiv:2310.10348).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.interpret.models import Transformer, check_model, resolve_places, run
from transformer_jax.models.editing import axes_of
from transformer_jax.models.places import Edit
from transformer_jax.pytree import Params

Metric: TypeAlias = Callable[[jax.Array], jax.Array]
"""Function of the logits f32[B, T, V], such as a logit difference at the last position."""

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
    """Return the metric of a corrupted prompt with one clean value patched in at a time.

    This is activation patching (Meng et al. 2022; Wang et al. 2023): table[p, t] =
    metric(logits(corrupted | value p at token t := clean value)). One program computes all entries,
    `batch_size` at a time. Each call compiles the program again, unless you call `patch` inside
    your own `jax.jit`.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder.
        params: the parameters of the model, with a looped or a scanned stack.
        clean: i32[B, T], the prompt that provides the values.
        corrupted: i32[B, T], the prompt that the model reads.
        places: names of places in `transformer_jax.places`; may contain `*` as a wildcard, as in
            "block_*/residual".
        metric: a function of logits f32[B, T, V] to an array, such as f32[] or f32[B].
        each: axes to patch separately. ("token",) returns a table over tokens, ("head",) a table
            over heads, and ("token", "head") a table over both. () patches the whole value of a
            place at once.
        batch_size: the number of entries computed at a time. Each needs memory for a forward pass.
        **arguments: other arguments that `model.apply` gets for both prompts, such as `source`.

    Returns:
        The table: [P, T], [P, N], [P, T, N] or [P] for P places in the given order, followed by the
        axes of the metric.

    Raises:
        ValueError: if the prompts differ in shape, a name matches no place, or a place lacks an
            axis of `each`.
    """
    names = check_prompts("patch", model, clean, corrupted, places, each, arguments)

    def table(params: Params, clean: jax.Array, corrupted: jax.Array) -> jax.Array:
        values = run(model, params, arguments, clean, capture=names)[1]

        def entry(edit: dict[str, Edit]) -> jax.Array:
            return metric(run(model.edited(edit), params, arguments, corrupted)[0])

        return map_entries(entry, values, each, batch_size)

    return jax.jit(table)(params, clean, corrupted)


def map_entries(
    entry: Callable[[dict[str, Edit]], jax.Array],
    values: dict[str, jax.Array],  # [B, T, ...] for each place
    each: Sequence[Axis],
    batch_size: int,
) -> jax.Array:  # [P, ...]
    """Return `entry(edit)` for every edit that patches one value, computed in one program.

    See `patch` for `each` and the shape of the table.
    """
    sizes = len(values), *_axis_sizes(values, each)

    def one(index: jax.Array) -> jax.Array:  # i32[1 + len(each)]
        def put(number: int, name: str) -> Edit:
            def edit(value: jax.Array) -> jax.Array:
                selected = index[0] == number
                for i, axis in enumerate(each, 1):
                    shape = [1] * value.ndim
                    shape[axes_of(name, value.ndim)[axis]] = -1
                    selected = selected & (jnp.arange(sizes[i]) == index[i]).reshape(shape)
                return jnp.where(selected, values[name], value)

            return edit

        return entry({name: put(number, name) for number, name in enumerate(values)})

    # entries differ only in an index, so one compiled program computes all of them
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
    """Return a first-order estimate of how much `patch` changes the metric.

    table[p, t] = sum (clean_p,t - corrupted_p,t) * d metric / d value_p,t, with the gradient at the
    corrupted prompt (Nanda 2023; Syed et al. 2023). All entries need only two forward passes and
    one gradient. If the clean and corrupted values are close, `patch(...)` is about
    `metric(corrupted) + table`.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder.
        params: the parameters of the model, with a looped or a scanned stack.
        clean: i32[B, T], the prompt that provides the values.
        corrupted: i32[B, T], the prompt that the model reads.
        places: names of places in `transformer_jax.places`; may contain `*` as a wildcard.
        metric: a differentiable function of logits f32[B, T, V] to f32[].
        each: the axes of the table, as in `patch`. The other axes are summed.
        **arguments: other arguments that `model.apply` gets for both prompts.

    Returns:
        The table, f32[P, T], f32[P, N], f32[P, T, N] or f32[P].

    Raises:
        ValueError: if the prompts differ in shape, a name matches no place, or a place lacks an
            axis of `each`.
    """
    names = check_prompts("attribution_patching", model, clean, corrupted, places, each, arguments)

    def table(params: Params, clean: jax.Array, corrupted: jax.Array) -> jax.Array:
        values = run(model, params, arguments, clean, capture=names)[1]
        _axis_sizes(values, each)

        def patched(deltas: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            def put(delta: jax.Array) -> Edit:
                return lambda value: value + delta

            shifted = model.edited({name: put(delta) for name, delta in deltas.items()})
            logits, captured = run(shifted, params, arguments, corrupted, capture=names)
            return metric(logits), captured

        # the gradient with respect to a delta of zero is the gradient with respect to the value
        zeros = jax.tree.map(jnp.zeros_like, values)
        gradients, before = jax.grad(patched, has_aux=True)(zeros)

        def estimate(name: str) -> jax.Array:
            value, gradient = values[name], gradients[name].astype(jnp.float32)
            axes = axes_of(name, value.ndim)
            change = (value.astype(jnp.float32) - before[name].astype(jnp.float32)) * gradient
            kept = [axes[axis] for axis in each]
            summed = change.sum([i for i in range(value.ndim) if i not in kept])
            # the sum has the axes in the order of the value, but the table has them in the order of
            # `each`
            return summed.transpose(np.argsort(np.argsort(kept)))

        return jnp.stack([estimate(name) for name in names])

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
    """Return the places that match the names; raise ValueError if an argument is invalid."""
    check_model(tool, model, arguments, "capture")
    if np.shape(clean) != np.shape(corrupted):
        rule = f"must be the shape of corrupted, {list(np.shape(corrupted))}"
        raise ValueError(f"clean has shape {list(np.shape(clean))}: {rule}")
    if isinstance(each, str) or len(set(each)) < len(each) or set(each) - {"token", "head"}:
        raise ValueError(f"each is {each!r}: must contain 'token' or 'head', such as ('token',)")
    names = resolve_places(model, places)
    if not names:
        raise ValueError("places is empty: transformer_jax.places(config) lists the known places")
    for name in names:
        if name.startswith("encoder/"):
            rule = "both prompts are read by the decoder, and they share one source"
            raise ValueError(f"{tool} does not support {name}: {rule}")
    return names


def _axis_sizes(values: dict[str, jax.Array], each: Sequence[Axis]) -> list[int]:
    """Return the sizes of the axes of a table; raise ValueError if the places differ in size."""
    found: dict[str, int] = {}
    for name, value in values.items():
        axes = axes_of(name, value.ndim)
        for axis in each:
            if axis not in axes:
                raise ValueError(f"each is {tuple(each)!r}: {name} has no {axis}s")
            size = value.shape[axes[axis]]
            if found.setdefault(axis, size) != size:
                rule = f"{name} has {size} {axis}s, but earlier places have {found[axis]}"
                raise ValueError(f"places must have equal sizes: {rule}")
    return [found[axis] for axis in each]
