"""Frozen configurations and presets; standard library only.

A config is passed whole. `dataclasses.replace` makes variations; every replacement is validated
again. Absent is `None`, a mode is a `Literal`; an error names the field, its value and the rule.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

Kind = Literal["decoder", "encoder", "encoder-decoder"]
Positions = Literal["none", "learned", "sinusoidal", "rope", "shaw", "t5", "alibi"]
Norm = Literal["layernorm", "rmsnorm"]
NormOrder = Literal["pre", "post", "sandwich"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
DType = Literal["float32", "bfloat16", "float16"]
RopeScaling = Literal["linear", "ntk", "dynamic", "llama3", "yarn", "longrope"]
Tokenizer = Literal["char", "byte", "bpe", "pretrained"]
Cell = Literal["lstm", "gru"]
StateAttention = Literal["dot", "general", "additive"]
Pooler = Literal["tanh", "relu"]


class ConfigError(ValueError):
    """A config field has a value that is not allowed, or two fields contradict each other."""


def _fail(name: str, value: object, rule: str) -> None:
    raise ConfigError(f"{name} is {value!r}: {rule}")


def _check_types(config: Any) -> None:
    """Every field holds its annotated type: `"512"` is no integer and NaN is no number."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        options = get_args(hint) if get_origin(hint) not in (None, Literal) else (hint,)
        if not any(_fits(value, option) for option in options):
            _fail(name, value, f"must be {_spell(hint)}")


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint) and isinstance(value, str)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        kinds = get_args(item) or (item,)
        return type(value) is tuple and all(any(_fits(v, k) for k in kinds) for v in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return type(value) is hint


def _spell(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(a) for a in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a tuple ({_spell(get_args(hint)[0])}, ...)"
    if get_origin(hint) is not None:
        return " or ".join(_spell(a) for a in get_args(hint))
    if hint is float:
        return "a finite number"
    return "None" if hint is type(None) else f"of type {hint.__name__}"


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            _fail(name, value, "must be positive")


def _non_negative(config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= 0:
            _fail(name, getattr(config, name), "must not be negative")


def _int32(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value >= 2**31:
            _fail(name, value, "must be below 2**31")


def _fraction(config: Any, *names: str) -> None:
    for name in names:
        if not 0.0 <= getattr(config, name) < 1.0:
            _fail(name, getattr(config, name), "must be at least 0 and below 1")


def _unread(config: Any, rule: str, *names: str) -> None:
    """Fields that nothing reads, for the reason `rule`, must stand at their defaults."""
    for name in names:
        value = getattr(config, name)
        if value != type(config).__dataclass_fields__[name].default:
            _fail(name, value, rule)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions: pair k of a head turns by `position * base^(-2k/dims)` radians."""

    base: float = 10_000.0
    """Wavelength base (theta)."""
    dims: int | None = None
    """Dimensions of each head that rotate, from the first on; None rotates all."""
    pairing: Literal["half", "interleaved"] = "half"
    """Dimensions that form pair k: (k, k + dims/2), or (2k, 2k + 1) as in the RoFormer paper."""
    scaling: RopeScaling | None = None
    """How the frequencies are stretched beyond the trained length."""
    factor: float = 1.0
    """Stretch: the new length over `original_len`."""
    original_len: int | None = None
    """Context length of pre-training; needed by dynamic, llama3, yarn and longrope."""
    length: int | None = None
    """dynamic, longrope: the length the rotation is made for; None is original_len, for which
    dynamic stretches nothing. It is fixed, so that cached keys stay what they were."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_len / low_freq_factor are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_len / high_freq_factor are kept."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this within original_len are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched fully."""
    attention_factor: float | None = None
    """yarn, longrope: multiplier on the rotated vectors; None is 0.1 ln(factor) + 1 of yarn and
    sqrt(1 + ln(factor) / ln(original_len)) of longrope."""
    truncate: bool = True
    """yarn: the bounds that beta_fast and beta_slow give are rounded outwards to whole pairs."""
    short_factors: tuple[float, ...] | None = None
    """longrope: divisor of each pair's frequency up to original_len."""
    long_factors: tuple[float, ...] | None = None
    """longrope: the same beyond original_len."""

    def __post_init__(self) -> None:
        _check_types(self)
        _positive(self, "base", "factor", "dims", "original_len", "length", "attention_factor")
        _positive(self, "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        if self.base <= 1:
            _fail("base", self.base, "must be above 1")
        if self.dims is not None and self.dims % 2:
            _fail("dims", self.dims, "must be even")
        trained = ("dynamic", "llama3", "yarn", "longrope")
        if self.scaling in trained and self.original_len is None:
            _fail("original_len", None, f"scaling {self.scaling!r} needs the original length")
        if self.factor < 1:
            _fail("factor", self.factor, "must be at least 1")
        if self.scaling is None:
            _unread(self, "has no meaning while scaling is None", "factor")
        if self.scaling not in trained:
            rule = "needs scaling 'dynamic', 'llama3', 'yarn' or 'longrope'"
            _unread(self, rule, "original_len")
        if self.scaling not in ("dynamic", "longrope"):
            _unread(self, "needs scaling 'dynamic' or 'longrope'", "length")
        if self.scaling != "llama3":
            _unread(self, "needs scaling 'llama3'", "low_freq_factor", "high_freq_factor")
        if self.scaling != "yarn":
            _unread(self, "needs scaling 'yarn'", "beta_fast", "beta_slow", "truncate")
        if self.scaling not in ("yarn", "longrope"):
            _unread(self, "needs scaling 'yarn' or 'longrope'", "attention_factor")
        if (self.scaling, self.original_len, self.attention_factor) == ("longrope", 1, None):
            _fail("original_len", 1, "must be above 1, or attention_factor be given")
        self._check_factors()
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            _fail("high_freq_factor", self.high_freq_factor, "must be above low_freq_factor")
        if self.scaling == "yarn" and self.beta_fast <= self.beta_slow:
            _fail("beta_fast", self.beta_fast, "must be above beta_slow")

    def _check_factors(self) -> None:
        if self.scaling != "longrope":
            _unread(self, "needs scaling 'longrope'", "short_factors", "long_factors")
            return
        if self.original_len == 1:
            _fail("original_len", 1, "must be above 1 for scaling 'longrope'")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if factors is None:
                _fail(name, None, "scaling 'longrope' needs one of each pair")
            if not factors or not all(factor > 0 for factor in factors):
                _fail(name, factors, "must be positive numbers, one of each pair")
        _check_pairs(self, None if self.dims is None else self.dims // 2)


def _check_pairs(rope: RopeConfig, pairs: int | None, path: str = "") -> None:
    """The factors are as many as pairs; where that is not known, as one another."""
    for name in ("short_factors", "long_factors"):
        factors = getattr(rope, name)
        if factors is None:
            continue
        pairs = len(factors) if pairs is None else pairs
        if len(factors) != pairs:
            _fail(f"{path}{name}", factors, f"must be as many as pairs, {pairs}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One transformer: `kind` says which stacks it has, the rest what every block looks like."""

    kind: Kind = "decoder"
    """decoder (causal language model), encoder (bidirectional), or encoder-decoder."""
    vocab_size: int = 256
    """Token kinds."""
    d_model: int = 128
    """Width of the residual stream (D)."""
    num_layers: int = 4
    """Blocks in the stack; in each stack of an encoder-decoder unless num_decoder_layers is set."""
    num_decoder_layers: int | None = None
    """Blocks of the decoder of an encoder-decoder; None is num_layers."""
    num_heads: int = 4
    """Query heads (N)."""
    num_kv_heads: int | None = None
    """Key and value heads (K): None is num_heads (MHA), 1 is MQA, between is GQA."""
    head_dim: int | None = None
    """Width of a query and key head (H); None is d_model / num_heads."""
    value_head_dim: int | None = None
    """Width of a value head; None is head_dim."""
    d_ff: int | None = None
    """Hidden width of the feed-forward (F); None is 4 * d_model."""
    max_len: int = 256
    """Longest sequence; the size of a learned position table."""

    positions: Positions = "learned"
    """How order enters: added to embeddings (learned, sinusoidal) or in attention (the others)."""
    position_offset: int = 0
    """learned: rows of the table before that of position 0 (RoBERTa and BART have 2)."""
    sinusoid: Literal["interleaved", "halves"] = "interleaved"
    """sinusoidal: sines and cosines take turns (Vaswani et al.), or sines come first (Marian)."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary settings, used when positions is rope."""
    window_rope_base: float | None = None
    """rope: base of layers with a window, which then stretch nothing (Gemma 3); None is rope's."""
    relative_buckets: int = 32
    """t5: buckets of the bias table."""
    relative_max_distance: int = 128
    """t5: distance from which all share the last bucket; shaw: where distances are clipped."""
    window: int | tuple[int | None, ...] | None = None
    """Keys a query sees, itself included; None sees all. Two-sided in an encoder. A tuple is a
    pattern over the layers of a looped stack: layer i has window[i % len(window)]."""
    sink_tokens: int = 0
    """Beside its window a query sees the first so many positions (Xiao et al. 2024)."""

    norm: Norm = "layernorm"
    norm_order: NormOrder = "pre"
    """pre: x + f(n(x)) (GPT-2, Llama); post: n(x + f(x)) (Vaswani et al., GPT-1, BERT);
    sandwich: x + n(f(n(x)))."""
    norm_eps: float = 1e-5
    norm_unit_offset: bool = False
    """Norms multiply by 1 + scale (Gemma)."""
    embedding_norm: bool = False
    """Normalise the embeddings before the first block (BERT)."""
    activation: Activation = "gelu_tanh"
    glu: bool = False
    """Gated feed-forward: act(x W_gate) * (x W_up)."""
    use_bias: bool = True
    """Bias vectors in projections and in LayerNorm."""
    qkv_bias: bool | None = None
    """Biases of the query, key and value projections; None is use_bias."""
    ff_bias: bool | None = None
    """Biases of the feed-forward; None is use_bias."""
    qk_norm: bool = False
    """Normalise queries and keys over the head dimension (RMSNorm) before positions."""
    attention_softcap: float | None = None
    """c tanh(scores / c)."""
    attention_sinks: bool = False
    """One learned logit per head in the softmax's denominator."""
    attention_scale: float | None = None
    """Multiplier on q k^T; None is head_dim^-0.5."""

    scale_embeddings: bool = False
    """Multiply embeddings by sqrt(d_model) (Vaswani et al.)."""
    tie_embeddings: bool = True
    """The output matrix is the embedding matrix."""
    logit_scale: float | None = None
    """Multiplier on what the output matrix reads (T5: d_model^-0.5)."""
    logit_bias: bool = False
    logit_softcap: float | None = None
    type_vocab_size: int | None = None
    """Token types (BERT's sentence A and B); None has no table."""
    num_classes: int | None = None
    """encoder: classes of the classification head; None has no such head."""
    pooler: Pooler | None = None
    """encoder: activation of the dense layer over the first token, which the classification head
    reads (BERT: tanh, DistilBERT: relu); None has tanh where there are classes, else no layer."""
    masked_token_head: bool = False
    """encoder: BERT's transform (dense, activation, norm) before the output matrix."""

    dropout: float = 0.0
    """Rate on embeddings and on each branch's output."""
    attention_dropout: float = 0.0
    """Rate on attention weights."""
    init_std: float = 0.02
    """Standard deviation of weights; branch outputs get it divided by sqrt(2 L)."""
    dtype: DType = "float32"
    """Compute dtype; parameters are float32."""
    remat: bool = False
    """Recompute each block in the backward pass."""
    scan_layers: bool = False
    """One stacked block under lax.scan instead of a Python loop."""
    implementation: str | None = None
    """Attention implementation by name; None takes the best that is legal."""

    def __post_init__(self) -> None:
        _check_types(self)
        _positive(self, "vocab_size", "d_model", "num_layers", "num_decoder_layers", "num_heads")
        _positive(self, "num_kv_heads", "head_dim", "value_head_dim", "d_ff", "max_len")
        _positive(self, "relative_buckets", "relative_max_distance", "norm_eps", "init_std")
        _positive(self, "attention_softcap", "attention_scale", "logit_softcap", "logit_scale")
        _positive(self, "type_vocab_size", "num_classes")
        _non_negative(self, "sink_tokens", "position_offset")
        _int32(self, "vocab_size", "d_model", "num_layers", "num_decoder_layers", "num_heads")
        _int32(self, "num_kv_heads", "head_dim", "value_head_dim", "d_ff", "max_len")
        _int32(self, "relative_buckets", "relative_max_distance", "type_vocab_size", "num_classes")
        _int32(self, "sink_tokens", "position_offset")
        _fraction(self, "dropout", "attention_dropout")
        self._check_window()
        if self.head_dim is None and self.d_model % self.num_heads:
            _fail("num_heads", self.num_heads, f"does not divide d_model {self.d_model}")
        if self.num_heads % self.kv_heads:
            _fail("num_kv_heads", self.kv_heads, f"does not divide num_heads {self.num_heads}")
        if self.positions == "sinusoidal" and self.d_model % 2:
            _fail("d_model", self.d_model, "must be even for sinusoidal positions")
        if self.positions == "rope":
            dims = self.key_dim if self.rope.dims is None else self.rope.dims
            if dims > self.key_dim or dims % 2:
                _fail("rope.dims", dims, f"must be even and at most head_dim {self.key_dim}")
            _check_pairs(self.rope, dims // 2, "rope.")
            if self.window_rope_base is not None and self.window_rope_base <= 1:
                _fail("window_rope_base", self.window_rope_base, "must be above 1")
            if not any(self.windows):
                _unread(self, "needs a window", "window_rope_base")
        elif self.rope != RopeConfig():
            name = next(n for n, x in vars(RopeConfig()).items() if getattr(self.rope, n) != x)
            _fail(f"rope.{name}", getattr(self.rope, name), "needs positions 'rope'")
        if self.positions != "rope":
            _unread(self, "needs positions 'rope'", "window_rope_base")
        if self.positions != "learned":
            _unread(self, "needs positions 'learned'", "position_offset")
        if self.positions != "sinusoidal":
            _unread(self, "needs positions 'sinusoidal'", "sinusoid")
        if self.positions == "t5":
            smallest = 4 if self.kind != "decoder" else 2
            if self.relative_buckets < smallest or self.relative_buckets % 2:
                rule = f"must be even and at least {smallest}"
                _fail("relative_buckets", self.relative_buckets, rule)
            if self.relative_max_distance <= self.relative_buckets // 2:
                rule = f"must be above relative_buckets / 2 = {self.relative_buckets // 2}"
                _fail("relative_max_distance", self.relative_max_distance, rule)
        else:
            _unread(self, "needs positions 't5'", "relative_buckets")
            if self.positions != "shaw":
                _unread(self, "needs positions 't5' or 'shaw'", "relative_max_distance")
        if self.kind != "encoder-decoder":
            _unread(self, "needs kind 'encoder-decoder'", "num_decoder_layers")
        if self.kind != "encoder":
            heads = "type_vocab_size", "num_classes", "pooler", "masked_token_head"
            _unread(self, "needs kind 'encoder'", *heads)
        names = "xla", "blockwise", "pallas", "pallas_unordered", "cudnn"
        if self.implementation not in (None, *names):
            rule = f"must be one of {', '.join(map(repr, names))} or None"
            _fail("implementation", self.implementation, rule)
        if self.positions == "shaw" and self.implementation not in (None, "xla"):
            _fail("implementation", self.implementation, "positions 'shaw' needs 'xla' or None")

    def _check_window(self) -> None:
        if not all(window is None or window > 0 for window in self.windows):
            _fail("window", self.window, "must be positive")
        if isinstance(self.window, tuple):
            depth = max(self.num_layers, self.decoder_layers)
            if not 1 <= len(self.window) <= depth:
                _fail("window", self.window, f"a pattern has from 1 to {depth} (num_layers) items")
            if self.scan_layers:
                _fail("window", self.window, "a pattern needs a looped stack: scan_layers False")
        if not any(self.windows):
            _unread(self, "needs a window", "sink_tokens")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The pattern over the layers: layer i has windows[i % len(windows)]."""
        return self.window if isinstance(self.window, tuple) else (self.window,)

    def layer_rope(self, window: int | None) -> RopeConfig:
        """How a layer with this window turns its queries and keys."""
        if window is None or self.window_rope_base is None:
            return self.rope
        base = self.window_rope_base
        return RopeConfig(base=base, dims=self.rope.dims, pairing=self.rope.pairing)

    @property
    def pooling(self) -> Pooler | None:
        """The pooler's activation, where there is a pooler."""
        return "tanh" if self.pooler is None and self.num_classes is not None else self.pooler

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def key_dim(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.key_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def ff_dim(self) -> int:
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def decoder_layers(self) -> int:
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """One recurrent model: a language model, or with `source_vocab_size` a source's translator."""

    vocab_size: int = 256
    """Token kinds; of an encoder-decoder, the target's."""
    source_vocab_size: int | None = None
    """Token kinds of the source; None has no encoder."""
    d_embed: int = 128
    """Width of a token's vector."""
    d_hidden: int = 128
    """Width of a cell's state; of each direction of the encoder, too."""
    num_layers: int = 1
    """Cells on top of each other; in the encoder as many."""
    cell: Cell = "lstm"
    """lstm (Hochreiter & Schmidhuber 1997, Gers et al. 2000), or gru (Cho et al. 2014)."""
    bidirectional: bool = False
    """The encoder reads the source from both ends (Schuster & Paliwal 1997)."""
    attention: StateAttention | None = None
    """How the decoder looks at the encoder's states: dot or general (Luong et al. 2015) with the
    state behind each token, additive (Bahdanau et al. 2015) with the one before it; None has only
    the encoder's last state."""
    d_attention: int | None = None
    """additive: width of the hidden layer; None is d_hidden."""
    tie_embeddings: bool = False
    """The output matrix is the embedding matrix."""
    dropout: float = 0.0
    """Rate on embeddings, between layers and before the output matrix (Zaremba et al. 2014)."""
    init_std: float = 0.1
    """Standard deviation of embeddings and of the output matrix."""

    def __post_init__(self) -> None:
        _check_types(self)
        _positive(self, "vocab_size", "source_vocab_size", "d_embed", "d_hidden", "num_layers")
        _positive(self, "d_attention", "init_std")
        _fraction(self, "dropout")
        if self.source_vocab_size is None:
            _unread(self, "needs a source_vocab_size", "bidirectional", "attention")
        if self.attention != "additive":
            _unread(self, "needs attention 'additive'", "d_attention")
        if self.attention == "dot" and self.bidirectional:
            rule = "two directions are twice as wide as the decoder's state: take 'general'"
            _fail("attention", self.attention, rule)
        if self.tie_embeddings and self.d_embed != self.d_hidden:
            rule = f"needs d_embed {self.d_embed} to equal d_hidden {self.d_hidden}"
            _fail("tie_embeddings", self.tie_embeddings, rule)

    @property
    def attention_dim(self) -> int:
        return self.d_hidden if self.d_attention is None else self.d_attention

    @property
    def memory_dim(self) -> int:
        """Width of the encoder's states."""
        return 2 * self.d_hidden if self.bidirectional else self.d_hidden


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters W + scale A B of a model's kernels (Hu et al. 2021)."""

    rank: int = 8
    """Columns of A and rows of B (r)."""
    alpha: float = 16.0
    """Numerator of the scale."""
    targets: tuple[str, ...] | Literal["all-linear"] = ("query", "value")
    """Modules with a kernel, by the end of their path: query, attention/query, encoder/block_0/
    attention/query; "all-linear" is every kernel of every block. Paths are those of a looped stack,
    whatever the parameters are."""
    layers: tuple[int, ...] | None = None
    """Only in these blocks of each stack; None is everywhere."""
    rslora: bool = False
    """Scale alpha / sqrt(rank) in place of alpha / rank (Kalajdzievski 2023)."""

    def __post_init__(self) -> None:
        _check_types(self)
        _positive(self, "rank", "alpha")
        if not self.targets or "" in tuple(self.targets):
            _fail("targets", self.targets, "must name at least one module, and none by ''")
        if self.layers is not None:
            if not self.layers or min(self.layers) < 0 or len({*self.layers}) < len(self.layers):
                _fail("layers", self.layers, "must be different indices from 0, at least one")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run: what to read, how long, how fast, where to write."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: str = "python-docs"
    """A text file, a folder of them, - for standard input, python-docs, or shakespeare."""
    tokenizer: Tokenizer = "char"
    """char: the text's own characters; byte: UTF-8 bytes; bpe: trained on the text; pretrained:
    that of init_from."""
    init_from: str | None = None
    """A published decoder to start from, a folder or an id; the model and its tokenizer are its."""
    bpe_vocab_size: int = 1024
    """bpe: token kinds."""
    text_errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: strict stops and names the offset, replace writes U+FFFD."""
    val_fraction: float = 0.1
    """The last part of the text, held out."""
    out: str = "runs/default"
    """The run folder."""
    steps: int = 2000
    """Optimizer steps."""
    batch_size: int = 12
    """Sequences in a micro-batch."""
    context: int | None = None
    """Tokens in a training sequence; None is the model's max_len."""
    accumulation: int = 1
    """Micro-batches of a step; their gradients are weighted by tokens."""
    learning_rate: float = 1e-3
    """Peak, after the warm-up."""
    min_learning_rate: float = 1e-4
    """Where the cosine ends."""
    warmup_steps: int = 100
    """Linear warm-up from 0."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.99
    """AdamW's decay of the mean squared gradient."""
    weight_decay: float = 0.1
    """AdamW's, on matrices only."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    label_smoothing: float = 0.0
    """Share of a label's probability spread over the vocabulary, in training only."""
    eval_every: int = 250
    """Steps between evaluations on the held-out part."""
    eval_batches: int | None = None
    """Random batches in an evaluation; None reads the whole held-out part."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the best and the last are always kept."""
    keep: int = 2
    """How many of the last checkpoints stay."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    sample_tokens: int = 400
    """Length of the sample at the end; 0 writes none."""
    seed: int = 0
    """All randomness follows from it."""

    def __post_init__(self) -> None:
        _check_types(self)
        _positive(self, "steps", "batch_size", "context", "accumulation", "learning_rate")
        _positive(self, "clip_norm", "eval_every", "eval_batches", "checkpoint_every", "keep")
        _positive(self, "log_every", "bpe_vocab_size")
        _non_negative(self, "min_learning_rate", "warmup_steps", "weight_decay", "sample_tokens")
        _int32(self, "steps", "batch_size", "accumulation", "warmup_steps", "eval_every")
        _int32(self, "eval_batches", "checkpoint_every", "keep", "log_every", "bpe_vocab_size")
        _int32(self, "sample_tokens")
        _fraction(self, "beta1", "beta2", "label_smoothing")
        if not 0.0 < self.val_fraction < 1.0:
            _fail("val_fraction", self.val_fraction, "must be between 0 and 1")
        if self.min_learning_rate > self.learning_rate:
            rule = f"must not exceed learning_rate {self.learning_rate}"
            _fail("min_learning_rate", self.min_learning_rate, rule)
        if not 0 <= self.seed < 2**32:
            _fail("seed", self.seed, "must be at least 0 and below 2**32")
        if self.context is not None and self.context > self.model.max_len:
            _fail("context", self.context, f"exceeds the model's max_len {self.model.max_len}")
        if self.bpe_vocab_size < 257:
            rule = "must be at least 257 (every byte, one merge)"
            _fail("bpe_vocab_size", self.bpe_vocab_size, rule)
        if (self.tokenizer == "pretrained") != (self.init_from is not None):
            rule = f"must be 'pretrained' where init_from is given, it is {self.init_from!r}"
            _fail("tokenizer", self.tokenizer, rule)
        if self.tokenizer != "bpe":
            _unread(self, "needs tokenizer 'bpe'", "bpe_vocab_size")

    @property
    def sequence_len(self) -> int:
        return self.model.max_len if self.context is None else self.context


_GPT2 = ModelConfig(vocab_size=50257, d_model=768, num_layers=12, num_heads=12, max_len=1024)
_GPT2 = dataclasses.replace(_GPT2, dropout=0.1, attention_dropout=0.1)
_BERT = ModelConfig(
    kind="encoder", vocab_size=30522, d_model=768, num_layers=12, num_heads=12, max_len=512,
    norm_order="post", norm_eps=1e-12, embedding_norm=True, activation="gelu", logit_bias=True,
    type_vocab_size=2, masked_token_head=True, dropout=0.1, attention_dropout=0.1,
)  # fmt: skip
_SHAKESPEARE = ModelConfig(
    vocab_size=65, d_model=128, num_layers=4, num_heads=4, max_len=64, use_bias=False
)

_MODELS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(d_model=64, num_layers=2, num_heads=4, max_len=64),
    "shakespeare-cpu": _SHAKESPEARE,
    "shakespeare-gpu": dataclasses.replace(
        _SHAKESPEARE, d_model=384, num_layers=6, num_heads=6, max_len=256,
        dropout=0.2, attention_dropout=0.2,
    ),
    "transformer-base": ModelConfig(
        kind="encoder-decoder", vocab_size=37000, d_model=512, num_layers=6, num_heads=8,
        d_ff=2048, max_len=512, positions="sinusoidal", norm_order="post", activation="relu",
        scale_embeddings=True, dropout=0.1,
    ),
    "bert-base": _BERT,
    "bert-large": dataclasses.replace(_BERT, d_model=1024, num_layers=24, num_heads=16),
    "gpt2": _GPT2,
    "gpt2-medium": dataclasses.replace(_GPT2, d_model=1024, num_layers=24, num_heads=16),
    "gpt2-large": dataclasses.replace(_GPT2, d_model=1280, num_layers=36, num_heads=20),
    "gpt2-xl": dataclasses.replace(_GPT2, d_model=1600, num_layers=48, num_heads=25),
    "llama3-8b": ModelConfig(
        vocab_size=128256, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, d_ff=14336,
        max_len=8192, positions="rope", rope=RopeConfig(base=500_000.0), norm="rmsnorm",
        activation="silu", glu=True, use_bias=False, tie_embeddings=False, dtype="bfloat16",
    ),
}  # fmt: skip

# nanoGPT trains its small character model at 1e-3; at 3e-3 it is better by 0.1 nats.
_TRAINING: dict[str, dict[str, Any]] = {
    "default": dict(learning_rate=3e-3),
    "tiny": dict(steps=200, eval_every=100, checkpoint_every=100, warmup_steps=20),
    "shakespeare-cpu": dict(data="shakespeare", learning_rate=3e-3),
    "shakespeare-gpu": dict(data="shakespeare", steps=5000, batch_size=64),
}

PRESETS: tuple[str, ...] = tuple(_MODELS)


def _lookup(name: str) -> ModelConfig:
    _known("preset", name, list(_MODELS))
    return _MODELS[name]


def _known(kind: str, name: str, names: list[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{kind} is {name!r}: must be one of {', '.join(names)}{hint}")


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    for name in changes:
        _known("field", name, [f.name for f in dataclasses.fields(config)])
    return dataclasses.replace(config, **changes)


def preset(name: str, **changes: Any) -> ModelConfig:
    """The published or recommended config of that name, with `changes` to its fields.

    Sizes: Vaswani et al. 2017 (base), Devlin et al. 2019 (BERT), Radford et al. 2019 (GPT-2),
    Dubey et al. 2024 (Llama 3), nanoGPT's character recipes (shakespeare-*).
    """
    return _changed(_lookup(name), changes)


def train_preset(name: str | None = None, **changes: Any) -> TrainConfig:
    """The training recipe of a preset; None is the default run on Python's own documentation."""
    recipe: dict[str, Any] = _TRAINING.get("default" if name is None else name, {})
    model = _SHAKESPEARE if name is None else _lookup(name)
    return _changed(TrainConfig(model=model, **recipe), changes)


def fine_tuning(model: ModelConfig, init_from: str) -> TrainConfig:
    """The recipe that goes on with the published `model` of `init_from`."""
    return TrainConfig(
        model=model, init_from=init_from, tokenizer="pretrained", context=min(model.max_len, 512),
        batch_size=8, steps=500, learning_rate=5e-5, min_learning_rate=5e-6, warmup_steps=50,
    )  # fmt: skip
