"""Look inside a model: capture values on the way through it, or change them.

A place is a value with a name. `places(config)` lists the names with their shapes;
`model.apply(..., capture=(name, ...))` returns the values of some in a dict, after what it returns
otherwise; `model.edited({name: function})` puts the result of a function in the place of a value:

    capture = "block_1/residual", "block_*/attention/weights"
    logits, cache, captured = model.apply({"params": params}, tokens, capture=capture)

    without = model.edited({"block_0/attention/heads": lambda heads: heads.at[:, :, 2].set(0)})
    logits, cache = without.apply({"params": params}, tokens)

`edit=` of a model's call is for that call only, after the model's own edits.

A place is edited before it is captured. `*` stands for every number of a block. Names are known
when a program is traced; values and functions may be traced, mapped and differentiated: a captured
value that nobody edits has the gradient of what was computed of it, and a function may close over
arrays. Looped and scanned models have the same places, with a cache and without. Where nothing is
asked for, the program is the one without places.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import AnyModelConfig, ModelConfig
from transformer_jax.config.fields import nearest
from transformer_jax.kernels.contract import Index
from transformer_jax.models.editing import WHOLE, Call, Edit, InCall, apply_edit
from transformer_jax.values import shape_text, value_class

Captured = dict[str, jax.Array]
Shape = tuple[str | int, ...]

NO_EDIT: Mapping[str, Edit] = MappingProxyType({})
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
"""The place within a block of each hook of TransformerLens in a block that has one."""
OF_ATTEND = "query", "key", "value", "weights", "key_positions", "heads"
"""The places of attention that a block of the user's own passes, where it calls `attend`."""
_BLOCK = re.compile(r"block_(\d+)/(.*)")


def places(config: AnyModelConfig | nn.Module) -> dict[str, Shape]:
    """Return the name and the shape of every place of the config's model, or of a model.

    Letters are sizes of a call: B rows, T tokens, S keys (with a cache, its slots, and with one
    that is shorter than its window the new tokens after them); in an encoder of another model,
    whose names begin with "encoder/", T tokens of the source. Of a `StreamingEncoder`, which has no
    logits, ask with the model itself; T are frames.

        embedding            what the first block or layer reads
        block_i/residual     what block i hands on, after its branches
        block_i/residual_mid the stream before its feed-forward branch, unless branches are parallel
        .../input, output    what a branch reads, after its norm, and gives
        .../query, key       as they are compared: normalised and rotated; key and value are those
        .../value            of the tokens of the call, before they are cached
        .../weights          after the softmax, before dropout: a row sums to 1, to less by the
                             share of `attention_sinks`, and to 0 where it sees nothing
        .../key_positions    where the keys stand, negative where there is none; not to be edited
        .../heads            what each head gives, before the output matrix
        .../hidden           the hidden layer of a feed-forward branch, after its activation; of
                             experts, that of each expert that the token is given to
        .../router           the logits by which experts are chosen and weighed
        final_norm           what the output matrix reads, where the config has such a norm
        logits               as they are returned

    Of a recurrent model and of one that reads a window of C tokens:

        layer_i/hidden       the state h of layer i, which goes on to the next token and layer
        layer_i/cell         the c of an LSTM, which goes on to the next token
        layer_i/output       what a layer of an encoder or a tagger gives, both directions
        attention/weights    of the source's tokens; from them follows
        attention/context    the average of their states
        read_out             what the output matrix reads

    A token passes them by itself: of a recurrent model T is 1 where a function edits a state or
    its attention. Convolutions have `read_out` and `logits`: the vectors of earlier tokens are
    computed anew from the tokens. The probabilities of n-grams are known as `logits` alone.
    """
    if isinstance(config, nn.Module) and isinstance(
        own := getattr(config, "config", None), AnyModelConfig
    ):
        found = places(own)
        if hasattr(config, "frame_dim"):  # a StreamingEncoder
            del found["logits"]
        return found
    if not isinstance(config, AnyModelConfig):
        raise ValueError(f"config is a {type(config).__name__}: must be a config, or build(config)")
    if not isinstance(config, ModelConfig):
        return config.places()
    own = _stack_places(config, config.decoder_layers, cross=config.kind == "encoder-decoder")
    if config.kind == "encoder":
        own = _stack_places(config, config.num_layers)
    if config.kind == "encoder-decoder":
        source = _stack_places(config, config.num_layers)
        own |= {f"encoder/{name}": shape for name, shape in source.items()}
    if config.has_logits:
        own["logits"] = ("B", "T", config.vocab_size)
    return own


def _stack_places(config: ModelConfig, depth: int, *, cross: bool = False) -> dict[str, Shape]:
    N, K, H, Hv = config.num_heads, config.kv_heads, config.key_dim, config.value_dim
    stream: Shape = ("B", "T", config.d_model)

    def attention(S: str) -> dict[str, Shape]:
        return {
            "input": stream,
            "query": ("B", "T", N, H),
            "key": ("B", S, K, H),
            "value": ("B", S, K, Hv),
            "weights": ("B", N, "T", "S"),
            "key_positions": ("B", "S"),
            "heads": ("B", "T", N, Hv),
            "output": stream,
        }

    branches = {"attention": attention("T")}
    if cross:
        branches["cross_attention"] = attention("S")
    forward: dict[str, Shape] = {"input": stream, "hidden": ("B", "T", config.ff_dim)}
    if config.experts is not None:
        forward["router"] = "B", "T", config.experts.count
        forward["hidden"] = "B", "T", config.experts.top_k, config.expert_dim
    if config.ff_dim:
        branches["feed_forward"] = forward | {"output": stream}
    block = {f"{b}/{name}": shape for b, own in branches.items() for name, shape in own.items()}
    between = bool(config.ff_dim) and not config.is_parallel
    block |= {"residual_mid": stream, "residual": stream} if between else {"residual": stream}
    if config.block is not None and config.block.is_whole:
        passed = "residual", *(f"attention/{name}" for name in OF_ATTEND)
        block = {name: shape for name, shape in block.items() if name in passed}
    found = {"embedding": stream}
    found |= {f"block_{i}/{name}": shape for i in range(depth) for name, shape in block.items()}
    return found if config.norm_order == "post" else found | {"final_norm": stream}


OF_SOURCE = "cross_attention/key", "cross_attention/value"
"""Ends of the places whose tokens are those of the source."""


Edits = tuple[tuple[str, InCall], ...]
"""Functions by the names of places, in a form that can be a static argument."""


def named_edits(config: AnyModelConfig | nn.Module, edit: Mapping[str, Edit]) -> Edits:
    """Return an edit by the whole names of its places; ValueError if a name or value is none."""
    if not isinstance(edit, Mapping):
        raise ValueError(f"edit is a {type(edit).__name__}: must be a dict of place to function")
    known = list(places(config)) if edit else []
    found: dict[str, InCall] = {}
    for one, function in edit.items():
        if not callable(function) and not isinstance(function, InCall):
            given = shape_text(function) if hasattr(function, "shape") else repr(function)
            raise ValueError(f"edit[{one!r}] is {given}: must be a function of the value")
        names, told = _expand(one, known), InCall.of(function)
        if (count := getattr(told.function, "per_block", None)) not in (None, len(names)):
            rule = f"{one} has {len(names)}"
            raise ValueError(f"edit of {one} has values for {count} blocks: {rule}")
        for name in names:
            if name in found:
                raise ValueError(f"edit has {name} twice: {one!r} names it again")
            if name.endswith("/key_positions"):
                raise ValueError(f"edit has {name}: positions can be captured, not edited")
            found[name] = told
    return tuple(found.items())


@value_class(
    static=(
        "capture",
        "edit",
        "prefix",
        "call",
    )
)
class Places:
    """Say which places of a stack are captured and edited; static, and so known under any trace."""

    capture: tuple[str, ...] = ()
    edit: Edits = ()
    prefix: str = ""
    """Begins every name as the caller wrote it; `inside` cuts it off, and errors put it back."""
    call: Call = WHOLE
    """What is known of the tokens that are read."""

    @classmethod
    def of(
        cls,
        model: AnyModelConfig | nn.Module,
        capture: Iterable[str] = (),
        edit: Mapping[str, Edit] = NO_EDIT,
    ) -> Places:
        """Return the places of names that may hold `*`; ValueError for one that is none.

        The edits of a model come before those of the call.
        """
        own: Edits = model.edits if isinstance(model, nn.Module) else ()
        # the usual call: no list of names is made, and the program is the one without places
        if not capture and not edit and not own:
            return NOWHERE
        if isinstance(capture, str):
            raise ValueError(f"capture is {capture!r}: must be names of places, ({capture!r},)")
        known = list(places(model)) if capture else []
        asked = tuple(dict.fromkeys(name for one in capture for name in _expand(one, known)))
        return cls(asked, (*own, *named_edits(model, edit)))

    def inside(self, prefix: str) -> Places:
        """Return the places whose names begin with `prefix`, named without it."""
        if self is NOWHERE:
            return self
        cut = len(prefix)
        return Places(
            tuple(name[cut:] for name in self.capture if name.startswith(prefix)),
            tuple((name[cut:], f) for name, f in self.edit if name.startswith(prefix)),
            self.prefix + prefix,
        )

    def told(
        self,
        positions: jax.Array | None,  # i32[B, T] or [T]
        *,
        whole: bool = True,
        packed: bool = False,
        count: int | None = None,
    ) -> Places:
        """Return the places with what is known of a call's tokens, as `Call.of` says.

        With the `count` of a model that hands its edits one token at a time, ValueError if an edit
        names a token that is not there.
        """
        if not self.edit:
            return self
        call = Call.of(positions, whole=whole, packed=packed)
        if whole and count is not None:
            for _, told in self.edit:
                if not told.part and (check := getattr(told.function, "check", None)):
                    check((count,) if call.lengths is None else call.lengths)
        return replace(self, call=call)

    def visit(
        self,
        layer: Index | None = None,
        positions: jax.Array | None = None,  # i32[B, T] or [T], of the tokens
        source: jax.Array | None = None,  # i32[B, S], of the tokens that cross-attention sees
    ) -> Visit:
        """Return the places of one block, or without one those that stand in no block.

        `layer` is the block's number in a loop, or i32[] in a scan: then the places of all blocks
        are passed, and an edit of another one changes nothing.
        """
        if self is NOWHERE:
            return Visit()
        known = None if isinstance(layer, jax.Array) else layer
        own: dict[str, tuple[str, int | None]] = {}
        for name in (*self.capture, *dict(self.edit)):
            found = _BLOCK.match(name)
            if found is None and layer is None:
                own[name] = name, None
            # a scan traces one block for all, so it passes the places of every block
            elif found and layer is not None and known in (None, int(found[1])):
                own[name] = found[2], int(found[1]) if known is None else None
        capture = {own[name][0] for name in self.capture if name in own}
        edits: dict[str, list[BlockEdit]] = {}
        for name, told in self.edit:
            if name not in own:
                continue
            place, number = own[name]
            before = edits.setdefault(place, [])
            same = bool(before) and before[-1].told == told
            if number is not None and same and number not in before[-1].blocks:
                # one function of several blocks: a scan applies it once, and not once for each
                before[-1] = before[-1]._replace(blocks=(*before[-1].blocks, number))
            else:
                blocks = () if number is None else (number,)
                before.append(BlockEdit(self.prefix + name, blocks, told))
        return Visit(capture, edits, layer, positions, source, self.call)

    def of_few_blocks(self, depth: int) -> dict[str, tuple[str, int]]:
        """Return names whose place is captured of at most half of the blocks: place, block."""
        found = [(name, at) for name in self.capture if (at := _BLOCK.match(name))]
        asked = Counter(at[2] for _, at in found)
        return {name: (at[2], int(at[1])) for name, at in found if asked[at[2]] * 2 <= depth}

    def empty(self, shapes: Mapping[str, jax.ShapeDtypeStruct], depth: int) -> Captured:
        """Return zeros in the place of what few blocks capture, by name, for a scan to carry.

        So a scan holds the values of the blocks that are asked for, and not those of all.
        """
        few = self.of_few_blocks(depth)
        return {name: jnp.zeros_like(shapes[place]) for name, (place, _) in few.items()}

    def keep(
        self, kept: Captured, captured: Captured, layer: jax.Array
    ) -> tuple[Captured, Captured]:
        """Return what a scan carries, with what its block `layer` captured, and all other values.

        `captured` has names in a block.
        """
        places = {name: _BLOCK.match(name) for name in kept}
        # each step hands the value on, and the block that is asked for writes it
        carried = {
            name: jnp.where(layer == int(at[1]), captured[at[2]], kept[name])
            for name, at in places.items()
            if at
        }
        few = {at[2] for at in places.values() if at}
        return carried, {name: x for name, x in captured.items() if name not in few}

    def collect(self, scanned: Captured) -> Captured:  # leaves [B, L, ...], by name in a block
        """Return what all blocks of a scan captured, by name."""
        found = ((name, _BLOCK.match(name)) for name in self.capture)
        return {
            name: scanned[at[2]][:, int(at[1])] for name, at in found if at and at[2] in scanned
        }

    def in_order(self, captured: Captured) -> Captured:
        """Return captured values in the order in which they were asked for."""
        return {name: captured[name] for name in self.capture}


class BlockEdit(NamedTuple):
    """Edit of a place within a block."""

    place: str
    """As it is written in an edit."""
    blocks: tuple[int, ...]
    """The blocks that it changes, where a scan runs all of them; empty: the one at hand."""
    told: InCall


NOWHERE = Places()


class Visit:
    """Edit and keep the named values of one block, or of what stands around the blocks."""

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
        # [T] counts from 0 in every row, which is what an edit assumes without positions
        self.positions = None if positions is None or positions.ndim == 1 else positions
        self.source, self.call = source, call
        self.asked = self.capture.union(self.edits)
        """The names that are captured or edited."""
        self.captured: Captured = {}

    def __call__(self, name: str, value: jax.Array, alone: bool = False) -> jax.Array:
        """Return the value as it is edited here, and keep it where it is captured.

        With `alone`, the model reads token after token, and the value is of one.
        """
        if name not in self.asked:
            return value
        positions, call = self.positions, self.call
        of_source = name.endswith(OF_SOURCE)
        if of_source:
            positions, call = self.source, Call.of(self.source)
        if self.edits and self.layer is not None:
            call = replace(call, layer=self.layer)
        for place, blocks, told in self.edits.get(name, ()):
            if of_source:  # every call sees the whole source
                told = replace(told, part=False, first=0)
            found = apply_edit(place, told, value, positions, call, alone)
            rule = f"must be {value.dtype}{list(value.shape)}"
            if found is None:
                raise ValueError(f"edit of {place} returns None: {rule}")
            try:
                changed = jnp.asarray(found)
            except (TypeError, ValueError):
                given = type(found).__name__
                raise ValueError(f"edit of {place} returns a {given}: {rule}") from None
            if changed.shape != value.shape or changed.dtype != value.dtype:
                given = f"{changed.dtype}{list(changed.shape)}"
                raise ValueError(f"edit of {place} returns {given}: {rule}")
            if blocks:
                here = jnp.isin(jnp.asarray(self.layer), np.array(blocks))
                changed = jnp.where(here, changed, value)
            value = changed
        if name in self.capture:
            self.captured[name] = value
        return value

    def token(self, name: str, value: jax.Array) -> jax.Array:
        """Do as a call, of the value of one token, which has no axis of tokens: [B, ...]."""
        if name not in self.asked:
            return value
        value = self(name, value[:, None], alone=True)[:, 0]
        if name in self.captured:
            self.captured[name] = value
        return value


def _expand(name: str, known: list[str]) -> list[str]:
    """Return the places of a name that may hold `*`."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name of a place: must be text")
    pattern = re.compile("[^/]*".join(map(re.escape, name.split("*"))))
    found = [one for one in known if pattern.fullmatch(one)] if "*" in name else [name]
    if not found or found[0] not in known:
        rule = "transformer_jax.places(config) lists them"
        if hook := re.fullmatch(r"(?:blocks\.(\d+|\*)\.)?((?:.*\.)?hook_.+)", name):
            place = f"block_{hook[1]}/{IN_BLOCK.get(hook[2])}"
            if hook[2] == "hook_resid_pre" and hook[1] != "*":
                place = "embedding" if hook[1] == "0" else f"block_{int(hook[1]) - 1}/residual"
            rule = "inside.place_of_hook(config, ...) says what a hook of TransformerLens is"
            if hook[2] not in ("attn.hook_q", "attn.hook_k") and place.replace("*", "0") in known:
                rule = f"this hook of TransformerLens is {place!r}"
            raise ValueError(f"no place is named {name!r}: {rule}")
        raise ValueError(f"no place is named {name!r}{nearest(name, known)}: {rule}")
    return found
