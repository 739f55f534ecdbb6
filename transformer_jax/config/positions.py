"""Configs of positional encodings, one class for each kind.

A value is validated when it is created. `check_model` validates it for its model.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

from transformer_jax.config.custom import check_custom
from transformer_jax.config.fields import Count, Positive, Size, check_types, fail, nearest, unread
from transformer_jax.config.keywords import config_class
from transformer_jax.config.kinds import kind_name

if TYPE_CHECKING:
    from transformer_jax.config.model import ModelConfig

RopeScaling = Literal["linear", "ntk", "dynamic", "llama3", "yarn", "longrope"]


class _Positions:
    """Base class of all positional encodings."""

    absolute = False
    """Whether vectors are added to the embeddings. Otherwise, attention uses distances."""

    def __repr__(self) -> str:
        """Return the kind and the fields that differ from their defaults, as Python code."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    @property
    def kind(self) -> str:
        """Return the lowercase name of the class, which is used in files and flags."""
        return kind_name(type(self))

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError if these positions conflict with the fields of `model`."""


@config_class(repr=False)
class Learned(_Positions):
    """Learned position vectors, which are added to the embeddings (Gehring et al. 2017)."""

    absolute = True

    offset: Count = 0
    """Number of rows in the table before position 0 (2 in RoBERTa and BART)."""
    buckets: int | None = None
    """Number of distance buckets for additional biases in attention, as in T5Buckets (MPNet). None
    means no biases."""
    max_distance: int = 128
    """Smallest distance in the last bucket, which also contains all larger distances. Only used
    with buckets."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.buckets is None:
            unread(self, "needs buckets", "max_distance")
        else:  # T5Buckets checks both fields
            T5Buckets(buckets=self.buckets, max_distance=self.max_distance)

    def check_model(self, model: ModelConfig) -> None:
        if self.buckets is not None:
            T5Buckets(buckets=self.buckets, max_distance=self.max_distance).check_model(model)


@config_class(repr=False)
class Sinusoidal(_Positions):
    """Sines and cosines of positions, added to embeddings (Vaswani et al. 2017, section 3.5)."""

    absolute = True

    layout: Literal["interleaved", "halves"] = "interleaved"
    """Order of the values. interleaved: sines and cosines alternate (Vaswani et al.). halves: all
    sines come before all cosines (Marian)."""
    base: Positive = 10_000.0
    """Wavelength base: pair k has the angle position * base^(-2k/d_model) in radians."""
    offset: Count = 0
    """Number added to each position (2 in M2M-100 and NLLB)."""

    def __post_init__(self) -> None:
        check_types(self)

    def check_model(self, model: ModelConfig) -> None:
        if model.embedding_width % 2:
            name = "d_model" if model.embedding_dim is None else "embedding_dim"
            fail(name, model.embedding_width, "must be even for sinusoidal positions")


@config_class(repr=False)
class Rope(_Positions):
    """Rotary position embedding of queries and keys (Su et al. 2021).

    Pair k of the dimensions of a head is rotated by `position * base^(-2k/dims)` radians.
    """

    base: Positive = 10_000.0
    """Wavelength base (theta)."""
    dims: Size | None = None
    """Number of dimensions of each head to rotate, starting from the first. None rotates all
    dimensions."""
    pairing: Literal["half", "interleaved"] = "half"
    """Dimensions that form pair k. half: (k, k + dims/2). interleaved: (2k, 2k + 1), as in Su et
    al. 2021."""
    scaling: RopeScaling | None = None
    """Method of scaling the frequencies for texts longer than the trained length. None disables
    scaling."""
    factor: Positive = 1.0
    """Scaling factor: the new length divided by `original_len`."""
    original_len: Size | None = None
    """Context length of pre-training. Required by dynamic, llama3, yarn and longrope."""
    length: Size | None = None
    """dynamic, longrope: length for which the rotation is computed, which is fixed so that cached
    keys remain valid. None uses original_len, at which dynamic does not scale."""
    low_freq_factor: Positive = 1.0
    """llama3: wavelengths above original_len / low_freq_factor are scaled fully."""
    high_freq_factor: Positive = 4.0
    """llama3: wavelengths below original_len / high_freq_factor are not scaled."""
    beta_fast: Positive = 32.0
    """yarn: dimensions with more rotations than this within original_len are not scaled."""
    beta_slow: Positive = 1.0
    """yarn: dimensions with fewer rotations than this within original_len are scaled fully."""
    attention_factor: Positive | None = None
    """yarn, longrope: scale of the rotated vectors. None uses 0.1 ln(factor)
    + 1 for yarn and sqrt(1 + ln(factor) / ln(original_len)) for longrope."""
    truncate: bool = True
    """yarn: round the bounds of beta_fast and beta_slow outward to whole pairs."""
    short_factors: tuple[float, ...] | None = None
    """longrope: divisor of the frequency of each pair, for lengths up to original_len."""
    long_factors: tuple[float, ...] | None = None
    """longrope: divisor of the frequency of each pair, for lengths above original_len."""
    window_base: float | None = None
    """Wavelength base for layers with a window, whose frequencies are then not scaled (Gemma 3).
    None uses base."""
    pattern: tuple[bool, ...] | None = None
    """Layers of a looped stack that rotate queries and keys. Layer i rotates them if
    pattern[i % len(pattern)] is true, and otherwise has no positional encoding (SmolLM 3, Cohere
    2). None rotates in every layer."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.base <= 1:
            fail("base", self.base, "must be above 1")
        if self.window_base is not None and self.window_base <= 1:
            fail("window_base", self.window_base, "must be above 1")
        if self.dims is not None and self.dims % 2:
            fail("dims", self.dims, "must be even")
        if self.pattern is not None and not any(self.pattern):
            fail(
                "pattern",
                self.pattern,
                "must rotate at least one layer; to rotate none, use positions None",
            )
        trained = ("dynamic", "llama3", "yarn", "longrope")
        if self.scaling in trained and self.original_len is None:
            fail("original_len", None, f"must be set for scaling {self.scaling!r}")
        if self.factor < 1:
            fail("factor", self.factor, "must be at least 1")
        if self.scaling is None:
            unread(self, "needs a scaling, but scaling is None", "factor")
        if self.scaling not in trained:
            rule = "needs scaling 'dynamic', 'llama3', 'yarn' or 'longrope'"
            unread(self, rule, "original_len")
        if self.scaling not in ("dynamic", "longrope"):
            unread(self, "needs scaling 'dynamic' or 'longrope'", "length")
        if self.scaling != "llama3":
            unread(self, "needs scaling 'llama3'", "low_freq_factor", "high_freq_factor")
        if self.scaling != "yarn":
            unread(self, "needs scaling 'yarn'", "beta_fast", "beta_slow", "truncate")
        if self.scaling not in ("yarn", "longrope"):
            unread(self, "needs scaling 'yarn' or 'longrope'", "attention_factor")
        # the default attention_factor divides by ln(original_len)
        if (self.scaling, self.original_len, self.attention_factor) == ("longrope", 1, None):
            fail("original_len", 1, "must be above 1 unless attention_factor is set")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            fail("high_freq_factor", self.high_freq_factor, "must be above low_freq_factor")
        if self.scaling == "yarn" and self.beta_fast <= self.beta_slow:
            fail("beta_fast", self.beta_fast, "must be above beta_slow")
        if self.scaling != "longrope":
            unread(self, "needs scaling 'longrope'", "short_factors", "long_factors")
            return
        if self.original_len == 1:
            fail("original_len", 1, "must be above 1 for scaling 'longrope'")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if factors is None:
                fail(name, None, "must have one number per pair for scaling 'longrope'")
            if not factors or not all(factor > 0 for factor in factors):
                fail(name, factors, "must be positive numbers, one per pair")
        self._check_pairs(None if self.dims is None else self.dims // 2)

    def _check_pairs(self, pairs: int | None, path: str = "") -> None:
        """Check that both lists have a factor for each pair.

        If `pairs` is None, their lengths must be equal.
        """
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if factors is None:
                continue
            pairs = len(factors) if pairs is None else pairs
            if len(factors) != pairs:
                fail(f"{path}{name}", factors, f"must have {pairs} items, one per pair")

    def check_model(self, model: ModelConfig) -> None:
        latent = model.latent_attention
        if latent is not None:
            if latent.rope_dim % 2:
                fail(
                    "latent_attention.rope_dim", latent.rope_dim, "must be even for positions rope"
                )
            self._check_pairs(latent.rope_dim // 2, "positions.")
        if latent is not None and not model.has_heads:
            if self.dims is not None:
                fail("positions.dims", self.dims, "needs attention in mixers")
        else:
            dims = model.key_dim if self.dims is None else self.dims
            if dims > model.key_dim or dims % 2:
                fail("positions.dims", dims, f"must be even and at most head_dim {model.key_dim}")
            self._check_pairs(dims // 2, "positions.")
        if self.window_base is not None and not any(model.windows):
            fail("positions.window_base", self.window_base, "needs a window")
        if self.pattern is not None:
            depth = max(model.num_layers, model.decoder_layers)
            if len(self.pattern) > depth:
                rule = f"a pattern must have from 1 to {depth} (num_layers) items"
                fail("positions.pattern", self.pattern, rule)
            if model.scan_layers:
                rule = "a pattern needs a looped stack: scan_layers False"
                fail("positions.pattern", self.pattern, rule)

    def in_layer(self, window: int | None, number: int | None = None) -> Rope | None:
        """Return the rotation in a layer, or None if the layer does not rotate.

        Args:
            window: the window of the layer.
            number: the index of the layer, required if there is a `pattern`.
        """
        if self.pattern is not None:
            assert number is not None
            if not self.pattern[number % len(self.pattern)]:
                return None
        if window is None or self.window_base is None:
            return self if self.pattern is None else replace(self, pattern=None)
        # The scaling is left out: a window is shorter than the trained length, so its positions
        # need none.
        return Rope(base=self.window_base, dims=self.dims, pairing=self.pairing)


@config_class(repr=False)
class Shaw(_Positions):
    """Learned vectors for clipped distances, added to keys and values (Shaw et al. 2018)."""

    max_distance: Size = 128
    """Maximum distance. Larger distances are clipped."""

    def __post_init__(self) -> None:
        check_types(self)

    def check_model(self, model: ModelConfig) -> None:
        if model.implementation not in (None, "xla"):
            rule = "must be 'xla' or None for positions 'shaw'"
            fail("implementation", model.implementation, rule)


@config_class(repr=False)
class T5Buckets(_Positions):
    """Learned bias per head and distance bucket (Raffel et al. 2020)."""

    buckets: Size = 32
    """Number of buckets. Half of them contain one distance each. The others contain increasingly
    many."""
    max_distance: Size = 128
    """Smallest distance in the last bucket, which also contains all larger distances."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.buckets % 2:
            fail("buckets", self.buckets, "must be even and at least 2")
        if self.max_distance <= self.buckets // 2:
            rule = f"must be above buckets / 2 = {self.buckets // 2}"
            fail("max_distance", self.max_distance, rule)

    def check_model(self, model: ModelConfig) -> None:
        if model.kind != "decoder" and self.buckets < 4:
            fail("positions.buckets", self.buckets, "must be even and at least 4")


@config_class(repr=False)
class Alibi(_Positions):
    """Bias that decreases linearly with distance, with one slope per head (Press et al. 2022)."""


class CustomPositions(_Positions):
    """Base class of custom positional encodings.

    A subclass is a frozen dataclass that overrides one or more of the methods `embed`, `rotate` and
    `bias`.

    JAX traces these methods. `positions` start from 0 at the first token of a text and are negative
    for padding. They have a single row if all rows are the same. With a cache, positions continue
    from the end of the cache. Keys are cached after rotation.
    """

    custom_kind_of = _Positions

    @property
    def absolute(self) -> bool:  # type: ignore[override]
        """Whether vectors are added to the embeddings. This limits the text length to `max_len`."""
        # A subclass adds vectors if and only if it overrides `embed`.
        return type(self).embed is not CustomPositions.embed

    def embed(
        self,
        positions: Any,  # i32[B or 1, T]; configs do not import JAX
        d_model: int,
    ) -> Any:  # [B or 1, T, D]
        """Return the vectors to add to the embeddings, [B or 1, T, D], or None to add nothing.

        Args:
            positions: i32[B or 1, T].
            d_model: D.
        """
        return None

    def rotate(
        self,
        x: Any,  # [B, T, N, H]
        positions: Any,  # i32[B or 1, T]
    ) -> Any:  # [B, T, N, H]
        """Transform queries or keys x so that their products depend on distances.

        Return None to leave them unchanged.

        Args:
            x: [B, T, N, H].
            positions: i32[B or 1, T].
        """
        return None

    def bias(self, num_heads: int) -> Any:  # `attention` imports this package
        """Return the `Bias` to add to the attention scores, or None to add nothing."""
        return None

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError if the positions cannot be part of a config."""
        check_custom("positions", self)


if TYPE_CHECKING:
    Positions = Learned | Sinusoidal | Rope | Shaw | T5Buckets | Alibi | CustomPositions
else:  # the kinds that can be used in files and flags
    Positions = Learned | Sinusoidal | Rope | Shaw | T5Buckets | Alibi
"""Positional encodings, which are added to the embeddings (`absolute`) or used in attention."""

KINDS: dict[str, type[Positions]] = {
    cls().kind: cls for cls in (Learned, Sinusoidal, Rope, Shaw, T5Buckets, Alibi)
}
"""Kinds of positional encodings, keyed by name."""

SHORTHANDS: dict[str, type[Positions] | None] = {"none": None, **KINDS, "t5": T5Buckets}
"""Strings that select a kind of positional encoding with its default fields."""


def positions_of(name: str) -> Positions | None:
    """Return the positional encoding that a string selects, with its default fields."""
    if name not in SHORTHANDS:
        known = ", ".join(map(repr, SHORTHANDS))
        rule = f"must be one of {known}, or a value such as Rope(base=500.0)"
        fail("positions", name, f"{rule}{nearest(name, SHORTHANDS)}")
    kind = SHORTHANDS[name]
    return None if kind is None else kind()
