"""Configure how order enters a model: one value, whose fields are those of its kind.

A value is checked by itself when it is made, and against its model by `check_model`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

from transformer_jax.config.fields import Count, Positive, Size, check_types, fail, nearest, unread
from transformer_jax.config.keywords import config_class
from transformer_jax.config.kinds import kind_name
from transformer_jax.config.own import check_own

if TYPE_CHECKING:
    from transformer_jax.config.model import ModelConfig

RopeScaling = Literal["linear", "ntk", "dynamic", "llama3", "yarn", "longrope"]


class _Positions:
    """Say what every kind of positions has in common."""

    absolute = False
    """Vectors of absolute positions join the embeddings; else attention reads distances."""

    def __repr__(self) -> str:
        """Name the kind and the fields that are not at their defaults, as they would be typed."""
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    @property
    def kind(self) -> str:
        """Return the name of this kind in files and flags: the class's, in lower case."""
        return kind_name(type(self))

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError where these positions and the fields of `model` contradict."""


@config_class(repr=False)
class Learned(_Positions):
    """Add a learned vector of each position to the embeddings (Gehring et al. 2017)."""

    absolute = True

    offset: Count = 0
    """Rows of the table before that of position 0 (RoBERTa and BART have 2)."""
    buckets: int | None = None
    """Beside the vectors act the biases of T5Buckets, of so many buckets (MPNet); None has none."""
    max_distance: int = 128
    """With buckets: distance from which all share the last one."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.buckets is None:
            unread(self, "needs buckets", "max_distance")
        distance_buckets(self)  # checks both

    def check_model(self, model: ModelConfig) -> None:
        if (found := distance_buckets(self)) is not None:
            found.check_model(model)


@config_class(repr=False)
class Sinusoidal(_Positions):
    """Sines and cosines of each position, added to the embeddings (Vaswani et al. 2017, 3.5)."""

    absolute = True

    layout: Literal["interleaved", "halves"] = "interleaved"
    """Sines and cosines take turns (Vaswani et al.), or sines come first (Marian)."""
    base: Positive = 10_000.0
    """Wavelength base: pair k turns by position * base^(-2k/d_model) radians."""
    offset: Count = 0
    """Added to each position (M2M-100 and NLLB count from 2)."""

    def __post_init__(self) -> None:
        check_types(self)

    def check_model(self, model: ModelConfig) -> None:
        if model.embedding_width % 2:
            name = "d_model" if model.embedding_dim is None else "embedding_dim"
            fail(name, model.embedding_width, "must be even for sinusoidal positions")


@config_class(repr=False)
class Rope(_Positions):
    """Rotations of queries and keys (Su et al. 2021).

    Pair k of a head turns by `position * base^(-2k/dims)` radians.
    """

    base: Positive = 10_000.0
    """Wavelength base (theta)."""
    dims: Size | None = None
    """Dimensions of each head that rotate, from the first on; None rotates all."""
    pairing: Literal["half", "interleaved"] = "half"
    """Dimensions that form pair k: (k, k + dims/2), or (2k, 2k + 1) as in the RoFormer paper."""
    scaling: RopeScaling | None = None
    """How the frequencies are stretched beyond the trained length."""
    factor: Positive = 1.0
    """Stretch: the new length over `original_len`."""
    original_len: Size | None = None
    """Context length of pre-training; needed by dynamic, llama3, yarn and longrope."""
    length: Size | None = None
    """dynamic, longrope: the length the rotation is made for; None is original_len, for which
    dynamic stretches nothing. It is fixed, so that cached keys stay what they were."""
    low_freq_factor: Positive = 1.0
    """llama3: wavelengths above original_len / low_freq_factor are stretched fully."""
    high_freq_factor: Positive = 4.0
    """llama3: wavelengths below original_len / high_freq_factor are kept."""
    beta_fast: Positive = 32.0
    """yarn: dimensions that turn more often than this within original_len are kept."""
    beta_slow: Positive = 1.0
    """yarn: dimensions that turn less often than this are stretched fully."""
    attention_factor: Positive | None = None
    """yarn, longrope: multiplier on the rotated vectors; None is 0.1 ln(factor) + 1 of yarn and
    sqrt(1 + ln(factor) / ln(original_len)) of longrope."""
    truncate: bool = True
    """yarn: the bounds that beta_fast and beta_slow give are rounded outwards to whole pairs."""
    short_factors: tuple[float, ...] | None = None
    """longrope: divisor of each pair's frequency up to original_len."""
    long_factors: tuple[float, ...] | None = None
    """longrope: the same beyond original_len."""
    window_base: float | None = None
    """Base of the layers that have a window, which then stretch nothing (Gemma 3); None is base."""
    pattern: tuple[bool, ...] | None = None
    """Layer i of a looped stack turns where pattern[i % len(pattern)] is true, and else has no
    positions (SmolLM 3, Cohere 2); None turns in every layer."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.base <= 1:
            fail("base", self.base, "must be above 1")
        if self.window_base is not None and self.window_base <= 1:
            fail("window_base", self.window_base, "must be above 1")
        if self.dims is not None and self.dims % 2:
            fail("dims", self.dims, "must be even")
        if self.pattern is not None and not any(self.pattern):
            fail("pattern", self.pattern, "must have a layer that turns, or positions be None")
        trained = ("dynamic", "llama3", "yarn", "longrope")
        if self.scaling in trained and self.original_len is None:
            fail("original_len", None, f"scaling {self.scaling!r} needs the original length")
        if self.factor < 1:
            fail("factor", self.factor, "must be at least 1")
        if self.scaling is None:
            unread(self, "has no meaning while scaling is None", "factor")
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
        # ln(original_len) divides in the factor that is not given
        if (self.scaling, self.original_len, self.attention_factor) == ("longrope", 1, None):
            fail("original_len", 1, "must be above 1, or attention_factor be given")
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
                fail(name, None, "scaling 'longrope' needs one of each pair")
            if not factors or not all(factor > 0 for factor in factors):
                fail(name, factors, "must be positive numbers, one of each pair")
        self._check_pairs(None if self.dims is None else self.dims // 2)

    def _check_pairs(self, pairs: int | None, path: str = "") -> None:
        """Check that there is a factor of each pair; of unknown pairs, as many of both kinds."""
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if factors is None:
                continue
            pairs = len(factors) if pairs is None else pairs
            if len(factors) != pairs:
                fail(f"{path}{name}", factors, f"must be as many as pairs, {pairs}")

    def check_model(self, model: ModelConfig) -> None:
        dims = model.key_dim if self.dims is None else self.dims
        if dims > model.key_dim or dims % 2:
            fail("positions.dims", dims, f"must be even and at most head_dim {model.key_dim}")
        self._check_pairs(dims // 2, "positions.")
        if self.window_base is not None and not any(model.windows):
            fail("positions.window_base", self.window_base, "needs a window")
        if self.pattern is not None:
            depth = max(model.num_layers, model.decoder_layers)
            if len(self.pattern) > depth:
                rule = f"a pattern has from 1 to {depth} (num_layers) items"
                fail("positions.pattern", self.pattern, rule)
            if model.scan_layers:
                rule = "a pattern needs a looped stack: scan_layers False"
                fail("positions.pattern", self.pattern, rule)

    def in_layer(self, window: int | None, number: int | None = None) -> Rope | None:
        """Return how a layer turns its queries and keys; None where it does not.

        Args:
            window: of the layer.
            number: of the layer, counted from 0; a `pattern` reads it.
        """
        if self.pattern is not None:
            assert number is not None
            if not self.pattern[number % len(self.pattern)]:
                return None
        if window is None or self.window_base is None:
            return self if self.pattern is None else replace(self, pattern=None)
        return Rope(base=self.window_base, dims=self.dims, pairing=self.pairing)


@config_class(repr=False)
class Shaw(_Positions):
    """Learned vectors of each clipped distance, added to keys and values (Shaw et al. 2018)."""

    max_distance: Size = 128
    """Where distances are clipped."""

    def __post_init__(self) -> None:
        check_types(self)

    def check_model(self, model: ModelConfig) -> None:
        if model.implementation not in (None, "xla"):
            fail("implementation", model.implementation, "positions 'shaw' needs 'xla' or None")


@config_class(repr=False)
class T5Buckets(_Positions):
    """Add a learned bias of each head for each bucket of distances (Raffel et al. 2020)."""

    buckets: Size = 32
    """Rows of the table; half of them are distances of their own, the others widen."""
    max_distance: Size = 128
    """Distance from which all share the last bucket."""

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
    """Add a bias that falls with the distance, at a slope of each head (Press et al. 2022)."""


def distance_buckets(positions: Positions | None) -> T5Buckets | None:
    """Return the buckets of distances whose biases act in attention, or None."""
    if isinstance(positions, Learned) and positions.buckets is not None:
        return T5Buckets(buckets=positions.buckets, max_distance=positions.max_distance)
    return positions if isinstance(positions, T5Buckets) else None


class OwnPositions(_Positions):
    """Hold positions of your own: make a frozen dataclass of it with one or more of these methods.

    Each is traced in the model. `positions` are counted from 0 at the first token of a text and
    negative where it is padded, with one row where all rows have the same; with a cache they go on
    where it ends, and rotated keys are cached.
    """

    own_kind_of = _Positions

    @property
    def absolute(self) -> bool:  # type: ignore[override]
        """Say whether vectors join the embeddings: a text is then no longer than `max_len`."""
        return type(self).embed is not OwnPositions.embed

    def embed(
        self,
        positions: Any,  # i32[B or 1, T]; a config imports no JAX
        d_model: int,
    ) -> Any:  # [B or 1, T, D]
        """Return the vectors that join the embeddings; None joins none.

        Args:
            positions: i32[B or 1, T].
            d_model: D.

        Returns:
            [B or 1, T, D].
        """
        return None

    def rotate(
        self,
        x: Any,  # [B, T, N, H]
        positions: Any,  # i32[B or 1, T]
    ) -> Any:  # [B, T, N, H]
        """Return queries or keys as their product is to read their distance; None leaves them.

        Args:
            x: [B, T, N, H].
            positions: i32[B or 1, T].

        Returns:
            [B, T, N, H].
        """
        return None

    def bias(self, num_heads: int) -> Any:  # of attention, a floor above
        """Return the `Bias` of the attention scores; None has none."""
        return None

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError for a value that cannot be a part of a config."""
        check_own("positions", self)


if TYPE_CHECKING:
    Positions = Learned | Sinusoidal | Rope | Shaw | T5Buckets | Alibi | OwnPositions
else:  # what files and flags name
    Positions = Learned | Sinusoidal | Rope | Shaw | T5Buckets | Alibi
"""How order enters a model: joins the embeddings (`absolute`), or is read in attention."""

KINDS: dict[str, type[Positions]] = {
    cls().kind: cls for cls in (Learned, Sinusoidal, Rope, Shaw, T5Buckets, Alibi)
}
"""Every kind of positions by its name."""

SHORTHANDS: dict[str, type[Positions] | None] = {"none": None, **KINDS, "t5": T5Buckets}
"""What a plain string in the place of positions means: a kind with its defaults."""


def positions_of(name: str) -> Positions | None:
    """Return what a plain string in the place of positions means: a kind with its defaults."""
    if name not in SHORTHANDS:
        known = ", ".join(map(repr, SHORTHANDS))
        rule = f"must be one of {known}, or a value such as Rope(base=500.0)"
        fail("positions", name, f"{rule}{nearest(name, SHORTHANDS)}")
    kind = SHORTHANDS[name]
    return None if kind is None else kind()
