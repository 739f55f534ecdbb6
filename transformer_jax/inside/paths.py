"""Put values of one prompt into the pass over another along chosen paths alone.

A sender writes to the stream, and receivers read it. What `patch` puts in changes all that comes
after it; here it changes what the receivers read directly, and nothing on the way to them:

    held       f_j      the branches, at their values of the corrupted prompt
    received   r_s      receivers(corrupted | f held, sender s := that of clean)
    table[s] = metric(logits(corrupted | receivers := r_s))

Sources: Wang et al. 2022 (arXiv:2211.00593), section 3.1 and appendix B; Goldowsky-Dill et al. 2023
(arXiv:2304.05969), "Localizing model behavior with path patching".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from transformer_jax.inside.edits import Indices, resample
from transformer_jax.inside.models import Transformer, known_places, run
from transformer_jax.inside.patching import Axis, Metric, check_prompts, map_entries
from transformer_jax.models.places import Edit
from transformer_jax.pytree import Params

_WRITES = "embedding", "heads", "output", "residual", "residual_mid"
"""The last parts of places whose value the stream gains, or is."""


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
    """Return the metric of a corrupted prompt, with one clean value at a time on chosen paths.

    table[s] = metric(logits(corrupted | receivers := r_s)), where r_s is what the receivers are
    when sender s is that of the clean prompt and all heads and feed-forward branches are held at
    their values of the corrupted one (Wang et al. 2022; Goldowsky-Dill et al. 2023). With the
    receiver "logits" that is the direct effect: what a sender adds to the last stream, and nothing
    that another branch makes of it. All entries are one compiled program.

    Args:
        model: a decoder, an encoder with logits, or an encoder-decoder.
        params: its parameters, looped or scanned.
        clean: i32[B, T]: the prompt whose values are put in.
        corrupted: i32[B, T]: the prompt that is read.
        senders: places that write to the stream, which may hold `*`: "block_*/attention/heads", an
            "output", "embedding", a "residual".
        receivers: places that read the stream, such as "logits", "block_3/attention/query" or
            "block_3/feed_forward/input"; or a dict of places to the heads of each that receive,
            None all.
        metric: a function of logits f32[B, T, V] to an array, such as f32[] or f32[B].
        recomputed: places of branches that are not held, but computed of what reaches them:
            "block_*/feed_forward/output", as Wang et al. do, lets paths go through these.
        each: what is put in one by one, as of `patch`; () is the whole value of a place.
        batch_size: entries that run together: so many passes over the prompt are in memory.
        **arguments: others of `model.apply` for both prompts, such as `positions` or `source`.

    Returns:
        [P, N], [P, T], [P, T, N] or [P], with the axes of the metric after them; P senders in the
        order of the names.

    Raises:
        ValueError: if the prompts differ in shape, a name is no place, a sender writes nothing to
            the stream, a receiver does not read it, or a place has no such axis.
    """
    tool = "path_patching"
    names = check_prompts(tool, model, clean, corrupted, senders, each, arguments)
    for name in names:
        if name.rpartition("/")[2] not in _WRITES:
            raise ValueError(f"senders has {name}: must be one of {', '.join(_WRITES)}")
    branches = ["attention", *(["feed_forward"] if model.config.ff_dim else [])]
    if model.config.kind == "encoder-decoder":
        branches.append("cross_attention")
    ends = {branch: "output" if branch == "feed_forward" else "heads" for branch in branches}
    free = known_places(model, recomputed)
    held = known_places(model, [f"block_*/{branch}/{end}" for branch, end in ends.items()])
    for name in free:
        if name not in held:
            rule = "must be the heads of attention, or the output of a feed-forward branch"
            raise ValueError(f"recomputed has {name}: {rule}")
    held = tuple(name for name in held if name not in free)
    asked = receivers if isinstance(receivers, Mapping) else dict.fromkeys(
        [receivers] if isinstance(receivers, str) else receivers
    )  # fmt: skip
    reached = {name: heads for one, heads in asked.items() for name in known_places(model, one)}
    if not reached:
        raise ValueError("receivers is empty: 'logits' has the direct effect")
    for name in reached:
        if name in held or name.startswith("encoder/") or name.endswith("attention/output"):
            rule = "must read the stream, as a branch's input, query, key and value, or logits do"
            raise ValueError(f"receivers has {name}: {rule}")

    def table(params: Params, clean: jax.Array, corrupted: jax.Array) -> jax.Array:
        apply = partial(run, model, params, arguments)
        values = apply(clean, capture=names)[1]
        own = apply(corrupted, capture=held)[1]

        def keep(name: str) -> Edit:
            return lambda value: own[name]

        def entry(edit: dict[str, Edit]) -> jax.Array:
            kept = {name: keep(name) for name in held}
            joined: dict[str, Edit] = {
                name: lambda value, name=name: edit[name](kept[name](value))
                for name in kept.keys() & edit.keys()
            }
            found = apply(corrupted, edit=kept | edit | joined, capture=tuple(reached))[1]
            put: dict[str, Edit] = {}
            for name, heads in reached.items():
                put |= resample({name: found[name]}, heads=heads)
            return metric(apply(corrupted, edit=put)[0])

        return map_entries(entry, values, each, batch_size)

    return jax.jit(table)(params, clean, corrupted)
