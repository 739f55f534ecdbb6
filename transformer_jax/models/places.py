"""Named values inside a model, which can be captured or edited.

Each named value is called a place. `places(config)` lists the names and shapes of all places.
`model.apply(..., capture=(name, ...))` also returns a dict of the values at those places, as its
last result. `model.edited({name: function})` replaces a value with the result of a function:

    capture = "block_1/residual", "block_*/attention/weights"
    logits, cache, captured = model.apply({"params": params}, tokens, capture=capture)

    without = model.edited({"block_0/attention/heads": lambda heads: heads.at[:, :, 2].set(0)})
    logits, cache = without.apply({"params": params}, tokens)

Edits run before captures. `*` matches any block number. Names are static. Values, including
captured values, may be traced, mapped and differentiated, and an edit function may close over
arrays. Places are the same in looped and scanned models, with or without a cache. If nothing is
captured or edited, the compiled program does not change.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import AnyModelConfig, ModelConfig
from transformer_jax.config.fields import nearest
from transformer_jax.kernels.contract import Index
from transformer_jax.models.editing import WHOLE, Call, Edit, EditSpec, apply_edit
from transformer_jax.values import shape_text, value_class

Captured = dict[str, jax.Array]
Shape = tuple[str | int, ...]

IN_BLOCK = {
    "hook_resid_pre": "residual of the block before",
    "hook_resid_mid": "residual_mid",
    "hook_resid_post": "residual",
    "hook_attn_out": "attention/output",
    "hook_mlp_out": "feed_forward/output",
    "attn.hook_q": "attention/query",
    "attn.hook_k": "attention/key",
    "attn.hook_rot_q": "attention/query",
    "attn.hook_rot_k": "attention/key",
    "attn.hook_v": "attention/value",
    "attn.hook_pattern": "attention/weights",
    "attn.hook_z": "attention/heads",
    "mlp.hook_post": "feed_forward/hidden",
}
"""Place within a block that corresponds to each TransformerLens hook."""
OF_ATTEND = "query", "key", "value", "weights", "key_positions", "heads"
"""Attention places in a custom block, which `attend` visits."""
_BLOCK = re.compile(r"block_(\d+)/(.*)")


def places(config: AnyModelConfig | nn.Module) -> dict[str, Shape]:
    """Return the name and shape of each place in a model, given its config or the model itself.

    In a shape, letters denote the sizes of a call: B rows, T tokens and S keys. With a cache, S is
    the number of its slots, plus the number of new tokens if the cache is shorter than its window.
    In an encoder-decoder, names of encoder places start with "encoder/", and their T is the number
    of source tokens. For a `StreamingEncoder`, pass the model itself. It has no logits, and T is
    the number of frames.

        embedding            the input of the first block or layer
        block_i/residual     the output of block i, after its branches
        block_i/residual_mid the stream before the feed-forward branch, unless branches are parallel
        .../input, output    the input (after the norm) and the output of a branch
        .../query            after `qk_norm` and rotation
        .../key              like the query; only the tokens of the call, without cached ones
        .../value            only the tokens of the call, without cached ones
        .../weights          attention after the softmax, before dropout: a row sums to 1, to less
                             with `attention_sinks`, and to 0 if it sees nothing
        .../key_positions    positions of the keys, negative for empty slots; cannot be edited
        .../gate             the sigmoid that multiplies the heads, with `attention_gate`
        .../heads            the output of each head, before the output matrix
        .../latent           of a latent_attention layer, after its norm, with one head
        .../rotated_key      of a latent_attention layer, shared by all heads
        .../decay, beta      of a gated_delta layer, per head: the logarithm of the factor for the
                             state (per channel with `decay_rank`), and the strength of the write
        .../state            of a gated_delta layer, after the last token; cannot be edited
        .../hidden           the hidden layer of a feed-forward branch, after its activation; with
                             experts, one per chosen expert; or of a short_conv layer
        .../up               of a short_conv layer, before its gates
        .../input_gate       multiplies `up` before the convolution of a short_conv layer
        .../output_gate      multiplies the result of this convolution
        .../router           the logits that choose and weigh the experts
        final_norm           the input of the output matrix, if the config has such a norm
        logits               as returned

    Recurrent models, and models that read a window of C tokens, have:

        layer_i/hidden       the state h of layer i, input of the next token and layer
        layer_i/cell         the cell state c of an LSTM, input of the next token
        layer_i/output       the output of an encoder or tagger layer, in both directions
        attention/weights    attention over the source's tokens
        attention/context    the weighted average of their states
        read_out             the input of the output matrix

    A function that edits the state or the attention of a recurrent model receives one token at a
    time, so T is 1. Convolutional models have only `read_out` and `logits`, because they recompute
    the vectors of earlier tokens. N-gram models have only `logits`.
    """
    if isinstance(config, nn.Module) and isinstance(
        own := getattr(config, "config", None), AnyModelConfig
    ):
        found = places(own)
        if hasattr(config, "frame_dim"):  # a StreamingEncoder
            del found["logits"]
        return found
    if not isinstance(config, AnyModelConfig):
        raise ValueError(
            f"config is of type {type(config).__name__}: must be a config, or build(config)"
        )
    if not isinstance(config, ModelConfig):
        return config.places()
    found = _stack_places(config, config.decoder_layers, cross=config.kind == "encoder-decoder")
    if config.kind == "encoder":
        found = _stack_places(config, config.num_layers)
    if config.kind == "encoder-decoder":
        source = _stack_places(config, config.num_layers)
        found |= {f"encoder/{name}": shape for name, shape in source.items()}
    if config.has_logits:
        found["logits"] = ("B", "T", config.vocab_size)
    return found


def _stack_places(config: ModelConfig, depth: int, *, cross: bool = False) -> dict[str, Shape]:
    N, K, H, Hv = config.num_heads, config.kv_heads, config.key_dim, config.value_dim
    stream: Shape = ("B", "T", config.d_model)

    gate: dict[str, Shape] = {"gate": ("B", "T", N, Hv)} if config.attention_gate else {}

    def attention(S: str) -> dict[str, Shape]:
        return {
            "input": stream,
            "query": ("B", "T", N, H),
            "key": ("B", S, K, H),
            "value": ("B", S, K, Hv),
            "weights": ("B", N, "T", "S"),
            "key_positions": ("B", "S"),
            **gate,
            "heads": ("B", "T", N, Hv),
            "output": stream,
        }

    mixers = {"attention": attention("T")}
    if config.gated_delta is not None:
        sizes = config.gated_delta
        keys = "B", "T", sizes.num_key_heads, sizes.key_dim
        values = "B", "T", sizes.num_value_heads, sizes.value_dim
        mixers["gated_delta"] = {
            "input": stream,
            "query": keys,
            "key": keys,
            "value": values,
            "decay": values[:3] if sizes.decay_rank is None else (*values[:3], sizes.key_dim),
            "beta": values[:3],
            "state": ("B", sizes.num_value_heads, sizes.key_dim, sizes.value_dim),
            "heads": values,
            "output": stream,
        }
    gated = "input", "up", "input_gate", "output_gate", "hidden", "output"
    mixers["short_conv"] = dict.fromkeys(gated, stream)
    if (latent := config.latent_attention) is not None:
        mixers["latent_attention"] = {
            "input": stream,
            "query": ("B", "T", N, latent.key_dim),
            "latent": ("B", "T", 1, latent.kv_rank),
            "rotated_key": ("B", "T", 1, latent.rope_dim),
            "weights": ("B", N, "T", "S"),
            "key_positions": ("B", "S"),
            "heads": ("B", "T", N, latent.value_dim),
            "output": stream,
        }
    rest = {"cross_attention": attention("S")} if cross else {}
    dense: dict[str, Shape] = {"input": stream, "hidden": ("B", "T", config.ff_dim)}
    routed = dense
    if config.experts is not None:
        hidden: Shape = "B", "T", config.experts.top_k, config.expert_dim
        routed = {"input": stream, "hidden": hidden, "router": ("B", "T", config.experts.count)}
    has_mid = bool(config.ff_dim) and not config.is_parallel
    ends = {"residual_mid": stream, "residual": stream} if has_mid else {"residual": stream}
    found = {"embedding": stream}
    for i in range(depth):
        branches = {config.mixer(i): mixers[config.mixer(i)]} | rest
        if config.ff_dim:
            one = routed if config.has_experts(i) else dense
            branches["feed_forward"] = one | {"output": stream}
        block = {
            f"{b}/{name}": x for b, each in branches.items() for name, x in each.items()
        } | ends
        if config.block is not None and config.block.is_whole:
            visited = "residual", *(f"attention/{name}" for name in OF_ATTEND)
            block = {name: shape for name, shape in block.items() if name in visited}
        found |= {f"block_{i}/{name}": shape for name, shape in block.items()}
    return found if config.norm_order == "post" else found | {"final_norm": stream}


OF_SOURCE = "cross_attention/key", "cross_attention/value"
"""Suffixes of the names of places with one entry per source token."""


Edits = tuple[tuple[str, EditSpec], ...]
"""Edits keyed by place name, which are hashable so that they can be a static argument."""


def named_edits(config: AnyModelConfig | nn.Module, edit: Mapping[str, Edit]) -> Edits:
    """Expand `*` in the names of an edit. Raise ValueError if a name or function is invalid."""
    if not isinstance(edit, Mapping):
        raise ValueError(
            f"edit is of type {type(edit).__name__}: must be a dict that maps places to functions"
        )
    known = list(places(config)) if edit else []
    found: dict[str, EditSpec] = {}
    for pattern, function in edit.items():
        if not callable(function) and not isinstance(function, EditSpec):
            value = shape_text(function) if hasattr(function, "shape") else repr(function)
            raise ValueError(f"edit[{pattern!r}] is {value}: must be a function of the old value")
        names, spec = _expand(pattern, known), EditSpec.of(function)
        if (count := getattr(spec.function, "per_block", None)) not in (None, len(names)):
            rule = f"{pattern} matches {len(names)}"
            raise ValueError(f"edit of {pattern} has values for {count} blocks: {rule}")
        for name in names:
            if name in found:
                raise ValueError(f"edit contains {name} twice: {pattern!r} matches it again")
            if name.endswith(("/key_positions", "/state")):
                kind = "positions" if name.endswith("/key_positions") else "states"
                raise ValueError(f"edit contains {name}, but {kind} can only be captured")
            found[name] = spec
    return tuple(found.items())


@value_class(static=("capture", "edit", "prefix", "call"))
class Places:
    """Names of the captured and edited places, which are static and thus known while tracing."""

    capture: tuple[str, ...] = ()
    edit: Edits = ()
    prefix: str = ""
    """Prefix that `inside` removed from all names and that error messages restore."""
    call: Call = WHOLE
    """Facts about the tokens in the call."""

    @classmethod
    def of(
        cls,
        model: AnyModelConfig | nn.Module,
        capture: Iterable[str] = (),
    ) -> Places:
        """Return the places of a model's edits and of `capture`, whose names may contain `*`.

        Raises ValueError if a name matches no place.
        """
        edits: Edits = model.edits if isinstance(model, nn.Module) else ()
        if not capture and not edits:  # in the usual call, do not list any names
            return NOWHERE
        if isinstance(capture, str):
            raise ValueError(
                f"capture is {capture!r}: must be a tuple of place names, such as ({capture!r},)"
            )
        known = list(places(model)) if capture else []
        names = dict.fromkeys(name for pattern in capture for name in _expand(pattern, known))
        return cls(tuple(names), edits)

    def inside(self, prefix: str) -> Places:
        """Return the places whose names start with `prefix`, without the prefix."""
        if self is NOWHERE:
            return self
        cut = len(prefix)
        return Places(
            tuple(name[cut:] for name in self.capture if name.startswith(prefix)),
            tuple((name[cut:], f) for name, f in self.edit if name.startswith(prefix)),
            self.prefix + prefix,
        )

    def with_facts(
        self,
        positions: jax.Array | None,  # i32[B, T] or [T]
        *,
        whole: bool = True,
        packed: bool = False,
        count: int | None = None,
    ) -> Places:
        """Return the places with facts about a call's tokens (see `Call.of`).

        A model that passes one token at a time to its edits must specify `count`, the number of
        tokens. An edit of a later token then raises ValueError.
        """
        if not self.edit:
            return self
        call = Call.of(positions, whole=whole, packed=packed)
        if whole and count is not None:
            for _, spec in self.edit:
                if not spec.part and (check := getattr(spec.function, "check", None)):
                    check((count,) if call.lengths is None else call.lengths)
        return replace(self, call=call)

    def visit(
        self,
        layer: Index | None = None,
        positions: jax.Array | None = None,  # i32[B, T] or [T], positions of the tokens
        source: jax.Array | None = None,  # i32[B, S], source positions for cross-attention
    ) -> Visit:
        """Return a visit to the places in a block, or outside the blocks if `layer` is None.

        `layer` is the index of the block, and is i32[] in a scan. A scan visits the places of all
        blocks in one trace, and applies an edit only if the block matches.
        """
        if self is NOWHERE:
            return Visit()
        known = None if isinstance(layer, jax.Array) else layer
        here: dict[str, tuple[str, int | None]] = {}
        for name in (*self.capture, *dict(self.edit)):
            found = _BLOCK.match(name)
            if found is None and layer is None:
                here[name] = name, None
            # a scan traces a single block, so it visits the places of all blocks
            elif found and layer is not None and known in (None, int(found[1])):
                here[name] = found[2], int(found[1]) if known is None else None
        capture = {here[name][0] for name in self.capture if name in here}
        edits: dict[str, list[BlockEdit]] = {}
        for name, spec in self.edit:
            if name not in here:
                continue
            place, number = here[name]
            earlier = edits.setdefault(place, [])
            same = bool(earlier) and earlier[-1].spec == spec
            if number is not None and same and number not in earlier[-1].blocks:
                # a scan applies a function for several blocks once, not once per block
                earlier[-1] = earlier[-1]._replace(blocks=(*earlier[-1].blocks, number))
            else:
                blocks = () if number is None else (number,)
                earlier.append(BlockEdit(self.prefix + name, blocks, spec))
        return Visit(capture, edits, layer, positions, source, self.call)

    def sparse(self, depth: int) -> dict[str, tuple[str, int]]:
        """Map the name of each place captured in at most half the blocks to its place and block.

        A scan carries these values, because stacking them would store the values of all blocks.
        """
        found = [(name, at) for name in self.capture if (at := _BLOCK.match(name))]
        counts = Counter(at[2] for _, at in found)
        return {name: (at[2], int(at[1])) for name, at in found if counts[at[2]] * 2 <= depth}

    def empty(self, shapes: Mapping[str, jax.ShapeDtypeStruct], depth: int) -> Captured:
        """Return zeros as the initial carry for the `sparse` values, keyed by full name."""
        sparse = self.sparse(depth)
        return {name: jnp.zeros_like(shapes[place]) for name, (place, _) in sparse.items()}

    def keep(
        self, sparse: Captured, captured: Captured, layer: jax.Array
    ) -> tuple[Captured, Captured]:
        """Update the carried `sparse` values with those of block `layer` and return the others.

        The names in `captured` are relative to the block.
        """
        places = {name: _BLOCK.match(name) for name in sparse}
        carried = {
            name: jnp.where(layer == int(at[1]), captured[at[2]], sparse[name])
            for name, at in places.items()
            if at
        }
        taken = {at[2] for at in places.values() if at}
        return carried, {name: x for name, x in captured.items() if name not in taken}

    def collect(self, scanned: Captured) -> Captured:  # leaves [B, L, ...], by name within a block
        """Convert the stacked values of a scan to values keyed by full name."""
        found = ((name, _BLOCK.match(name)) for name in self.capture)
        return {
            name: scanned[at[2]][:, int(at[1])] for name, at in found if at and at[2] in scanned
        }

    def in_order(self, captured: Captured) -> Captured:
        """Return the captured values in the requested order."""
        return {name: captured[name] for name in self.capture}


class BlockEdit(NamedTuple):
    """Edit that applies to a place in a block."""

    place: str
    """Name that the user specified."""
    blocks: tuple[int, ...]
    """Indices of the blocks that a scan edits; empty means the current block."""
    spec: EditSpec


NOWHERE = Places()


class Visit:
    """Edits and captures of the named values in one block, or of those outside the blocks."""

    def __init__(
        self,
        capture: Iterable[str] = (),
        edits: Mapping[str, list[BlockEdit]] | None = None,
        layer: Index | None = None,
        positions: jax.Array | None = None,
        source: jax.Array | None = None,
        call: Call = WHOLE,
    ) -> None:
        self.capture, self.edits, self.layer = frozenset(capture), edits or {}, layer
        # positions [T] are always arange(T), which is the default for an edit
        self.positions = None if positions is None or positions.ndim == 1 else positions
        self.source, self.call = source, call
        self.requested = self.capture.union(self.edits)
        """Names of the places that are captured or edited."""
        self.captured: Captured = {}

    def __call__(self, name: str, value: jax.Array, single: bool = False) -> jax.Array:
        """Apply the edits of this place and store the result if it is captured.

        `single` means that the model reads one token at a time and that the value belongs to one
        token.
        """
        if name not in self.requested:
            return value
        positions, call = self.positions, self.call
        of_source = name.endswith(OF_SOURCE)
        if of_source:
            positions, call = self.source, Call.of(self.source)
        if self.edits and self.layer is not None:
            call = replace(call, layer=self.layer)
        for place, blocks, spec in self.edits.get(name, ()):
            if of_source:  # every call contains the whole source
                spec = replace(spec, part=False, first=0)
            result = apply_edit(place, spec, value, positions, call, single)
            rule = f"must be {value.dtype}{list(value.shape)}"
            if result is None:
                raise ValueError(f"edit of {place} returns None: {rule}")
            try:
                changed = jnp.asarray(result)
            except (TypeError, ValueError):
                kind = type(result).__name__
                raise ValueError(
                    f"edit of {place} returns an object of type {kind}: {rule}"
                ) from None
            if changed.shape != value.shape or changed.dtype != value.dtype:
                shape = f"{changed.dtype}{list(changed.shape)}"
                raise ValueError(f"edit of {place} returns {shape}: {rule}")
            if blocks:
                # a scan traces the edit once for all blocks
                here = jnp.isin(jnp.asarray(self.layer), np.array(blocks))
                changed = jnp.where(here, changed, value)
            value = changed
        if name in self.capture:
            self.captured[name] = value
        return value

    def token(self, name: str, value: jax.Array) -> jax.Array:
        """Visit a place with the value [B, ...] of a single token, which has no token axis."""
        if name not in self.requested:
            return value
        value = self(name, value[:, None], single=True)[:, 0]
        if name in self.captured:
            self.captured[name] = value
        return value


def _expand(name: str, known: list[str]) -> list[str]:
    """Return the places that match a name, which may contain `*`."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not the name of a place: must be a string")
    pattern = re.compile("[^/]*".join(map(re.escape, name.split("*"))))
    found = [place for place in known if pattern.fullmatch(place)] if "*" in name else [name]
    if not found or found[0] not in known:
        rule = "transformer_jax.places(config) lists them"
        if hook := re.fullmatch(r"(?:blocks\.(\d+|\*)\.)?((?:.*\.)?hook_.+)", name):
            place = f"block_{hook[1]}/{IN_BLOCK.get(hook[2])}"
            if hook[2] == "hook_resid_pre" and hook[1] != "*":
                place = "embedding" if hook[1] == "0" else f"block_{int(hook[1]) - 1}/residual"
            rule = "interpret.place_of_hook(config, ...) translates the hooks of TransformerLens"
            if hook[2] not in ("attn.hook_q", "attn.hook_k") and place.replace("*", "0") in known:
                rule = f"this TransformerLens hook is {place!r}"
            raise ValueError(f"no place is named {name!r}: {rule}")
        raise ValueError(f"no place is named {name!r}: {rule}{nearest(name, known)}")
    return found
