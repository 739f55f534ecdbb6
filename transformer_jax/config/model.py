"""Configure one transformer.

A config is passed whole. `dataclasses.replace` makes variations; every replacement is validated
again. Absent is `None`, a mode is a `Literal`; an error names the field, its value and the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from transformer_jax.config.architectures import Ability, AnyModelConfig, Shape
from transformer_jax.config.block import OwnBlock
from transformer_jax.config.experts import Experts
from transformer_jax.config.fields import (
    Count,
    Factor,
    Fraction,
    Positive,
    Size,
    check_types,
    fail,
    is_function,
    unread,
)
from transformer_jax.config.inputs import Frames, Patches, Vectors
from transformer_jax.config.keywords import config_class
from transformer_jax.config.kinds import register
from transformer_jax.config.own import found_again
from transformer_jax.config.positions import Learned, Positions, positions_of

Kind = Literal["decoder", "encoder", "encoder-decoder"]
Norm = Literal["layernorm", "rmsnorm"]
NormOrder = Literal["pre", "post", "sandwich", "output", "parallel", "parallel_shared"]
Activation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]
if TYPE_CHECKING:
    AnyActivation = Activation | Callable[[Any], Any]  # of arrays; a config imports no JAX
else:  # what files and flags name
    AnyActivation = Activation
DType = Literal["float32", "bfloat16", "float16"]
Pooler = Literal["tanh", "relu", "gelu", "transform"]
PoolerReads = Literal["first", "mean", "each"]
ClassesOf = Literal["text", "token", "span"]
Remat = Literal["none", "attention", "dots", "full"]


@config_class
class ModelConfig(AnyModelConfig):
    """Describe a transformer: `kind` says which stacks it has, the rest what a block looks like."""

    kind: Kind = "decoder"
    """decoder (causal language model), encoder (bidirectional), or encoder-decoder."""
    vocab_size: Size = 256
    """Token kinds; with a source_vocab_size, the target's."""
    source_vocab_size: Size | None = None
    """encoder-decoder: token kinds of the source, whose embeddings are then a table of their own;
    None shares the target's."""
    d_model: Size = 128
    """Width of the residual stream (D)."""
    num_layers: Size = 4
    """Blocks in the stack; in each stack of an encoder-decoder unless num_decoder_layers is set."""
    share_layers: bool = False
    """encoder: all blocks are one and the same, block_0, which the stream passes num_layers times
    (ALBERT). Needs a looped stack, and layers that do not differ."""
    num_decoder_layers: Size | None = None
    """Blocks of the decoder of an encoder-decoder; None is num_layers."""
    num_heads: Size = 4
    """Query heads (N)."""
    num_kv_heads: Size | None = None
    """Key and value heads (K): None is num_heads (MHA), 1 is MQA, between is GQA."""
    head_dim: Size | None = None
    """Width of a query and key head (H); None is d_model / num_heads. `key_dim` is what results."""
    value_head_dim: Size | None = None
    """Width of a value head; None is head_dim. `value_dim` is what results."""
    d_ff: Count | None = None
    """Hidden width of the feed-forward (F); None is 4 * d_model, 0 has none: attention alone."""
    experts: Experts | None = None
    """A mixture of experts in the place of each feed-forward; None has one feed-forward."""
    block: OwnBlock | None = None
    """A value of a class of your own, which changes or replaces the block (in Python only)."""
    max_len: Size = 256
    """Longest sequence; the size of a learned position table."""

    inputs: Vectors | Patches | Frames | None = None
    """Input of the encoder in the place of tokens: Vectors, Patches of images, or Frames of sound;
    None reads tokens. With it an encoder has no token table and no logits."""
    positions: Positions | None = field(default=Learned())
    """How order enters: Learned or Sinusoidal vectors join the embeddings; Rope, Shaw, T5Buckets
    and Alibi act in attention; None has no positions. A string is short for a kind with its
    defaults: "none", "learned", "sinusoidal", "rope", "shaw", "t5" or "alibi"."""
    window: int | tuple[int | None, ...] | None = None
    """Keys a query sees, itself included; None sees all. Two-sided in an encoder. A tuple is a
    pattern over the layers of a looped stack: layer i has window[i % len(window)]."""
    sink_tokens: Count = 0
    """Beside its window a query sees the first so many positions (Xiao et al. 2024)."""

    norm: Norm | None = "layernorm"
    """layernorm (Ba et al. 2016), rmsnorm (Zhang & Sennrich 2019); None has none (`qk_norm` is
    its own)."""
    norm_order: NormOrder = "pre"
    """pre: x + f(n(x)) (GPT-2, Llama); post: n(x + f(x)) (Vaswani et al., GPT-1, BERT);
    sandwich: x + n(f(n(x))); output: x + n(f(x)) (OLMo 2); parallel: x + f(n(x)) + g(m(x)),
    where all branches read the stream before the block (GPT-NeoX); parallel_shared: with one norm
    for all of them (GPT-J)."""
    first_norm: bool = True
    """False has no norm before the attention of block 0, for embeddings that have one (ModernBERT).
    Needs a looped stack."""
    norm_eps: Positive = 1e-5
    """Added to the variance, or to the mean square, under the root."""
    norm_unit_offset: bool = False
    """Norms multiply by 1 + scale (Gemma)."""
    embedding_norm: bool = False
    """Normalise the embeddings before the first block (BERT)."""
    activation: AnyActivation = "gelu_tanh"
    """A name, or a function of an array, such as `jax.nn.mish`."""
    glu: bool = False
    """Gated feed-forward: act(x W_gate) * (x W_up)."""
    glu_limit: Factor | None = None
    """Clamp what a gated feed-forward multiplies: x W_gate from above, x W_up on both sides."""
    glu_unit_offset: bool = False
    """A gated feed-forward multiplies by 1 + x W_up (gpt-oss)."""
    use_bias: bool = True
    """Bias vectors in projections and in LayerNorm."""
    qkv_bias: bool | None = None
    """Biases of the query, key and value projections; None is use_bias."""
    out_bias: bool | None = None
    """Bias of attention's output matrix; None is use_bias."""
    ff_bias: bool | None = None
    """Biases of the feed-forward; None is use_bias."""
    qk_norm: bool = False
    """Normalise queries and keys before positions."""
    qk_norm_kind: Norm = "rmsnorm"
    """`qk_norm` is an RMSNorm, or a LayerNorm without a bias (Cohere)."""
    qk_norm_over: Literal["head", "own_head", "heads"] = "head"
    """`qk_norm` is of each head by one scale, of each by a scale of its own (Cohere), or of all
    heads together (OLMo 2)."""
    attention_softcap: Factor | None = None
    """c tanh(scores / c)."""
    attention_sinks: bool = False
    """One learned logit per head in the softmax's denominator."""
    attention_scale: Factor | None = None
    """Multiplier on q k^T; None is head_dim^-0.5."""

    embedding_dim: Size | None = None
    """encoder: width of the embeddings, which a linear layer takes to d_model, and
    masked_token_head back for logits, of which there are none without it (ELECTRA). None is
    d_model, without such a layer."""
    scale_embeddings: bool = False
    """Multiply embeddings of tokens by sqrt(d_model) (Vaswani et al.)."""
    embedding_scale: Factor | None = None
    """Multiplier on embeddings of tokens in the place of sqrt(d_model) (Granite)."""
    residual_scale: Factor | None = None
    """Multiplier on what each branch adds to the stream (Granite)."""
    tie_embeddings: bool = True
    """The output matrix is the embedding matrix."""
    logit_scale: Factor | None = None
    """Multiplier on what the output matrix reads (T5: d_model^-0.5)."""
    logit_bias: bool = False
    """Add a learned number of each token to the logits."""
    logit_softcap: Factor | None = None
    """c tanh(logits / c)."""
    type_vocab_size: Size | None = None
    """Token types (BERT's sentence A and B); None has no table."""
    num_classes: Size | None = None
    """encoder: classes of the classification head; None has no such head."""
    classes_of: ClassesOf = "text"
    """encoder: what the classes are of. text: of each row, from the pooler; token: of every token
    (names in a text); span: of every token two numbers, whether an answer begins and ends there."""
    pooler: Pooler | None = None
    """encoder: activation of the dense layer over the first token, which the classification head
    reads (BERT: tanh, DistilBERT: relu, ELECTRA: gelu); None has tanh where there are classes, else
    no layer. transform: the layers of masked_token_head: dense, activation, norm (ModernBERT)."""
    pooler_reads: PoolerReads = "first"
    """encoder: what the pooler reads. first: the first token of a row; mean: the mean of its
    tokens; each: every token, of whose vector a classifier of tokens then is (ModernBERT)."""
    masked_token_head: bool = False
    """encoder: BERT's transform (dense, activation, norm) before the output matrix."""

    dropout: Fraction = 0.0
    """Rate on embeddings and on each branch's output. The flag --dropout 0 sets attention_dropout
    to 0 too, unless that is given."""
    attention_dropout: Fraction = 0.0
    """Rate on attention weights."""
    init_std: Positive = 0.02
    """Standard deviation of weights; branch outputs get it divided by sqrt(2 L), where d_ff is 0
    by sqrt(L)."""
    dtype: DType = "float32"
    """Compute dtype; parameters are float32."""
    remat: Remat = "none"
    """What the backward pass computes again, to hold less: none; attention, what is between queries
    and its output; dots, of each block all but the products with its matrices; full, each block."""
    scan_layers: bool = False
    """One stacked block under lax.scan instead of a Python loop."""
    implementation: str | None = None
    """Attention implementation by name, which `build` checks; None takes the best that is legal."""

    functions = ("activation",)  # fields that a function may be

    def __post_init__(self) -> None:
        if isinstance(self.positions, str):
            object.__setattr__(self, "positions", positions_of(self.positions))
        if isinstance(self.activation, str) and ":" in self.activation:  # of a file
            found = found_again("activation", self.activation)
            if not is_function(found):
                fail("activation", self.activation, "must be a function of an array")
            object.__setattr__(self, "activation", found)
        check_types(self)
        if not self.glu:
            unread(self, "needs glu", "glu_limit", "glu_unit_offset")
        if self.scale_embeddings:
            unread(self, "needs scale_embeddings False", "embedding_scale")
        if not all(window is None or window > 0 for window in self.windows):
            fail("window", self.window, "must be positive")
        if isinstance(self.window, tuple):
            depth = max(self.num_layers, self.decoder_layers)
            if not 1 <= len(self.window) <= depth:
                fail("window", self.window, f"a pattern has from 1 to {depth} (num_layers) items")
            if self.scan_layers:
                fail("window", self.window, "a pattern needs a looped stack: scan_layers False")
        if not any(self.windows):
            unread(self, "needs a window", "sink_tokens")
        if self.head_dim is None and self.d_model % self.num_heads:
            fail("num_heads", self.num_heads, f"does not divide d_model {self.d_model}")
        if self.num_heads % self.kv_heads:
            fail("num_kv_heads", self.kv_heads, f"does not divide num_heads {self.num_heads}")
        if self.norm is None:
            rule = "needs a norm, which is None"
            unread(self, rule, "norm_unit_offset", "embedding_norm", "first_norm")
            if not self.is_parallel:
                unread(self, rule, "norm_order")
            if not (self.qk_norm or self.masked_token_head):
                unread(self, rule, "norm_eps")
        if self.norm_order != "pre":
            unread(self, "needs norm_order 'pre'", "first_norm")
        if self.scan_layers:
            unread(self, "needs a looped stack: scan_layers False", "first_norm")
        if not self.qk_norm:
            unread(self, "needs qk_norm", "qk_norm_kind", "qk_norm_over")
        # positions, inputs and blocks read the sizes, which have been checked by now
        if self.positions is not None:
            self.positions.check_model(self)
        if self.inputs is not None:
            self.inputs.check_model(self)
        if self.block is not None:
            self.block.check_model(self)
        if self.experts is not None and self.experts.d_ff is not None:
            rule = f"experts.d_ff is {self.experts.d_ff}, and nothing else reads it"
            unread(self, rule, "d_ff")
        if self.d_ff == 0:
            if self.experts is not None:
                fail("d_ff", 0, "must be positive: experts stand in the place of a feed-forward")
            # the head of hidden tokens has the activation too; cross-attention is a second branch
            activation = () if self.masked_token_head else ("activation",)
            alone = ("norm_order",) if self.is_parallel and self.kind != "encoder-decoder" else ()
            unread(self, "needs a feed-forward: d_ff is 0", "glu", "ff_bias", *activation, *alone)
        if self.kind != "encoder-decoder":
            rule = "needs kind 'encoder-decoder'"
            unread(self, rule, "num_decoder_layers", "source_vocab_size")
        if self.kind != "encoder":
            heads = "type_vocab_size", "num_classes", "pooler", "masked_token_head", "embedding_dim"
            unread(self, "needs kind 'encoder'", *heads, "share_layers")
        if self.scan_layers or isinstance(self.window, tuple) or not self.first_norm:
            unread(self, "needs a looped stack of layers that do not differ", "share_layers")
        if getattr(self.positions, "pattern", None) is not None:
            unread(self, "needs positions without a pattern", "share_layers")
        if self.num_classes is None:
            unread(self, "needs num_classes", "classes_of")
        if self.pooling is None:
            unread(self, "needs a pooler", "pooler_reads")
        if self.pooler_reads == "each" and self.classes_of == "text":
            fail("pooler_reads", "each", "needs classes_of 'token' or 'span'")
        if self.pooler == "transform" and self.masked_token_head:
            fail("pooler", "transform", "needs masked_token_head False, whose layers it takes")
        if self.classes_of == "span" and self.num_classes != 2:
            fail("num_classes", self.num_classes, "must be 2: classes_of is 'span'")

    abilities: ClassVar[frozenset[Ability]] = frozenset(get_args(Ability))

    @property
    def named(self) -> str:
        return "transformer"

    @classmethod
    def usual(cls, name: str, shape: Shape) -> Self:
        return cls(
            kind=shape, vocab_size=65, d_model=128, max_len=64, num_heads=4, use_bias=False,
            num_layers=2 if shape == "encoder-decoder" else 4,
        )  # fmt: skip

    @property
    def longest_row(self) -> int | None:
        limited = self.positions is None or self.positions.absolute
        return self.max_len if limited or self.kind != "encoder-decoder" else None

    def with_max_len(self, count: int) -> ModelConfig:
        # the longest row is a size of a table of learned positions, which stays as it is
        return self if isinstance(self.positions, Learned) else replace(self, max_len=count)

    def word_vectors(self, params: Any) -> Any:
        separate = self.source_vocab_size is not None
        own = "source_tokens" if separate else "tokens"
        return None if self.inputs is not None else params["embed"][own]

    @property
    def embedding_width(self) -> int:
        return self.d_model if self.embedding_dim is None else self.embedding_dim

    @property
    def has_logits(self) -> bool:
        """Say whether there are logits of tokens."""
        narrow = self.embedding_dim is not None and not self.masked_token_head
        return self.kind != "encoder" or (self.inputs is None and not narrow)

    @property
    def is_parallel(self) -> bool:
        """Say whether all branches of a block read the stream before it."""
        return self.norm_order in ("parallel", "parallel_shared")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the pattern over the layers: layer i has windows[i % len(windows)]."""
        return self.window if isinstance(self.window, tuple) else (self.window,)

    @property
    def pooling(self) -> Pooler | None:
        """Return the pooler's activation, where there is a pooler."""
        reads = self.num_classes is not None and self.classes_of == "text"
        return "tanh" if self.pooler is None and reads else self.pooler

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
    def expert_dim(self) -> int:
        """Return the hidden width of an expert; where there are none, of the feed-forward."""
        own = None if self.experts is None else self.experts.d_ff
        return self.ff_dim if own is None else own

    @property
    def encoder_vocab_size(self) -> int:
        """Return how many kinds of tokens the encoder reads."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    @property
    def decoder_layers(self) -> int:
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers


register(AnyModelConfig, transformer=ModelConfig)


def transformer_with(config: AnyModelConfig, **changes: Any) -> AnyModelConfig:
    """Return a transformer with other fields; a model of another kind as it is."""
    return replace(config, **changes) if isinstance(config, ModelConfig) else config


def as_transformer(config: AnyModelConfig) -> ModelConfig:
    """Narrow the type of a config that only a transformer can have brought here."""
    assert isinstance(config, ModelConfig), f"a {type(config).__name__} is no transformer"
    return config
