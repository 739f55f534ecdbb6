"""Caches whose slots are split over the devices of a mesh.

Each device stores S / P slots of every row. New keys are written by the device that has their
slots. If the new tokens are split over the same mesh axes, they travel around a ring, and each
device writes those that belong to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.sharding import axis_names, explicit_mesh, split, vary


def slot_axes(k: jax.Array) -> tuple[str, ...]:  # of [B, S, K, H]
    """Return the explicit mesh axes that split the slots of a cache."""
    return axis_names(split(k)[1]) if explicit_mesh(k) is not None else ()


def join_split(
    old: dict[str, Any],  # leaves [B, S, ...]
    new: dict[str, Any],  # leaves [B, T, ...]
    axes: tuple[str, ...],
) -> dict[str, Any]:
    """Return the slots followed by the new tokens on each device, without a transfer.

    The order of keys has no meaning, because the positions are among the leaves.
    """
    layout = _Layout(old, new, axes)

    def join(old: dict[str, Any], new: dict[str, Any], positions: jax.Array) -> dict[str, Any]:
        if not layout.travels:
            # all devices have all new tokens, but only one of them may count each token
            is_first = lax.axis_index(axes) == 0
            positions = jnp.where(is_first, positions, -1)
        new = new | dict(positions=positions)
        return jax.tree.map(lambda *parts: jnp.concatenate(vary(parts), axis=1), old, new)

    return layout.run(join, old, new, new["positions"])


def write_split(
    old: dict[str, Any],  # leaves [B, S, ...]
    new: dict[str, Any],  # leaves [B, T, ...]
    slots: jax.Array,  # i32[B, T]
    axes: tuple[str, ...],
) -> dict[str, Any]:
    """Write token t of row b to slot `slots[b, t]`, if that slot exists, without gathering."""
    layout = _Layout(old, new, axes)

    def write(old: dict[str, Any], new: dict[str, Any], slots: jax.Array) -> dict[str, Any]:
        count = old["k"].shape[1]
        first = lax.axis_index(axes) * count

        def with_new(old: dict[str, Any], new: dict[str, Any], slots: jax.Array) -> dict[str, Any]:
            rows, here = jnp.arange(slots.shape[0])[:, None], slots - first
            # slot `count` does not exist, so the scatter drops writes to it
            here = jnp.where((here >= 0) & (here < count), here, count)

            def written(x: jax.Array, y: jax.Array) -> jax.Array:
                x, y, at = vary((x, y, here))  # heads may be split, positions are not
                return x.at[rows, at].set(y, mode="drop")

            return jax.tree.map(written, old, new)

        old, new, slots = jax.tree.map(lambda x: vary(x, first), (old, new, slots))
        old = with_new(old, new, slots)
        if not layout.travels:
            return old
        pairs = [(i, (i + 1) % layout.devices) for i in range(layout.devices)]

        def step(carry: Any, _: None) -> tuple[Any, None]:
            old, new, slots = carry
            send = lambda x: lax.ppermute(x, axes, pairs)  # noqa: E731
            new, slots = jax.tree.map(send, (new, slots))
            return (with_new(old, new, slots), new, slots), None

        found: dict[str, Any] = lax.scan(step, (old, new, slots), None, layout.devices - 1)[0][0]
        return found

    return layout.run(write, old, new, slots)


class _Layout:
    """How the slots of a cache and new tokens are split. Rows and heads are split like the cache.

    Attributes:
        devices: the number of devices that split the slots.
        travels: whether the same devices split the new tokens, which then travel around a ring.
    """

    def __init__(self, old: dict[str, Any], new: dict[str, Any], axes: tuple[str, ...]) -> None:
        mesh = explicit_mesh(old)
        assert mesh is not None
        self.mesh, self.devices = mesh, math.prod(mesh.shape[axis] for axis in axes)
        self.travels = any(axis_names(split(x)[1]) == axes for x in jax.tree.leaves(new))
        middle = axes if self.travels else None
        self.old = jax.tree.map(split, old)
        self.new = jax.tree.map(lambda x: self._with(split(x), middle), old)
        self.tokens = PartitionSpec(self.new["positions"][0], middle)

    @staticmethod
    def _with(spec: PartitionSpec, middle: tuple[str, ...] | None) -> PartitionSpec:
        return PartitionSpec(spec[0], middle, *spec[2:])

    def run(
        self,
        function: Callable[..., dict[str, Any]],
        old: dict[str, Any],
        new: dict[str, Any],
        of_tokens: jax.Array,  # i32[B, T]
    ) -> dict[str, Any]:
        """Return `function(old, new, of_tokens)`, computed by each device for its own slots."""
        specs = self.new, self.tokens
        placed = jax.tree.map(
            lambda x, spec: jax.sharding.reshard(x, NamedSharding(self.mesh, spec)),
            (new, of_tokens), specs,
        )  # fmt: skip
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=(self.old, *specs), out_specs=self.old
        )
        found: dict[str, Any] = mapped(old, *placed)
        return found
