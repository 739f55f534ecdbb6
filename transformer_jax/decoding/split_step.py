"""Steps of a decoding program whose cache has slots that a mesh splits.

Inside a decoding program the compiler chooses the shardings, and it would gather the keys of most
attention implementations. `SplitStep` runs the model on explicit axes, so that attention and the
cache see how the slots are split: each device attends to its own slots, and a prompt is read in a
ring (see `transformer_jax.attention.ring`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec

from transformer_jax.cache.kv_cache import KVCache
from transformer_jax.decoding.batch_rows import State
from transformer_jax.decoding.step import Params, Step
from transformer_jax.models.places import Captured
from transformer_jax.pytree import PyTree
from transformer_jax.sharding import axis_names, explicit_mesh, split


@dataclass(frozen=True, eq=False)
class SplitStep(Step[State]):
    """Step that runs another step on explicit axes, inside a program with automatic axes.

    Attributes:
        step: the step to run.
        params: the PartitionSpecs of the parameters.
        state: the PartitionSpecs of the state.
        rows: the mesh axes that split the rows.
        axes: the mesh axes that split the slots.
        devices: the number of devices along `axes`. The tokens of a prompt are split over them if
            it divides their number.
    """

    step: Step[State]
    params: PyTree
    state: PyTree
    rows: Any
    axes: tuple[str, ...]
    devices: int

    def _run(
        self, name: str, params: Params, tokens: jax.Array, state: State, *more: Any, **named: Any
    ) -> Any:
        length = tokens.shape[1]
        middle = self.axes if length > 1 and length % self.devices == 0 else None
        given = {key: x for key, x in named.items() if x is not None}
        others = {key: x for key, x in given.items() if not isinstance(x, jax.Array)}
        arrays = {key: x for key, x in given.items() if key not in others}

        def run(
            params: Params, tokens: jax.Array, state: State, more: Any, arrays: dict[str, jax.Array]
        ) -> Any:
            return getattr(self.step, name)(params, tokens, state, *more, **arrays, **others)

        rows = PartitionSpec(self.rows)
        specs = self.params, PartitionSpec(self.rows, middle), self.state, rows, rows
        specs = (*specs[:3], *(jax.tree.map(lambda _: rows, x) for x in (more, arrays)))
        explicit = jax.sharding.explicit_axes(run, in_sharding=specs)
        return explicit(params, tokens, state, more, arrays)

    def __call__(
        self, params: Params, tokens: jax.Array, state: State, *, valid: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        found: tuple[jax.Array, State] = self._run("__call__", params, tokens, state, valid=valid)
        return found

    def read(
        self,
        params: Params,
        tokens: jax.Array,
        state: State,
        at: jax.Array,
        *,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, State]:
        found: tuple[jax.Array, State] = self._run("read", params, tokens, state, at, valid=valid)
        return found

    def look(
        self,
        params: Params,
        tokens: jax.Array,
        state: State,
        capture: tuple[str, ...],
        *,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, State, Captured]:
        found: tuple[jax.Array, State, Captured] = self._run(
            "look", params, tokens, state, capture=capture, valid=valid
        )
        return found

    def with_facts(self, **properties: Any) -> Self:
        return replace(self, step=self.step.with_facts(**properties))

    @property
    def needs_unpadded(self) -> bool:
        return self.step.needs_unpadded


def split_step(step: Step[State], params: Params, state: State) -> Step[State]:
    """Return the step to use inside `by_compiler`: a `SplitStep` if a mesh splits slots."""
    mesh = explicit_mesh(state)
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, KVCache))
    for cache in nodes:
        if mesh is None or not isinstance(cache, KVCache):
            continue
        # a scanned stack has an axis of layers before the slots
        axes = axis_names(split(cache.positions)[cache.positions.ndim - 1])
        if axes:
            devices = math.prod(mesh.shape[axis] for axis in axes)
            of_params, of_state = (jax.tree.map(split, tree) for tree in (params, state))
            rows = split(cache.positions)[0]
            return SplitStep(step, of_params, of_state, rows, axes, devices)
    return step
