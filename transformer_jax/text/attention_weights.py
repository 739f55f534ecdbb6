"""Return the attention weights of a text, with its tokens as labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.models.arguments import CheckedModule
from transformer_jax.models.factory import build
from transformer_jax.models.places import NO_EDIT, Edit, places
from transformer_jax.programs import program
from transformer_jax.pytree import Array, Params
from transformer_jax.shown import short_repr
from transformer_jax.text.attention_picture import Maps, draw_maps
from transformer_jax.text.prompts import arguments, read_prompt
from transformer_jax.text.reading import Reader
from transformer_jax.tokenizers.pieces import token_texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Part = Literal["self", "cross", "encoder"]


@short_repr
@dataclass(frozen=True)
class AttentionWeights:
    """Hold the weights of every layer and head over the tokens of a text.

    Attributes:
        tokens: the text of each token that is read, special ones by their names.
        weights: f32[L, N, T, T], that of key token s for query token t at [layer, head, t, s]; of a
            recurrent model, whose tokens do not attend to each other, without layers.
        source_tokens: the text of each token of the source, where an encoder reads one.
        cross: f32[L, N, T, S], in an encoder-decoder those of the source's tokens for the target's;
            a recurrent one has one layer and one head of them.
        encoder: f32[L, N, S, S], in an encoder-decoder those of the source's tokens for each other.
        written: the text of the token that an encoder-decoder writes after each of `tokens`: row t
            of `cross` holds the weights that it is written by.
    """

    tokens: list[str]
    weights: np.ndarray  # f32[L, N, T, T]
    source_tokens: list[str] | None = None
    cross: np.ndarray | None = None  # f32[L, N, T, S]
    encoder: np.ndarray | None = None  # f32[L, N, S, S]
    written: list[str] | None = None

    def plot(
        self, *, part: Part | None = None, layer: int | None = None, head: int | None = None
    ) -> Figure:
        """Draw a map for each layer and head: rows look at columns, darker is more.

        Rows of "cross" are the tokens that are written. `plot().savefig("map.png")` writes the
        picture. A map that is alone is large, and its numbers stand in it.

        Args:
            part: "self", "cross" or "encoder": one kind of weights; None is all.
            layer: one layer, from 0 on; None is all.
            head: one head, from 0 on; None is all.

        Raises:
            ConfigError: if these weights have no such part, layer or head.
        """
        every: dict[str, Maps] = {}
        source = self.source_tokens or []
        if self.cross is not None:
            title = "cross-attention: what is written looks at the source"
            every["cross"] = _maps(title, self.cross, self.written or self.tokens, source)
        if len(self.weights):
            every["self"] = _maps("self-attention", self.weights, self.tokens, self.tokens)
        if self.encoder is not None:
            every["encoder"] = _maps("self-attention of the encoder", self.encoder, source, source)
        if part is not None and part not in every:
            rule = f"must be {' or '.join(map(repr, every))}"
            raise ConfigError(f"part is {part!r}: {rule}, which this model has")
        drawn = list(every.values()) if part is None else [every[part]]
        return draw_maps([_chosen(maps, layer, head) for maps in drawn])


def _maps(title: str, weights: np.ndarray, rows: list[str], columns: list[str]) -> Maps:
    return Maps(title, weights, rows, columns, *map(range, weights.shape[:2]))


def _chosen(maps: Maps, layer: int | None, head: int | None) -> Maps:
    """Return the maps of one layer, and of one head; ConfigError for one that is not there."""
    for axis, (name, index) in enumerate(dict(layer=layer, head=head).items()):
        if index is None:
            continue
        count = maps.weights.shape[axis]
        if type(index) is not int or not 0 <= index < count:
            what = maps.title.partition(":")[0]
            raise ConfigError(f"{name} is {index!r}: must be 0 to {count - 1} in {what}")
        kept: dict[str, Any] = {f"{name}s": [index], "weights": maps.weights.take([index], axis)}
        maps = maps._replace(**kept)
    return maps


def attention_weights(
    model: Reader, text: Any, edit: Mapping[str, Edit] = NO_EDIT
) -> AttentionWeights:
    """Return the weights of what `LanguageModel.attend` takes."""
    config = model.config
    blocks = config if isinstance(config, ModelConfig) else None
    if (blocks is None or config.inputs is not None) and getattr(config, "attention", None) is None:
        rule = "has no attention over tokens; model.apply(..., capture=places(config)) looks inside"
        raise ConfigError(f"attend: a {type(config).__name__} of {model.name!r} {rule}")
    prompt, tokenizer = read_prompt(model, text), model.tokenizer
    ids, source = prompt.ids, prompt.source
    built = build(config).edited(edit)
    found = _weights(built, model.params, ids[None], prompt.given())
    labels = token_texts(tokenizer, ids)
    of_blocks, encoder, cross = np.zeros((0, 1, len(ids), len(ids)), np.float32), None, None
    if blocks is not None:
        depth = blocks.num_layers if blocks.kind == "encoder" else blocks.decoder_layers
        of_blocks = _stacked(found, "block_{}/attention/weights", depth)
    if source is None or prompt.labels is None:
        return AttentionWeights(labels, of_blocks)
    if blocks is not None:
        cross = _stacked(found, "block_{}/cross_attention/weights", blocks.decoder_layers)
        encoder = _stacked(found, "encoder/block_{}/attention/weights", blocks.num_layers)
    else:
        cross = np.asarray(found["attention/weights"], np.float32)[None]
    return AttentionWeights(
        labels, of_blocks, token_texts(model.tokenizers.of_source, source), cross,
        encoder, token_texts(tokenizer, prompt.labels),
    )  # fmt: skip


def _stacked(found: dict[str, jax.Array], name: str, depth: int) -> np.ndarray:  # [L, N, T, S]
    return np.stack([np.asarray(found[name.format(i)], np.float32)[0] for i in range(depth)])


@program(static=("model",))
def _weights(
    model: CheckedModule, params: Params, tokens: Array, given: dict[str, Array]
) -> dict[str, jax.Array]:
    """Return the weights of all layers by their places."""
    capture = tuple(name for name in places(model) if name.endswith("attention/weights"))
    found: Any = model.apply(
        {"params": params}, jnp.asarray(tokens), capture=capture, **arguments(given)
    )
    return dict(found[-1])
