"""Inspection of a model as it reads text, by means of `transformer_jax.interpret` and a tokenizer.

The tools are methods of `Inspect`. Their results contain arrays. The `plot()` method of a result
draws a figure, and `html()` returns a page. Most tools measure the model's answer to the text:

    z = logit(answer) - logit(other answer), or logit(answer) if there is no other

z is measured at the next token or, for a masked model, at the first mask.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import interpret
from transformer_jax.checks import check_count
from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.keywords import known_keywords
from transformer_jax.interpret.lens import why_not_additive
from transformer_jax.models.quantized import QuantizedTable
from transformer_jax.pytree import Array
from transformer_jax.text import inspect_programs as programs
from transformer_jax.text.attention_picture import Maps, draw_maps
from transformer_jax.text.reading import Reader, WholeText, read_whole, token_id
from transformer_jax.text.tables import Table, TableResult
from transformer_jax.tokenizers.pieces import marked, token_texts
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.special import plain, special_ids
from transformer_jax.tokenizers.trained import WordTokenizer
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.values import value_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Text = str | tuple[str, str]
"""A string, or (source, target) for an encoder-decoder. The target may be incomplete."""

Inputs = dict[str, Array]
"""Inputs of the model other than the tokens, keyed by name."""

PERIOD, ROWS = 25, 4
"""Length of the repeated sequence and number of rows in the random text for scoring heads."""


@value_class
class Lens(TableResult):
    """Likeliest tokens after each block of a model: the logit lens (nostalgebraist 2020).

    Attributes:
        tokens: the T input tokens, as strings.
        top: likeliest tokens after the embedding and after each block, [L + 1, T, count].
        probabilities: probabilities of the tokens in `top`, f32[L + 1, T, count].
        masks: positions of the masks, or None for a model that predicts the next token.
    """

    tokens: list[str]
    top: list[list[list[str]]]
    probabilities: np.ndarray  # f32[L + 1, T, count]
    masks: list[int] | None = None

    def tables(self) -> list[Table]:
        """Return one table, shaded by probability, with a row for the embedding and each block."""
        p = self.probabilities
        rows = ["embedding", *(f"block {i}" for i in range(len(p) - 1))]
        hints = [
            [_listed(*one) for one in zip(*row, strict=True)]
            for row in zip(self.top, p, strict=True)
        ]
        cells = [[marked(best[0]) for best in row] for row in self.top]
        noun = "next token" if self.masks is None else "token"
        title = f"logit lens: the likeliest {noun} if the model ended there"
        return [Table(title, rows, _marked(self.tokens), p[..., 0], 1.0, cells, hints)]

    def summary(self) -> str:
        """Return the likeliest tokens after the last block, at the last token or at each mask."""
        if self.masks is None:
            return f"after the last token: {self._likeliest(-1)}"
        return "\n".join(f"token {i}, a mask: {self._likeliest(i)}" for i in self.masks)

    def _likeliest(self, at: int) -> str:
        return _listed(self.top[-1][at], self.probabilities[-1, at])


@value_class
class Patching(TableResult):
    """Result of activation patching, which copies activations of one prompt into another.

    A share is (z(patched) - z(other)) / (z(text) - z(other)). If the share is 0, the patch does not
    change the answer to the other prompt. If it is 1, the patch restores the answer to the text
    (Meng et al. 2022; Wang et al. 2023).

    Attributes:
        tokens: tokens of the text, as strings; `other_tokens` contains the tokens of the other
            prompt.
        answer: the answer to the text; the logit of `other_answer` is subtracted in z.
        clean: z of the text.
        corrupted: z of the other prompt.
        by_token: shares f32[L, T] for copying one token, keyed by place in a block.
        by_head: shares f32[L, N] for copying all tokens of one head, keyed by place in a block.
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
        """Return a table for each place, with blocks as rows and tokens or heads as columns."""
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
        """Return the value of z for both prompts, and the heads with the largest shares."""
        z = _difference(self.answer, self.other_answer)
        lines = [f"{z}: {self.clean:.3f} for the text, {self.corrupted:.3f} for the other prompt"]
        lines += [f"{name}: {_largest(x)}" for name, x in self.by_head.items()]
        return "\n".join(lines)


@value_class
class Heads(TableResult):
    """Effect of each attention head on an answer, and scores that classify the head.

    Attributes:
        tokens: the input tokens, as strings.
        answer: the answer; the logit of `other_answer` is subtracted in z unless it is None.
        value: the value of z with all heads.
        without: z without one head, whose output is set to 0, minus z with all heads, f32[L, N].
        entropy: entropy of the attention weights in nats, averaged over the tokens of this text,
            f32[L, N].
        scores: mean attention weights, f32[L, N] each, to the previous token, to the earlier copy
            of the token, and to the token after that copy (Olsson et al. 2022). The text is a
            random sequence (key 0) that is repeated once.
        cross_without: like `without`, but for the heads of cross-attention, f32[L, N].
    """

    tokens: list[str]
    answer: str
    other_answer: str | None
    value: float
    without: np.ndarray  # f32[L, N]
    entropy: np.ndarray  # f32[L, N]
    scores: interpret.HeadScores
    cross_without: np.ndarray | None = None  # f32[L, N]

    def tables(self) -> list[Table]:
        """Return a table for each measure, with blocks as rows and heads as columns."""
        change = f"change of {_difference(self.answer, self.other_answer)} without the head"
        named: dict[str, tuple[np.ndarray, float | None]] = {change: (self.without, None)}
        if self.cross_without is not None:
            named[f"{change} of cross-attention"] = self.cross_without, None
        for name, x in self.scores._asdict().items():
            title = f"{name.replace('_', ' ')} score, on random tokens repeated once"
            named[title] = np.asarray(x), 1.0
        named["entropy of attention over this text, nats"] = self.entropy, None
        return [Table(title, _blocks(x), _heads(x), x, most) for title, (x, most) in named.items()]

    def summary(self) -> str:
        """Return the value of z, and the heads whose removal changes it most."""
        z = _difference(self.answer, self.other_answer)
        lines = [f"{z}: {self.value:.3f}", f"change without: {_largest(self.without)}"]
        if self.cross_without is not None:
            lines.append(f"change without, in cross-attention: {_largest(self.cross_without)}")
        return "\n".join(lines)


@value_class
class Attribution(TableResult):
    """Contribution of each token, and of each part of the model, to an answer.

    Attributes:
        tokens: the input tokens, as strings.
        answer: the answer; the logit of `other_answer` is subtracted in z unless it is None.
        value: the value of z.
        baseline: the token that replaced every token; `baseline_value` is the value of z for that
            input.
        shares: integrated gradients f32[T], whose sum is about value - baseline_value (Sundararajan
            et al. 2017).
        heads: direct contribution of each head to z, f32[L, N]. In direct logit attribution,
            `heads`, `feed_forward` (f32[L], or None without feed-forwards), `embedding` and `bias`
            add up to z. They are None if z cannot be split in this way, and `reason` explains why.
        cross_heads: contributions of the heads of cross-attention, f32[L, N].
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
        """Return a table of the tokens, and a table of the parts with blocks as rows."""
        z = _difference(self.answer, self.other_answer)
        title = f"{z}: contribution of each token, compared with {marked(self.baseline)!r}"
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
        title = f"direct contribution of each part; the rest is {rest}"
        return [*found, Table(title, _blocks(table), columns, table)]

    def summary(self) -> str:
        """Return the value of z and its largest contributions."""
        z = _difference(self.answer, self.other_answer)
        baseline = f"{self.baseline_value:.3f} for {self.baseline!r} only"
        order = np.argsort(-np.abs(self.shares), kind="stable")[:5]
        shares = ", ".join(f"{self.tokens[t]!r} {self.shares[t]:+.3f}" for t in order)
        lines = [f"{z}: {self.value:.3f}, {baseline}", f"tokens: {shares}"]
        if self.heads is not None:
            lines.append(f"heads: {_largest(self.heads)}")
        if self.reason is not None:
            lines.append(f"no parts: {self.reason}")
        return "\n".join(lines)


Part = Literal["self", "cross", "encoder"]


@value_class
class AttentionMaps:
    """Attention weights of every layer and head over the input tokens.

    Attributes:
        tokens: the input tokens, as strings, with the names of special tokens.
        weights: self-attention weights f32[L, N, T, T], with the weight of key token s for query
            token t at [layer, head, t, s]. L is 0 for a recurrent model, which has no
            self-attention.
        source_tokens: for an encoder-decoder, the tokens of the source, as strings.
        cross: for an encoder-decoder, the cross-attention weights f32[L, N, T, S] from target
            tokens to source tokens. A recurrent model has one layer and one head.
        encoder: for an encoder-decoder, the self-attention weights of the encoder, f32[L, N, S, S].
        written: for an encoder-decoder, the token that it generates after each of `tokens`, as
            strings. Row t of `cross` contains the weights that produced token t.
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
        """Draw a map for each layer and head, with queries as rows and keys as columns.

        Darker cells have larger weights. The rows of "cross" are the generated tokens. A single map
        is larger and shows the numbers. `plot().savefig("map.png")` writes the picture to a file.

        Args:
            part: the kind of weights, "self", "cross" or "encoder"; None draws all kinds.
            layer: zero-based index of a layer; None draws all layers.
            head: zero-based index of a head; None draws all heads.

        Raises:
            ConfigError: if the part, the layer or the head does not exist.
        """
        every: dict[str, Maps] = {}
        source = self.source_tokens or []
        if self.cross is not None:
            title = "cross-attention: written tokens attend to the source"
            every["cross"] = _maps(title, self.cross, self.written or self.tokens, source)
        if len(self.weights):
            every["self"] = _maps("self-attention", self.weights, self.tokens, self.tokens)
        if self.encoder is not None:
            every["encoder"] = _maps("self-attention of the encoder", self.encoder, source, source)
        if part is not None and part not in every:
            rule = f"must be {' or '.join(map(repr, every))} for this model"
            raise ConfigError(f"part is {part!r}: {rule}")
        drawn = list(every.values()) if part is None else [every[part]]
        return draw_maps([_select(maps, layer, head) for maps in drawn])


def _maps(title: str, weights: np.ndarray, rows: list[str], columns: list[str]) -> Maps:
    return Maps(title, weights, rows, columns, *map(range, weights.shape[:2]))


def _select(maps: Maps, layer: int | None, head: int | None) -> Maps:
    """Select a layer and a head, or all for None; raise ConfigError if one does not exist."""
    for axis, (name, index) in enumerate(dict(layer=layer, head=head).items()):
        if index is None:
            continue
        count = maps.weights.shape[axis]
        if type(index) is not int or not 0 <= index < count:
            kind = maps.title.partition(":")[0]
            raise ConfigError(f"{name} is {index!r}: must be from 0 to {count - 1} for {kind}")
        kept: dict[str, Any] = {f"{name}s": [index], "weights": maps.weights.take([index], axis)}
        maps = maps._replace(**kept)
    return maps


@dataclass(frozen=True)
class Inspect:
    """Tools of `LanguageModel.inspect` that show internal values of a model as it reads text."""

    model: Reader

    @known_keywords
    def attention(self, text: str | tuple[str, str]) -> AttentionMaps:
        """Return the attention weights of every layer and head.

        Args:
            text: a string. For an encoder-decoder and for a run on pairs, this is `(source,
                target)`, or only a source, for which the model generates the target.

        Returns:
            The weights and their tokens, which `plot()` draws.

        Raises:
            ConfigError: if the model has no attention over tokens.
            ValueError: if the text has the wrong type, or is longer than the model can read.
        """
        model, config = self.model, self.model.config
        if model.kind == "targets" and isinstance(text, str):
            text = text, model.targets().answer([text], model.target_count(None))[0]
        blocks = config if isinstance(config, ModelConfig) else None
        attends = blocks is not None and blocks.inputs is None
        if not attends and getattr(config, "attention", None) is None:
            rule = f"has no attention over tokens{_capture_hint(config)}"
            raise ConfigError(f"attention: model {model.name!r} ({type(config).__name__}) {rule}")
        if blocks is not None:
            programs.branches(blocks)  # every layer must have attention
        whole = read_whole(model, text)
        ids, source = whole.ids, whole.source
        found = programs.attention_weights(model.module, model.params, ids[None], whole.inputs())

        def stacked(name: str, depth: int) -> np.ndarray:  # f32[L, N, T, S]
            layers = (found[name.format(i)][0] for i in range(depth))
            return np.stack([np.asarray(x, np.float32) for x in layers])

        labels = token_texts(model.tokenizer, ids)
        weights = np.zeros((0, 1, len(ids), len(ids)), np.float32)
        if blocks is not None:
            weights = stacked("block_{}/attention/weights", programs.depth(blocks))
        if source is None or whole.labels is None:
            return AttentionMaps(labels, weights)
        encoder = None
        if blocks is not None:
            cross = stacked("block_{}/cross_attention/weights", blocks.decoder_layers)
            encoder = stacked("encoder/block_{}/attention/weights", blocks.num_layers)
        else:
            cross = np.asarray(found["attention/weights"], np.float32)[None]
        return AttentionMaps(
            labels, weights, token_texts(model.tokenizers.of_source, source), cross, encoder,
            token_texts(model.tokenizer, whole.labels),
        )  # fmt: skip

    @known_keywords
    def lens(self, text: Text, *, count: int = 5) -> Lens:
        """Return the likeliest tokens at each position after each block (the logit lens).

        Args:
            text: a string. For an encoder-decoder, this is (source, target), and the decoder is
                inspected.
            count: number of tokens to return for each position, up to the vocabulary size.

        Raises:
            ConfigError: if the model is not a transformer that writes tokens.
            ValueError: if the text has the wrong type, or is longer than the model can read.
        """
        model = self.model
        check_count("count", count, 1)
        _, prompt, inputs = _read(model, "lens", text)
        size = _vocabulary(model)
        found = programs.lens(
            model.module, model.params, prompt.ids[None], inputs, min(count, size), size
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
        """Measure which values of a prompt restore its answer when copied into another prompt.

        The shares are unreliable, and a warning is issued, if z differs between the prompts by less
        than 0.1, or by less than a tenth of the largest change that copying a value causes.

        Args:
            text: the prompt to copy values from, which is (source, target) for an encoder-decoder.
            other: the prompt to copy the values into, with the same number of tokens and the same
                source.
            answer: the answer to the text, a word of one token; None means the model's likeliest
                token.
            other_answer: the answer to the other prompt; None means the model's likeliest token.

        Raises:
            ConfigError: if the model is not a transformer that writes tokens.
            ValueError: if the prompts differ in length or have the same answer, or if an answer is
                not a single token.
        """
        model = self.model
        config, clean, inputs = _read(model, "patch", text)
        _, corrupted, other_inputs = _read(model, "patch", other)
        if len(clean.ids) != len(corrupted.ids):
            rule = f"must be as many as in the text, {len(clean.ids)}"
            raise DataError(f"other has {len(corrupted.ids)} tokens: {rule}")
        if any(not np.array_equal(inputs[name], other_inputs[name]) for name in inputs):
            raise DataError(f"other is {other!r:.80}: must have the same source as the text")
        at = _answer_position(model, clean)
        if (elsewhere := _answer_position(model, corrupted)) != at:
            raise DataError(f"other has its mask at token {elsewhere}: must be at {at}, as in text")
        ids = [
            _answer(model, answer, clean, inputs, at, "answer"),
            _answer(model, other_answer, corrupted, inputs, at, "other_answer"),
        ]
        answers = token_texts(model.tokenizer, ids)
        if ids[0] == ids[1]:
            rule = "pass an answer and an other_answer that differ"
            raise DataError(f"the answer to both prompts is {answers[0]!r}: {rule}")
        found = programs.patched(
            model.module, model.params, clean.ids[None], corrupted.ids[None], inputs,
            np.array(ids, np.int32), at,
        )  # fmt: skip
        whole, base, by_token, by_head = jax.tree.map(np.asarray, found)
        # The shares are divided by this difference.
        if abs(whole - base) < 1e-6:
            z = _difference(*answers)
            raise DataError(f"{z} is {whole:.6f} for both prompts: must differ between them")
        largest = max(float(np.abs(x - base).max()) for x in (by_token, *by_head))
        if abs(whole - base) < (bound := max(0.1, 0.1 * largest)):
            z = f"{_difference(*answers)} differs by {abs(whole - base):.2g} between the prompts"
            rule = "shares of it mean little; use prompts whose answers differ more"
            warnings.warn(f"{z}, less than {bound:.2g}: {rule}", stacklevel=2)
        share = lambda x: (x - base) / (whole - base)  # noqa: E731
        streams, branches = programs.streams(config), programs.branches(config)
        return Patching(
            token_texts(model.tokenizer, clean.ids), token_texts(model.tokenizer, corrupted.ids),
            answers[0], answers[1], float(whole), float(base),
            dict(zip(streams, share(by_token), strict=True)),
            {f"{b}/heads": share(x) for b, x in zip(branches, by_head, strict=True)},
        )  # fmt: skip

    @known_keywords
    def heads(
        self, text: Text, *, answer: str | None = None, other_answer: str | None = None
    ) -> Heads:
        """Measure how the answer changes without each head, and score the types of the heads.

        Args:
            text: a string, or (source, target) for an encoder-decoder.
            answer: a word of one token; None means the likeliest token.
            other_answer: a word whose logit is subtracted; None subtracts nothing.

        Raises:
            ConfigError: if the model is not a transformer that writes tokens.
            ValueError: if the text has the wrong type, or an answer is not a single token.
        """
        model = self.model
        config, prompt, inputs = _read(model, "heads", text)
        ids, at, answers = _answers(model, prompt, inputs, answer, other_answer)
        value, changes = programs.without(
            model.module, model.params, prompt.ids[None], inputs, ids, at
        )
        size = _vocabulary(model)
        # The tokens of a period are distinct, and both copies must fit in max_len.
        period = min(PERIOD, config.max_len // 2, size)
        repeated = interpret.repeated_tokens(jax.random.key(0), size, rows=ROWS, period=period)
        rows: Inputs = {n: np.repeat(x, ROWS, 0) for n, x in inputs.items() if n == "source"}
        weights = programs.weights(model.module, model.params, np.asarray(repeated), rows)
        entropy = interpret.attention_entropy(
            programs.weights(model.module, model.params, prompt.ids[None], inputs)[0]
        ).mean(axis=-1)
        scores = jax.tree.map(np.asarray, interpret.head_scores(weights, period))
        without, *cross_without = map(np.asarray, changes)
        return Heads(
            token_texts(model.tokenizer, prompt.ids), *answers, float(value), without,
            np.asarray(entropy), scores, *cross_without,
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
        """Return the contribution of each token, and of each part of the model, to an answer.

        Args:
            text: a string. For an encoder-decoder, this is (source, target), and the target is
                attributed.
            answer: a word of one token; None means the likeliest token.
            other_answer: a word whose logit is subtracted; None subtracts nothing.
            baseline: a neutral token that replaces every token. None means the first of the mask,
                padding, unknown and end-of-text tokens that the tokenizer has, or else a space.

        Raises:
            ConfigError: if the model is not a transformer that writes tokens.
            ValueError: if the text has the wrong type, or if an answer or the baseline is not a
                single token.
        """
        model = self.model
        config, prompt, inputs = _read(model, "attribution", text)
        size, tokenizer = config.vocab_size, model.tokenizer
        if baseline is not None:
            start = token_id(tokenizer, "baseline", baseline, size)
        else:
            usual = special_ids(tokenizer)
            if isinstance(plain(tokenizer), WordTokenizer):
                # The first token of a `WordTokenizer` is the unknown word.
                usual = {"unk": 0, **usual}
            candidates = (usual.get(name, size) for name in ("mask", "pad", "unk", "eos"))
            start = next((i for i in candidates if i < size), size)
            if start == size:
                try:
                    start = token_id(tokenizer, "baseline", " ", size)
                except DataError:
                    rule = "must be a string of one token; the tokenizer has no mask or space"
                    raise DataError(f"baseline is None: {rule}") from None
        ids, at, answers = _answers(model, prompt, inputs, answer, other_answer)
        found = programs.attributed(
            model.module, model.params, prompt.ids[None], inputs, ids, np.array(start, np.int32), at
        )
        (value, base, shares), parts = jax.tree.map(np.asarray, found)
        texts, named = token_texts(tokenizer, [*prompt.ids, start]), dict[str, Any]()
        if parts is not None:
            named = {name: x[0] for name, x in parts._asdict().items() if x is not None}
            named |= {name: float(named[name]) for name in ("embedding", "bias")}
        return Attribution(
            texts[:-1], *answers, float(value), texts[-1], float(base), shares, **named,
            reason=why_not_additive(config),
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
        """Return the tokens whose embeddings have the largest cosine similarity to that of a word.

        The input embedding of a word is e(word), and u = e / |e|. If an encoder-decoder has two
        vocabularies, e is the embedding for the sources. Tokens w are ranked by their cosine with x
        (Mikolov et al. 2013):

            x = u(word) - sum of u(minus) + sum of u(plus)
            cos(x, e(w)) = x . e(w) / (|x| |e(w)|)

        A word is looked up with a leading space if that is a token of the tokenizer.

        Args:
            word: a word of one token.
            minus: a word or words whose vectors are subtracted.
            plus: a word or words whose vectors are added.
            count: number of tokens to return, which must be at least 1.

        Returns:
            Pairs of a token and its cosine, largest first, without special tokens or the given
            words.

        Raises:
            ConfigError: if the model has no token embeddings.
            ValueError: if a word is not a single token, or an argument has the wrong type.
        """
        check_count("count", count, 1)
        terms = [("word", word, 1.0)]
        for name, words, sign in (("minus", minus, -1.0), ("plus", plus, 1.0)):
            words = [words] if isinstance(words, str) else words
            if not isinstance(words, list | tuple):
                raise DataError(f"{name} is {words!r:.60}: must be a word or a list of words")
            terms += [(name, one, sign) for one in words]
        for name, one, _ in terms:
            if not isinstance(one, str) or len(one.split()) != 1:
                raise DataError(f"{name} is {one!r:.60}: must be one word")
        model, tokenizer = self.model, self.model.tokenizers.of_source
        table = _input_embedding(model)[: tokenizer.vocab_size]
        # The vector of an unused token may be 0, which has no direction.
        lengths = np.linalg.norm(table, axis=1)
        unit = table / np.where(lengths > 0, lengths, 1.0)[:, None]
        # Count each word first, so that adding and subtracting the same word leaves no rounding
        # error.
        factors: dict[int, float] = {}
        for name, one, sign in terms:
            i = token_id(tokenizer, name, one, len(table))
            factors[i] = factors.get(i, 0.0) + sign
        direction = np.array(list(factors.values())) @ unit[list(factors)]
        length = np.linalg.norm(direction)
        if length <= len(terms) * np.finfo(np.float32).eps:
            rule = "the sum of the vectors is 0, which has no direction"
            raise DataError(f"word is {word!r}: {rule}")
        cosines = unit @ direction / length
        base = plain(tokenizer)
        excluded = {*factors, *special_ids(tokenizer).values(), *np.flatnonzero(lengths == 0)}
        if isinstance(base, WordTokenizer):
            excluded |= {0, 1}  # the unknown word, and the newline
        if isinstance(base, PretrainedTokenizer):
            excluded |= {i for i in range(len(table)) if base.is_added(i)}
        found = list[tuple[str, float]]()
        for i in np.argsort(-cosines, kind="stable"):
            if len(found) == count:
                break
            text = "" if i in excluded else token_texts(tokenizer, [i])[0]
            if text:  # some IDs are unused
                found.append((text, float(cosines[i])))
        return found


def _read(model: Reader, tool: str, text: Text) -> tuple[ModelConfig, WholeText, Inputs]:
    """Tokenize text; raise ConfigError if the model has no blocks or no token logits."""
    config = model.config
    if model.kind in ("labels", "signals", "vectors"):
        raise ConfigError(f"{tool}: {model.instead()}; it returns no token logits")
    if not isinstance(config, ModelConfig):
        rule = f"has no blocks and heads{_capture_hint(config)}"
        raise ConfigError(f"{tool}: model {model.name!r} ({type(config).__name__}) {rule}")
    prompt = read_whole(model, text)
    return config, prompt, prompt.inputs()


def _capture_hint(config: AnyModelConfig) -> str:
    use = "use model.apply(..., capture=places(config)) for its internal values"
    return f"; {use}" if config.places() else ""


def _vocabulary(model: Reader) -> int:
    """Return the number of token IDs that both the model and its tokenizer have."""
    return min(model.tokenizer.vocab_size, model.config.vocab_size)


def _answer_position(model: Reader, prompt: WholeText) -> int:
    """Return the position of the answer's logits, which is the last token or the first mask."""
    if model.kind != "masks":
        return len(prompt.ids) - 1
    masks = _masks(model, prompt)
    if not masks:
        raise DataError("text has no mask: must contain [MASK] or _ for the answer")
    return masks[0]


def _masks(model: Reader, prompt: WholeText) -> list[int]:
    mask = special_ids(model.tokenizer).get("mask", -1)
    return np.flatnonzero(prompt.ids == mask).tolist()


def _answer(
    model: Reader, word: str | None, prompt: WholeText, inputs: Inputs, at: int, name: str
) -> int:
    """Return the ID of a word, or of the model's likeliest token if the word is None."""
    if word is not None:
        return token_id(model.tokenizer, name, word, model.config.vocab_size)
    logits = programs.logits(model.module, model.params, prompt.ids[None], inputs, at)
    return int(np.argmax(np.asarray(logits)[: _vocabulary(model)]))


def _answers(
    model: Reader, prompt: WholeText, inputs: Inputs, answer: str | None, other: str | None
) -> tuple[np.ndarray, int, tuple[str, str | None]]:
    """Return the IDs of one or two answers as i32[1] or i32[2], their position, and their texts."""
    at = _answer_position(model, prompt)
    ids = [_answer(model, answer, prompt, inputs, at, "answer")]
    if other is not None:
        ids.append(token_id(model.tokenizer, "other_answer", other, model.config.vocab_size))
        if ids[0] == ids[1]:
            raise DataError(f"answer and other_answer are {other!r}: must differ")
    texts = token_texts(model.tokenizer, ids)
    return np.array(ids, np.int32), at, (texts[0], texts[1] if other is not None else None)


def _marked(tokens: list[str]) -> list[str]:
    return [marked(text) for text in tokens]


def _blocks(table: np.ndarray) -> list[str]:
    return [f"block {i}" for i in range(len(table))]


def _heads(table: np.ndarray) -> list[str]:
    return [f"head {n}" for n in range(table.shape[1])]


def _listed(texts: list[str], p: np.ndarray) -> str:
    return ", ".join(f"{marked(one)!r} {q:.3f}" for one, q in zip(texts, p, strict=True))


def _difference(answer: str, other: str | None) -> str:
    """Describe z in words."""
    logit = f"logit of {marked(answer)!r}"
    return logit if other is None else f"{logit} - {marked(other)!r}"


def _largest(table: np.ndarray) -> str:  # [L, N]
    """Format the five values that are farthest from 0, with their heads."""
    order = np.argsort(-np.abs(table), axis=None, kind="stable")[:5]
    heads = zip(*np.unravel_index(order, table.shape), strict=True)
    return ", ".join(f"block {i} head {n} {table[i, n]:+.3f}" for i, n in heads)


def _input_embedding(model: Reader) -> np.ndarray:  # f64[V, D]
    """Return the input embedding, or the one for sources if there are two vocabularies."""
    config, params = model.config, model.params
    if (table := config.word_vectors(params)) is None:
        kind = type(config).__name__
        raise ConfigError(f"nearest: model {model.name!r} ({kind}) has no word embeddings")
    if isinstance(table, QuantizedTable):
        table = table.look_up(jnp.arange(table.shape[0]))
    return np.asarray(table, np.float64)
