"""What is inside a model as it reads a text: `transformer_jax.inside` with a tokenizer.

`Inspect` has the methods; their results store arrays and draw themselves: `plot()` is a figure,
`html()` a page. Most measure how the model answers a text:

    z = logit(answer) - logit(other answer), or logit(answer) if there is no other

at the next token, or at the first mask of a masked model.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import inside
from transformer_jax.checks import check_count
from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.config.keywords import known_keywords
from transformer_jax.inside.lens import no_sum
from transformer_jax.models.quantized import QuantizedTable
from transformer_jax.pytree import Array
from transformer_jax.text import inspect_programs as programs
from transformer_jax.text.attention_picture import Maps, draw_maps
from transformer_jax.text.reading import Reader, WholeText, read_whole, token_id
from transformer_jax.text.tables import Pictured, Table
from transformer_jax.tokenizers.pieces import marked, token_texts
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import plain, special_ids
from transformer_jax.tokenizers.trained import WordTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.values import value_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Text = str | tuple[str, str]
"""A text; of a model of pairs (source, target), the target as far as it is given."""

Given = dict[str, Array]
"""Arrays that the model reads beside the tokens, by name."""

PERIOD, ROWS = 25, 4
"""Tokens that are repeated to score heads, and rows of them."""


@value_class
class Lens(Pictured):
    """Likeliest tokens after each block of a model (nostalgebraist 2020).

    Attributes:
        tokens: the text of each token that is read.
        top: `count` likeliest tokens of each of T places, after the embedding and each block.
        probabilities: f32[L + 1, T, count], theirs.
        masks: of a masked model, where its masks stand; None of one that writes the next token.
    """

    tokens: list[str]
    top: list[list[list[str]]]
    probabilities: np.ndarray  # f32[L + 1, T, count]
    masks: list[int] | None = None

    def tables(self) -> list[Table]:
        """Return one table: a row for the embedding and each block, shaded by probability."""
        p = self.probabilities
        rows = ["embedding", *(f"block {i}" for i in range(len(p) - 1))]
        hints = [
            [_listed(*one) for one in zip(*row, strict=True)]
            for row in zip(self.top, p, strict=True)
        ]
        cells = [[marked(best[0]) for best in row] for row in self.top]
        what = "next token" if self.masks is None else "token"
        title = f"logit lens: the likeliest {what} if the model ended there"
        return [Table(title, rows, _marked(self.tokens), p[..., 0], 1.0, cells, hints)]

    def summary(self) -> str:
        """Return what the last block says after the last token, or at each mask."""
        if self.masks is None:
            return f"after the last token: {self._likeliest(-1)}"
        return "\n".join(f"token {i}, a mask: {self._likeliest(i)}" for i in self.masks)

    def _likeliest(self, at: int) -> str:
        return _listed(self.top[-1][at], self.probabilities[-1, at])


@value_class
class Patching(Pictured):
    """Result of activation patching: the effect of each activation of one prompt, put into another.

    A share is (z(patched) - z(other)) / (z(text) - z(other)): 0 leaves the answer to the other
    prompt, 1 is the answer to the text (activation patching, Meng et al. 2022; Wang et al. 2023).

    Attributes:
        tokens: the text of each token of the text, and `other_tokens` of the other prompt.
        answer: the token whose logit counts, and `other_answer` the one that is subtracted.
        clean: z of the text.
        corrupted: z of the other prompt.
        by_token: shares f32[L, T] by the name of a place in a block, one token of it put in.
        by_head: shares f32[L, N], all tokens of one head put in.
    """

    tokens: list[str]
    other_tokens: list[str]
    answer: str
    other_answer: str
    clean: float
    corrupted: float
    by_token: dict[str, np.ndarray]
    by_head: dict[str, np.ndarray]

    def tables(self) -> list[Table]:
        """Return a table for each place: rows are blocks, columns tokens or heads."""
        pairs = zip(_marked(self.tokens), _marked(self.other_tokens), strict=True)
        columns = [one if one == two else f"{one} / {two}" for one, two in pairs]
        found = [
            Table(f"{name}, one token put in: share of the answer", _blocks(x), columns, x, 1.0)
            for name, x in self.by_token.items()
        ]
        for name, x in self.by_head.items():
            title = f"{name}, one head put in: share of the answer"
            found.append(Table(title, _blocks(x), _heads(x), x, 1.0))
        return found

    def summary(self) -> str:
        """Return z of both prompts, and the heads that bring back most of it."""
        what = _difference(self.answer, self.other_answer)
        lines = [f"{what}: {self.clean:.3f} of the text, {self.corrupted:.3f} of the other"]
        lines += [f"{name}: {_largest(x)}" for name, x in self.by_head.items()]
        return "\n".join(lines)


@value_class
class Heads(Pictured):
    """Effect of each head on an answer, and scores that tell its kind.

    Attributes:
        tokens: the text of each token that is read.
        answer: the token whose logit counts; `other_answer` is subtracted, unless None.
        value: z, with all heads.
        without: f32[L, N], z with one head silenced (its output is 0) less z with all of them.
        entropy: f32[L, N], nats of the weights over this text, the mean of its tokens.
        scores: f32[L, N] each, weights on random tokens that are repeated once, of rows drawn with
            key 0: to the token before, the same token, and the token after it (Olsson et al. 2022).
        cross_without: f32[L, N], as `without`, of the heads over a source.
    """

    tokens: list[str]
    answer: str
    other_answer: str | None
    value: float
    without: np.ndarray  # f32[L, N]
    entropy: np.ndarray  # f32[L, N]
    scores: inside.HeadScores
    cross_without: np.ndarray | None = None  # f32[L, N]

    def tables(self) -> list[Table]:
        """Return a table for each measure: rows are blocks, columns heads."""
        what = _difference(self.answer, self.other_answer)
        named: dict[str, tuple[np.ndarray, float | None]] = {
            f"change of {what} without the head": (self.without, None)
        }
        if self.cross_without is not None:
            named[f"change of {what} without the head over the source"] = self.cross_without, None
        for name, x in self.scores._asdict().items():
            title = f"{name.replace('_', ' ')} score, on random tokens repeated once"
            named[title] = np.asarray(x), 1.0
        named["entropy of attention over this text, nats"] = self.entropy, None
        return [Table(title, _blocks(x), _heads(x), x, most) for title, (x, most) in named.items()]

    def summary(self) -> str:
        """Return z, and the heads without which it changes most."""
        what = _difference(self.answer, self.other_answer)
        lines = [f"{what}: {self.value:.3f}", f"change without: {_largest(self.without)}"]
        if self.cross_without is not None:
            lines.append(f"change without, over the source: {_largest(self.cross_without)}")
        return "\n".join(lines)


@value_class
class Attribution(Pictured):
    """Contribution of each token, and of each part of the model, to an answer.

    Attributes:
        tokens: the text of each token that is read.
        answer: the token whose logit counts; `other_answer` is subtracted, unless None.
        value: z.
        baseline: the token that was put in the place of each, and `baseline_value` z of those.
        shares: f32[T], integrated gradients (Sundararajan et al. 2017): their sum is about
            value - baseline_value.
        heads: f32[L, N], what each head adds to z at that token; `feed_forward` f32[L] each
            feed-forward branch, None where there is none; `embedding` and `bias` the rest: together
            z (direct logit attribution). None where z is no sum, which `reason` says.
        cross_heads: f32[L, N], of the heads over a source.
    """

    tokens: list[str]
    answer: str
    other_answer: str | None
    value: float
    baseline: str
    baseline_value: float
    shares: np.ndarray  # f32[T]
    heads: np.ndarray | None = None  # f32[L, N]
    feed_forward: np.ndarray | None = None  # f32[L]
    embedding: float | None = None
    bias: float | None = None
    cross_heads: np.ndarray | None = None  # f32[L, N]
    reason: str | None = None

    def tables(self) -> list[Table]:
        """Return the tokens, and a table of the parts: rows are blocks."""
        what = _difference(self.answer, self.other_answer)
        title = f"{what}: what each token adds, for {marked(self.baseline)!r} in its place"
        found = [Table(title, [""], _marked(self.tokens), self.shares[None])]
        if self.heads is None:
            return found
        parts, columns = [self.heads], _heads(self.heads)
        if self.feed_forward is not None:
            parts.append(self.feed_forward[:, None])
            columns.append("feed-forward")
        if self.cross_heads is not None:
            parts.append(self.cross_heads)
            columns += [f"source {name}" for name in _heads(self.cross_heads)]
        rest = f"embedding {self.embedding:.2f}, biases {self.bias:.2f}"
        table = np.concatenate(parts, axis=1)
        title = f"what each part adds by itself; besides {rest}"
        return [*found, Table(title, _blocks(table), columns, table)]

    def summary(self) -> str:
        """Return z, and what adds most to it."""
        what = _difference(self.answer, self.other_answer)
        lines = [f"{what}: {self.value:.3f}, of {self.baseline!r} alone {self.baseline_value:.3f}"]
        order = np.argsort(-np.abs(self.shares), kind="stable")[:5]
        said = ", ".join(f"{self.tokens[t]!r} {self.shares[t]:+.3f}" for t in order)
        lines.append(f"tokens: {said}")
        if self.heads is not None:
            lines.append(f"heads: {_largest(self.heads)}")
        if self.reason is not None:
            lines.append(f"no parts: {self.reason}")
        return "\n".join(lines)


Part = Literal["self", "cross", "encoder"]


@value_class
class AttentionMaps:
    """Attention weights of every layer and head over the tokens of a text.

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


@dataclass(frozen=True)
class Inspect:
    """What is inside a model as it reads a text: `LanguageModel.inspect`."""

    model: Reader

    @known_keywords
    def attention(self, text: str | tuple[str, str]) -> AttentionMaps:
        """Return the attention weights of every layer and head, with the tokens as labels.

        Args:
            text: a text; for an encoder-decoder and a run on pairs `(source, target)`, or a source,
                whose target the model writes.

        Returns:
            Weights with their tokens; their `plot()` is a picture.

        Raises:
            ConfigError: if the model has no attention over tokens.
            ValueError: if the text exceeds what the model reads.
        """
        model, config = self.model, self.model.config
        if model.kind == "targets" and isinstance(text, str):
            text = text, model.targets().answer([text], model.target_count(None))[0]
        blocks = config if isinstance(config, ModelConfig) else None
        attends = blocks is not None and blocks.inputs is None
        if not attends and getattr(config, "attention", None) is None:
            rule = "has no attention over tokens"
            if config.places():
                rule += "; model.apply(..., capture=places(config)) looks inside"
            raise ConfigError(f"attention: a {type(config).__name__} of {model.name!r} {rule}")
        whole = read_whole(model, text)
        ids, source = whole.ids, whole.source
        found = programs.attention_weights(model.module, model.params, ids[None], whole.given())

        def stacked(name: str, depth: int) -> np.ndarray:  # f32[L, N, T, S]
            layers = (found[name.format(i)][0] for i in range(depth))
            return np.stack([np.asarray(x, np.float32) for x in layers])

        labels = token_texts(model.tokenizer, ids)
        own_weights = np.zeros((0, 1, len(ids), len(ids)), np.float32)
        if blocks is not None:
            own_weights = stacked("block_{}/attention/weights", programs.depth(blocks))
        if source is None or whole.labels is None:
            return AttentionMaps(labels, own_weights)
        encoder = None
        if blocks is not None:
            cross = stacked("block_{}/cross_attention/weights", blocks.decoder_layers)
            encoder = stacked("encoder/block_{}/attention/weights", blocks.num_layers)
        else:
            cross = np.asarray(found["attention/weights"], np.float32)[None]
        return AttentionMaps(
            labels, own_weights, token_texts(model.tokenizers.of_source, source), cross,
            encoder, token_texts(model.tokenizer, whole.labels),
        )  # fmt: skip

    @known_keywords
    def lens(self, text: Text, *, count: int = 5) -> Lens:
        """Return what the model would write after each block, at each token: the logit lens.

        Args:
            text: a text, or (source, target) of a model of pairs, whose decoder is read.
            count: how many tokens are returned for each place, the likeliest first; at most as many
                as the tokenizer knows.

        Raises:
            ConfigError: if the model is no transformer that writes tokens.
            ValueError: if the text has another form, or is longer than the model reads.
        """
        model = self.model
        _, prompt, given = _read(model, "lens", text)
        kinds = _kinds(model)
        check_count("count", count, 1)
        found = programs.lens(
            model.module, model.params, prompt.ids[None], given, min(count, kinds), kinds
        )
        p, ids = map(np.asarray, found)
        flat = token_texts(model.tokenizer, ids.ravel())
        texts = np.array(flat, object).reshape(ids.shape).tolist()
        masks = _masks(model, prompt) if model.kind == "masks" else None
        return Lens(token_texts(model.tokenizer, prompt.ids), texts, p, masks)

    @known_keywords
    def patch(
        self, text: Text, other: Text, *, answer: str | None = None, other_answer: str | None = None
    ) -> Patching:
        """Return which values of a text bring its answer into the pass over another prompt.

        Args:
            text: the prompt whose values are put in; (source, target) of a model of pairs.
            other: the prompt that is read: of as many tokens, with the same source.
            answer: a word of one token, the answer to the text; None is the model's likeliest.
            other_answer: the answer to the other prompt; None is the model's likeliest.

        It warns where the answers differ by less than 0.1, or by less than a tenth of the largest
        change that a value makes: shares of such a difference say little.

        Raises:
            ConfigError: if the model is no transformer that writes tokens.
            ValueError: if the prompts differ in length, or are answered alike, or an answer is no
                token.
        """
        model = self.model
        config, clean, given = _read(model, "patch", text)
        _, corrupted, others = _read(model, "patch", other)
        if len(clean.ids) != len(corrupted.ids):
            rule = f"must be as many as those of the text, {len(clean.ids)}"
            raise DataError(f"other has {len(corrupted.ids)} tokens: {rule}")
        if any(not np.array_equal(given[name], others[name]) for name in given):
            raise DataError(f"other is {other!r:.80}: must have the source of the text")
        at = _place_of_answer(model, clean)
        if _place_of_answer(model, corrupted) != at:
            raise DataError("other has its mask elsewhere: must be where that of the text is")
        asked = (answer, clean), (other_answer, corrupted)
        names = "answer", "other_answer"
        ids = [_answer(model, *pair, given, at, n) for n, pair in zip(names, asked, strict=True)]
        said = token_texts(model.tokenizer, ids)
        if ids[0] == ids[1]:
            rule = "give an answer and an other_answer that differ"
            raise DataError(f"both prompts are answered by {said[0]!r}: {rule}")
        found = programs.patched(
            model.module, model.params, clean.ids[None], corrupted.ids[None], given,
            np.array(ids, np.int32), at,
        )  # fmt: skip
        whole, base, by_token, by_head = jax.tree.map(np.asarray, found)
        if abs(whole - base) < 1e-6:
            rule = f"{_difference(*said)} must differ between the prompts"
            raise DataError(f"nothing to bring back: {rule}, and is {whole:.6f}")
        largest = max(float(np.abs(x - base).max()) for x in (by_token, *by_head))
        if abs(whole - base) < (bound := max(0.1, 0.1 * largest)):
            what = f"{_difference(*said)} differs by {abs(whole - base):.2g} between the prompts"
            rule = "so shares of it say little; take prompts whose answers differ more"
            warnings.warn(f"{what}, less than {bound:.2g}: {rule}", stacklevel=2)
        share = lambda x: (x - base) / (whole - base)  # noqa: E731
        streams, branches = programs.streams(config), programs.branches(config)
        return Patching(
            token_texts(model.tokenizer, clean.ids), token_texts(model.tokenizer, corrupted.ids),
            said[0], said[1], float(whole), float(base),
            dict(zip(streams, share(by_token), strict=True)),
            {f"{b}/heads": share(x) for b, x in zip(branches, by_head, strict=True)},
        )  # fmt: skip

    @known_keywords
    def heads(
        self, text: Text, *, answer: str | None = None, other_answer: str | None = None
    ) -> Heads:
        """Return how an answer changes without each head, and what kind of head each is.

        Args:
            text: a text, or (source, target) of a model of pairs.
            answer: a word of one token; None is the model's likeliest.
            other_answer: a word whose logit is subtracted; None subtracts nothing.

        Raises:
            ConfigError: if the model is no transformer that writes tokens.
            ValueError: if the text has another form, or an answer is no token.
        """
        model = self.model
        config, prompt, given = _read(model, "heads", text)
        ids, at, said = _answers(model, prompt, given, answer, other_answer)
        value, without = programs.without(
            model.module, model.params, prompt.ids[None], given, ids, at
        )
        kinds = _kinds(model)
        period = min(PERIOD, config.max_len // 2, kinds)
        repeated = inside.repeated_tokens(jax.random.key(0), kinds, rows=ROWS, period=period)
        rows: Given = {n: np.repeat(x, ROWS, 0) for n, x in given.items() if n == "source"}
        weights = programs.weights(model.module, model.params, np.asarray(repeated), rows)
        entropy = inside.attention_entropy(
            programs.weights(model.module, model.params, prompt.ids[None], given)[0]
        ).mean(axis=-1)
        scores = jax.tree.map(np.asarray, inside.head_scores(weights, period))
        own, *cross = map(np.asarray, without)
        return Heads(
            token_texts(model.tokenizer, prompt.ids), *said, float(value), own, np.asarray(entropy),
            scores, *cross,
        )  # fmt: skip

    @known_keywords
    def attribution(
        self,
        text: Text,
        *,
        answer: str | None = None,
        other_answer: str | None = None,
        baseline: str | None = None,
    ) -> Attribution:
        """Return what each token that is read, and each part of the model, adds to an answer.

        Args:
            text: a text, or (source, target) of a model of pairs, of which the target is asked.
            answer: a word of one token; None is the model's likeliest.
            other_answer: a word whose logit is subtracted; None subtracts nothing.
            baseline: a text of one token that says nothing, which is put in the place of each
                token; None is the tokenizer's mask, padding, unknown token or end of a text, the
                first that it has, or else a space.

        Raises:
            ConfigError: if the model is no transformer that writes tokens.
            ValueError: if the text has another form, or an answer or the baseline is no token.
        """
        model = self.model
        config, prompt, given = _read(model, "attribution", text)
        if baseline is not None:  # it is refused before anything compiles
            token_id(model.tokenizer, "baseline", baseline, config.vocab_size)
        ids, at, said = _answers(model, prompt, given, answer, other_answer)
        # The token that stands for no token: a mask or padding if there is one, else a space.
        size, named_ids = config.vocab_size, special_ids(model.tokenizer)
        if isinstance(plain(model.tokenizer), WordTokenizer):
            named_ids = {"unk": 0, **named_ids}
        usual = (named_ids.get(name, size) for name in ("mask", "pad", "unk", "eos"))
        start = next((i for i in usual if i < size), None)
        if baseline is not None or start is None:
            try:
                text = " " if baseline is None else baseline
                start = token_id(model.tokenizer, "baseline", text, size)
            except DataError:
                if baseline is not None:
                    raise
                rule = "the tokenizer has no mask, padding or space: give a text of one token"
                raise DataError(f"baseline is None: {rule}") from None
        found = programs.attributed(
            model.module, model.params, prompt.ids[None], given, ids, np.array(start, np.int32), at
        )
        (value, base, shares), parts = jax.tree.map(np.asarray, found)
        texts, named = token_texts(model.tokenizer, [*prompt.ids, start]), dict[str, Any]()
        if parts is not None:
            named = {name: x[0] for name, x in parts._asdict().items() if x is not None}
            named |= {name: float(named[name]) for name in ("embedding", "bias")}
        return Attribution(
            texts[:-1], *said, float(value), texts[-1], float(base), shares, **named,
            reason=no_sum(config),
        )  # fmt: skip

    @known_keywords
    def nearest(
        self,
        word: str,
        *,
        minus: str | Sequence[str] = (),
        plus: str | Sequence[str] = (),
        count: int = 10,
    ) -> list[tuple[str, float]]:
        """Return the tokens whose vectors point most nearly where that of a word does.

        e is the input embedding, the vector of each token that the model reads (of an
        encoder-decoder with two vocabularies, those of the sources), and u = e / |e|. With words
        to take away and to add (Mikolov et al. 2013), the direction is

            x = u(word) - sum of u(minus) + sum of u(plus)
            cos(x, e(w)) = x . e(w) / (|x| |e(w)|)

        A word is looked up as it stands after another one, with its space, if the tokenizer has
        that as one token.

        Args:
            word: a word that is one token.
            minus: a word or several, whose vectors are taken away.
            plus: a word or several, whose vectors are added.
            count: how many tokens are returned, at least 1.

        Returns:
            Pairs of a token's text and its cosine, the largest first, without the given words and
            special tokens.

        Raises:
            ConfigError: if the model has no vectors of tokens.
            ValueError: if a word is several tokens, or none, and so has no vector.
        """
        away, added = ([one] if isinstance(one, str) else list(one) for one in (minus, plus))
        check_count("count", count, 1)
        model, tokenizer = self.model, self.model.tokenizers.of_source
        table = _input_embedding(model)[: tokenizer.vocab_size]
        lengths = np.linalg.norm(table, axis=1)
        unit = table / np.where(lengths > 0, lengths, 1.0)[:, None]
        named = [("word", word, 1.0)]
        named += [("minus", one, -1.0) for one in away] + [("plus", one, 1.0) for one in added]
        for name, one, _ in named:
            if not isinstance(one, str) or len(one.split()) != 1:
                raise DataError(f"{name} is {one!r:.60}: must be one word")
        ids = [token_id(tokenizer, name, one, len(table)) for name, one, _ in named]
        # a word that is added and taken away has no part, not even the rest of a rounding
        times = dict.fromkeys(ids, 0.0)
        for i, (_, _, sign) in zip(ids, named, strict=True):
            times[i] += sign
        wanted = np.array(list(times.values())) @ unit[list(times)]
        length = np.linalg.norm(wanted)
        if length <= len(named) * np.finfo(np.float32).eps:
            rule = "the sum of the vectors is 0, which has no direction"
            raise DataError(f"word is {word!r}: {rule}")
        cosines = unit @ wanted / length
        own = plain(tokenizer)
        left_out = {*ids, *special_ids(tokenizer).values(), *np.flatnonzero(lengths == 0)}
        if isinstance(own, WordTokenizer):
            left_out |= {0, 1}  # an unknown word, and the end of a line
        if isinstance(own, PretrainedTokenizer):
            left_out |= {i for i in range(len(table)) if own.is_added(i)}
        found = list[tuple[str, float]]()
        for i in np.argsort(-cosines, kind="stable"):
            if len(found) == count:
                break
            text = "" if i in left_out else token_texts(tokenizer, [i])[0]
            if text:  # an id may be unused
                found.append((text, float(cosines[i])))
        return found


def _read(model: Reader, tool: str, text: Text) -> tuple[ModelConfig, WholeText, Given]:
    """Return a text as the model reads it; ConfigError for a model without blocks or logits."""
    config = model.config
    if model.kind in ("labels", "signals", "vectors"):
        raise ConfigError(f"{tool}: {model.instead()}; it has no logits of tokens")
    if not isinstance(config, ModelConfig):
        rule = "has no blocks and heads"
        if config.places():
            rule += "; model.apply(..., capture=places(config)) looks inside"
        raise ConfigError(f"{tool}: a {type(config).__name__} of {model.name!r} {rule}")
    prompt = read_whole(model, text)
    return config, prompt, prompt.given()


def _kinds(model: Reader) -> int:
    """Return how many of the model's tokens its tokenizer knows."""
    return min(model.tokenizer.vocab_size, model.config.vocab_size)


def _place_of_answer(model: Reader, prompt: WholeText) -> int:
    """Return where the answer's logits are: at the last token, or at the first mask."""
    if model.kind != "masks":
        return len(prompt.ids) - 1
    masks = _masks(model, prompt)
    if not masks:
        raise DataError("text has no mask: must have one, [MASK] or _, where it is answered")
    return masks[0]


def _masks(model: Reader, prompt: WholeText) -> list[int]:
    mask = special_ids(model.tokenizer).get("mask", -1)
    return np.flatnonzero(prompt.ids == mask).tolist()


def _answer(
    model: Reader, word: str | None, prompt: WholeText, given: Given, at: int, name: str
) -> int:
    """Return the id of a word; without one, of the likeliest token that stands for text."""
    if word is not None:
        return token_id(model.tokenizer, name, word, model.config.vocab_size)
    logits = programs.logits(model.module, model.params, prompt.ids[None], given, at)
    return int(np.argmax(np.asarray(logits)[: _kinds(model)]))


def _answers(
    model: Reader, prompt: WholeText, given: Given, answer: str | None, other: str | None
) -> tuple[np.ndarray, int, tuple[str, str | None]]:
    """Return the ids of one or two answers, i32[1] or i32[2], their place, and their texts."""
    at = _place_of_answer(model, prompt)
    ids = [_answer(model, answer, prompt, given, at, "answer")]
    if other is not None:
        ids.append(token_id(model.tokenizer, "other_answer", other, model.config.vocab_size))
        if ids[0] == ids[1]:
            raise DataError(f"answer and other_answer are {other!r}: must differ")
    said = token_texts(model.tokenizer, ids)
    return np.array(ids, np.int32), at, (said[0], said[1] if other is not None else None)


def _marked(tokens: list[str]) -> list[str]:
    return [marked(text) for text in tokens]


def _blocks(table: np.ndarray) -> list[str]:
    return [f"block {i}" for i in range(len(table))]


def _heads(table: np.ndarray) -> list[str]:
    return [f"head {n}" for n in range(table.shape[1])]


def _listed(texts: list[str], p: np.ndarray) -> str:
    return ", ".join(f"{marked(one)!r} {q:.3f}" for one, q in zip(texts, p, strict=True))


def _difference(answer: str, other: str | None) -> str:
    """Return what z is, in words."""
    named = f"logit of {marked(answer)!r}"
    return named if other is None else f"{named} - {marked(other)!r}"


def _largest(table: np.ndarray) -> str:  # [L, N]
    """Return the heads of the five values furthest from 0."""
    order = np.argsort(-np.abs(table), axis=None, kind="stable")[:5]
    where = zip(*np.unravel_index(order, table.shape), strict=True)
    return ", ".join(f"block {i} head {n} {table[i, n]:+.3f}" for i, n in where)


def _input_embedding(model: Reader) -> np.ndarray:  # f64[V, D]
    """Return the vectors of tokens that a model reads: of two vocabularies, those of sources."""
    config, params = model.config, model.params
    if (table := config.word_vectors(params)) is None:
        kind = type(config).__name__
        raise ConfigError(f"nearest: a {kind} of {model.name!r} has no vectors of words")
    if isinstance(table, QuantizedTable):
        table = table.look_up(jnp.arange(table.shape[0]))
    return np.asarray(table, np.float64)
