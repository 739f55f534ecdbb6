"""Path patching: the effect of a value along selected paths.

A sender writes to the residual stream, and receivers read it. A value that `patch` inserts changes
all later computation. In path patching, the branches between sender and receivers are frozen, so
the sender affects the receivers only directly.

Sources: Wang et al. 2022 (arXiv:2211.00593), section 3.1 and appendix B; Goldowsky-Dill et al. 2023
(arXiv:2304.05969), "Localizing model behavior with path patching".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from transformer_jax.interpret.edits import Indices, resample
from transformer_jax.interpret.models import Transformer, resolve_places, run
from transformer_jax.interpret.patching import Axis, Metric, check_prompts, map_entries
from transformer_jax.models.places import Edit
from transformer_jax.pytree import Params

_WRITES = "embedding", "heads", "output", "residual", "residual_mid"
"""Last parts of the names of places whose value is the stream or is added to it."""


def path_patching(
    model: Transformer,
    params: Params,
    clean: jax.Array,  # i32[B, T]
    corrupted: jax.Array,  # i32[B, T]
    senders: str | Iterable[str],
    receivers: str | Iterable[str] | Mapping[str, Indices | None],
    metric: Metric,
    *,
    recomputed: str | Iterable[str] = (),
    each: Sequence[Axis] = ("head",),
    batch_size: int = 64,
    **arguments: Any,
) -> jax.Array:  # [P, ...]
    """Return the metric of a corrupted prompt with one clean value at a time on selected paths.

    table[s] = metric(logits(corrupted | receivers := r_s)), where r_s are the values of the
    receivers when sender s has its clean value and all heads and feed-forward branches are frozen
    at their corrupted values (Wang et al. 2022; Goldowsky-Dill et al. 2023). If the receiver is
    "logits", the table contains the direct effect of each sender, through the last stream only.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder.
        params: the parameters of the model, with a looped or a scanned stack.
        clean: i32[B, T], the prompt that provides the values.
        corrupted: i32[B, T], the prompt that the model reads.
        senders: places that write to the stream, such as "block_*/attention/heads", an "output",
            the "embedding" or a "residual"; may contain `*` as a wildcard.
        receivers: places that read the stream, such as "logits", "block_3/attention/query" or
            "block_3/feed_forward/input". A dict maps each place to its receiving heads (None means
            all).
        metric: a function of logits f32[B, T, V] to an array, such as f32[] or f32[B].
        recomputed: places of branches that are not frozen, so that paths may pass through them,
            such as "block_*/feed_forward/output" (Wang et al. 2022).
        each: axes to patch separately, as in `patch`. An empty tuple patches the whole value of a
            place.
        batch_size: the number of entries computed at a time. Each needs memory for a forward pass.
        **arguments: other arguments that `model.apply` gets for both prompts, such as `source`.

    Returns:
        The table: [P, N], [P, T], [P, T, N] or [P] for P senders in the given order, followed by
        the axes of the metric.

    Raises:
        ValueError: if the prompts differ in shape, if a name matches no place, if a sender does not
            write to the stream, if a receiver does not read it, or if a place lacks an axis in
            `each`.
    """
    tool = "path_patching"
    names = check_prompts(tool, model, clean, corrupted, senders, each, arguments)
    for name in names:
        if name.rpartition("/")[2] not in _WRITES:
            raise ValueError(f"senders contains {name}: must end in one of {', '.join(_WRITES)}")
    mixers = {model.config.mixer(i): None for i in range(model.config.num_layers)}
    branches = [*mixers, *(["feed_forward"] if model.config.ff_dim else [])]
    if model.config.kind == "encoder-decoder":
        branches.append("cross_attention")
    ends = {b: "output" if b in ("feed_forward", "short_conv") else "heads" for b in branches}
    free = resolve_places(model, recomputed)
    frozen = resolve_places(model, [f"block_*/{branch}/{end}" for branch, end in ends.items()])
    for name in free:
        if name not in frozen:
            rule = "must be the heads of attention or the output of another branch"
            raise ValueError(f"recomputed contains {name}: {rule}")
    frozen = tuple(name for name in frozen if name not in free)
    patterns = receivers if isinstance(receivers, Mapping) else dict.fromkeys(
        [receivers] if isinstance(receivers, str) else receivers
    )  # fmt: skip
    reached = {n: heads for one, heads in patterns.items() for n in resolve_places(model, one)}
    if not reached:
        raise ValueError("receivers is empty: pass 'logits' for the direct effect")
    for name in reached:
        written = name.endswith(("attention/output", "gated_delta/output", "short_conv/output"))
        if name in frozen or name.startswith("encoder/") or written:
            rule = "must read the stream: the input, query, key or value of a branch, or logits"
            raise ValueError(f"receivers contains {name}: {rule}")

    def table(params: Params, clean: jax.Array, corrupted: jax.Array) -> jax.Array:
        values = run(model, params, arguments, clean, capture=names)[1]
        constants = run(model, params, arguments, corrupted, capture=frozen)[1]

        def freeze(name: str) -> Edit:
            return lambda value: constants[name]

        def entry(edit: dict[str, Edit]) -> jax.Array:
            freezing = {name: freeze(name) for name in frozen}
            # the sender is frozen too, except at the head or token that the edit patches
            joined: dict[str, Edit] = {
                name: lambda value, name=name: edit[name](freezing[name](value))
                for name in freezing.keys() & edit.keys()
            }
            frozen_model = model.edited(freezing | edit | joined)
            received = run(frozen_model, params, arguments, corrupted, capture=reached)[1]
            # in the last run, only the receivers are fixed, so their effect reaches all later
            # computation
            put: dict[str, Edit] = {}
            for name, heads in reached.items():
                put |= resample({name: received[name]}, heads=heads)
            return metric(run(model.edited(put), params, arguments, corrupted)[0])

        return map_entries(entry, values, each, batch_size)

    return jax.jit(table)(params, clean, corrupted)
