"""Config of a transformer.

Use `dataclasses.replace` to create variations, which are validated again. An error message names
the field, its value and the violated rule.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from transformer_jax.config.architectures import Ability, AnyModelConfig, Shape
from transformer_jax.config.block import CustomBlock
from transformer_jax.config.custom import find_by_name
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
from transformer_jax.config.mixers import STATEFUL, GatedDelta, LatentAttention, Mixer, ShortConv
from transformer_jax.config.positions import (
    CustomPositions,
    Learned,
    Positions,
    Rope,
    Shaw,
    positions_of,
)

Kind = Literal["decoder", "encoder", "encoder-decoder"]
Norm = Literal["layernorm", "rmsnorm"]
NormOrder = Literal["pre", "post", "sandwich", "output", "parallel", "parallel_shared"]
Activation = Literal["relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu", "xielu"]
if TYPE_CHECKING:
    AnyActivation = Activation | Callable[[Any], Any]  # on arrays; configs do not import JAX
else:  # the values that can be used in files and flags
    AnyActivation = Activation
DType = Literal["float32", "bfloat16", "float16"]
Pooler = Literal["tanh", "relu", "gelu", "transform"]
PoolerReads = Literal["first", "mean", "each"]
ClassesOf = Literal["text", "token", "span"]
Remat = Literal["none", "attention", "dots", "full"]


@config_class
class ModelConfig(AnyModelConfig):
    """Config of a transformer.

    `kind` selects the stacks. Most other fields describe a block.
    """

    kind: Kind = "decoder"
    """Architecture: decoder (a causal language model), encoder (bidirectional) or
    encoder-decoder."""
    vocab_size: Size = 256
    """Vocabulary size (V). If source_vocab_size is set, this is the size of the target
    vocabulary."""
    source_vocab_size: Size | None = None
    """encoder-decoder: size of a separate source vocabulary, which has its own embeddings. None
    shares the vocabulary and the embeddings of the target."""
    d_model: Size = 128
    """Width of the residual stream (D)."""
    num_layers: Size = 4
    """Number of blocks. In an encoder-decoder, each stack has this number of blocks unless
    num_decoder_layers is set."""
    share_layers: bool = False
    """encoder: share the parameters of block_0 among all layers, so that it is applied num_layers
    times (ALBERT). Requires a looped stack of identical layers."""
    num_decoder_layers: Size | None = None
    """encoder-decoder: number of blocks in the decoder. None uses num_layers."""
    num_heads: Size = 4
    """Number of query heads (N)."""
    num_kv_heads: Size | None = None
    """Number of key/value heads (K). 1 is multi-query attention (MQA), fewer than num_heads is
    grouped-query attention (GQA). None uses num_heads."""
    head_dim: Size | None = None
    """Width of each query and key head (H). None uses d_model / num_heads. `key_dim` is the
    resulting width."""
    value_head_dim: Size | None = None
    """Width of each value head. None uses head_dim. `value_dim` is the resulting width."""
    d_ff: Count | None = None
    """Hidden width of the feed-forward network (F). None uses 4 * d_model. 0 removes the
    feed-forward network."""
    experts: Experts | None = None
    """Mixture of experts that replaces each feed-forward network. None disables it."""
    mixers: tuple[Mixer, ...] | None = None
    """decoder: mixer of each layer, a pattern that is repeated over the layers of a looped stack:
    layer i uses item i % len(mixers). gated_delta and short_conv have a state of fixed size instead
    of keys and values. latent_attention caches one vector per token instead of keys and values.
    None uses attention in all layers."""
    gated_delta: GatedDelta | None = None
    """Sizes of the gated_delta layers, which `mixers` requires."""
    short_conv: ShortConv | None = None
    """Sizes of the short_conv layers, which `mixers` requires."""
    latent_attention: LatentAttention | None = None
    """Sizes of the latent_attention layers, which `mixers` requires. These layers rotate only the
    rope_dim entries of each query, and `qk_norm`, num_kv_heads and head_dim do not affect them."""
    block: CustomBlock | None = None
    """Custom block, an instance of your own subclass of CustomBlock. Only available in Python."""
    max_len: Size = 256
    """Maximum sequence length, which is also the size of a learned position table."""

    inputs: Vectors | Patches | Frames | None = None
    """Encoder input other than tokens: Vectors, Patches of images or Frames of sound. None means
    tokens. An encoder of other inputs has no token embeddings and no logits."""
    positions: Positions | None = field(default=Learned())
    """Positional encoding. Learned and Sinusoidal vectors are added to the embeddings. Rope, Shaw,
    T5Buckets and Alibi are applied in attention. None means no positional encoding. A string
    selects a kind with its default settings: "none", "learned", "sinusoidal", "rope", "shaw", "t5"
    or "alibi"."""
    window: int | tuple[int | None, ...] | None = None
    """Number of keys that each query sees, including its own. None means all keys. In an encoder,
    the window is two-sided. A tuple is a pattern that is repeated over the layers of a looped
    stack: layer i uses item i % len(window)."""
    sink_tokens: Count = 0
    """Number of initial positions that all queries see in addition to the window (Xiao et al.
    2024)."""

    norm: Norm | None = "layernorm"
    """Norm layer: layernorm (Ba et al. 2016) or rmsnorm (Zhang & Sennrich 2019). None removes all
    norms except `qk_norm`."""
    norm_order: NormOrder = "pre"
    """Placement of the norms n around a branch f. pre: x + f(n(x)) (GPT-2, Llama). post: n(x +
    f(x)) (Vaswani et al., GPT-1, BERT). sandwich: x + n(f(n(x))). output: x + n(f(x)) (OLMo 2).
    parallel: x + f(n(x)) + g(m(x)), where all branches read the input of the block (GPT-NeoX).
    parallel_shared: like parallel, but with one norm for all branches (GPT-J)."""
    first_norm: bool = True
    """Whether block 0 has a norm before attention. Use False if the embeddings are already
    normalized (ModernBERT). False requires a looped stack."""
    norm_eps: Positive = 1e-5
    """Epsilon of the norms, which is added to the variance or mean square under the square root."""
    norm_unit_offset: bool = False
    """Multiply by 1 + scale instead of scale in the norms (Gemma)."""
    embedding_norm: bool = False
    """Normalize the embeddings before the first block (BERT)."""
    activation: AnyActivation = "gelu_tanh"
    """Activation of the feed-forward network and of masked_token_head. A name or a function such as
    `jax.nn.mish`. xielu has two learned numbers per layer (Apertus)."""
    glu: bool = False
    """Use a gated feed-forward network: act(x W_gate) * (x W_up)."""
    glu_limit: Factor | None = None
    """Limit of a gated feed-forward network, which clamps x W_gate from above and x W_up from both
    sides. None disables clamping."""
    glu_unit_offset: bool = False
    """Multiply by 1 + x W_up instead of x W_up in a gated feed-forward network (gpt-oss)."""
    use_bias: bool = True
    """Use bias vectors in projections and in LayerNorm."""
    qkv_bias: bool | None = None
    """Use biases in the query, key and value projections. None uses use_bias."""
    out_bias: bool | None = None
    """Use a bias in the output projection of attention. None uses use_bias."""
    ff_bias: bool | None = None
    """Use biases in the feed-forward network. None uses use_bias."""
    qk_norm: bool = False
    """Normalize queries and keys before positional encodings are applied."""
    qk_norm_kind: Norm = "rmsnorm"
    """Norm layer for `qk_norm`: rmsnorm, or layernorm (Cohere)."""
    qk_norm_bias: bool = False
    """Use bias vectors in `qk_norm`, if its kind is layernorm (Persimmon)."""
    qk_norm_after_rope: bool = False
    """Apply `qk_norm` after the rotation instead of before (Hunyuan)."""
    qk_norm_over: Literal["head", "own_head", "heads"] = "head"
    """Axes that `qk_norm` normalizes. head: each head separately, with one scale for all heads.
    own_head: each head separately, with its own scale (Cohere). heads: all heads together (OLMo
    2)."""
    attention_softcap: Factor | None = None
    """Softcap c of the attention scores: c tanh(scores / c). None disables it."""
    attention_sinks: bool = False
    """Add one learned logit per head to the denominator of the softmax."""
    attention_gate: bool = False
    """Multiply the heads of attention by sigmoid(x W_gate), one number per head and channel
    (Qwen3-Next)."""
    attention_scale: Factor | None = None
    """Scale of q k^T. None uses head_dim^-0.5."""

    embedding_dim: Size | None = None
    """encoder: width of the embeddings (ELECTRA). A linear layer projects them to d_model, and
    masked_token_head projects back for the logits. Without that head, the model has no logits. None
    uses d_model without projections."""
    scale_embeddings: bool = False
    """Multiply token embeddings by sqrt(d_model) (Vaswani et al.)."""
    embedding_scale: Factor | None = None
    """Scale of token embeddings instead of sqrt(d_model) (Granite)."""
    residual_scale: Factor | None = None
    """Scale of the output of each branch before it is added to the residual stream (Granite)."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output matrix."""
    logit_scale: Factor | None = None
    """Factor by which the hidden states are multiplied before the output matrix (T5:
    d_model^-0.5)."""
    logit_bias: bool = False
    """Add a learned bias for each token to the logits."""
    logit_softcap: Factor | None = None
    """Softcap c of the logits: c tanh(logits / c). None disables it."""
    type_vocab_size: Size | None = None
    """Number of token types (BERT: 2, for sentences A and B). None means no type embeddings."""
    num_classes: Size | None = None
    """encoder: number of classes of the classification head. None means no classification head."""
    classes_of: ClassesOf = "text"
    """encoder: unit to classify. text: each row, based on the pooler's output. token: each token,
    for example to find named entities. span: two scores per token, for whether an answer begins or
    ends there."""
    pooler: Pooler | None = None
    """encoder: activation of the pooler, which is a dense layer before the classification head
    (BERT: tanh, DistilBERT: relu, ELECTRA: gelu). transform: the layers of masked_token_head, which
    are a dense layer, an activation and a norm (ModernBERT). None uses tanh if whole texts are
    classified, and otherwise no pooler."""
    pooler_reads: PoolerReads = "first"
    """encoder: input of the pooler. first: the first token of a row. mean: the mean over the tokens
    of a row. each: every token separately, so that a token classifier reads pooled vectors
    (ModernBERT)."""
    masked_token_head: bool = False
    """encoder: apply BERT's transform (dense layer, activation and norm) before the output
    matrix."""

    dropout: Fraction = 0.0
    """Dropout rate of the embeddings and of each branch's output. The flag --dropout 0 also sets
    attention_dropout to 0 unless you pass that flag."""
    attention_dropout: Fraction = 0.0
    """Dropout rate of the attention weights."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights. For the output projections of branches, it is
    divided by sqrt(2 L), or by sqrt(L) if d_ff is 0."""
    dtype: DType = "float32"
    """Dtype of the computation. Parameters are float32."""
    remat: Remat = "none"
    """Values that the backward pass recomputes to save memory. none: no values. attention: all
    values between the queries and the output of attention. dots: all values in a block except
    products with weight matrices. full: all values in a block."""
    scan_layers: bool = False
    """Stack the blocks and run them with lax.scan instead of a Python loop."""
    implementation: str | None = None
    """Attention implementation, which `build` checks. None uses the fastest implementation that
    supports the call."""
    invariant: bool = False
    """Compute every row with the same bits, whatever else is in the batch and however the sequence
    is split into calls. Products add in a fixed order, and attention uses "invariant". Needs a
    single CPU device and the compiled kernels. The environment variable
    TRANSFORMER_JAX_INVARIANT=1 sets it for every model."""

    functions = ("activation",)  # fields that accept a function

    def __post_init__(self) -> None:
        if isinstance(self.positions, str):
            object.__setattr__(self, "positions", positions_of(self.positions))
        if isinstance(self.activation, str) and ":" in self.activation:  # read from a file
            found = find_by_name("activation", self.activation)
            if not is_function(found):
                fail("activation", self.activation, "must be a function of an array")
            object.__setattr__(self, "activation", found)
        check_types(self)
        if self.activation == "xielu":
            without = {"glu False": self.glu, "experts None": self.experts is not None}
            without["masked_token_head False"] = self.masked_token_head
            without["another pooler"] = self.pooler == "transform"
            for rule, found in without.items():
                if found:
                    fail("activation", "xielu", f"needs {rule}")
        if not self.glu:
            unread(self, "needs glu", "glu_limit", "glu_unit_offset")
        if self.scale_embeddings:
            unread(self, "needs scale_embeddings False", "embedding_scale")
        if not all(window is None or window > 0 for window in self.windows):
            fail("window", self.window, "must be positive")
        if isinstance(self.window, tuple):
            depth = max(self.num_layers, self.decoder_layers)
            if not 1 <= len(self.window) <= depth:
                rule = f"a pattern must have from 1 to {depth} (num_layers) items"
                fail("window", self.window, rule)
            if self.scan_layers:
                fail("window", self.window, "a pattern needs a looped stack: scan_layers False")
        if not any(self.windows):
            unread(self, "needs a window", "sink_tokens")
        if self.mixers is not None:
            if not 1 <= len(self.mixers) <= self.num_layers:
                rule = f"a pattern must have from 1 to {self.num_layers} (num_layers) items"
                fail("mixers", self.mixers, rule)
            if self.kind != "decoder":
                fail("mixers", self.mixers, "needs kind 'decoder'")
            if self.scan_layers:
                fail("mixers", self.mixers, "a pattern needs a looped stack: scan_layers False")
            if self.block is not None:
                fail("mixers", self.mixers, "is not supported with a custom block")
        for name in ("gated_delta", "short_conv", "latent_attention"):
            if name not in (self.mixers or ()):
                unread(self, f"needs {name} in mixers", name)
            elif getattr(self, name) is None:
                fail(name, None, f"must be set, because mixers contains {name}")
        if self.gated_delta is not None and self.gated_delta.norm_order is not None:
            if self.norm is None or self.norm_order not in ("pre", "sandwich", "output"):
                rule = "needs a norm and norm_order 'pre', 'sandwich' or 'output'"
                fail("gated_delta.norm_order", self.gated_delta.norm_order, rule)
        if self.latent_attention is not None:
            for kind in (Shaw, CustomPositions):
                if isinstance(self.positions, kind):
                    rule = "latent_attention layers do not support these positions"
                    fail("positions", self.positions, rule)
        if not self.has_heads:
            names = [
                *("num_kv_heads", "head_dim", "value_head_dim", "qkv_bias", "out_bias", "qk_norm"),
                "attention_gate",
            ]
            if self.latent_attention is None:
                names += ["window", "sink_tokens", "attention_softcap", "attention_sinks"]
                names += ["attention_scale", "attention_dropout", "implementation"]
            unread(self, "needs attention in a layer: mixers has none", *names)
        if self.has_heads and self.head_dim is None and self.d_model % self.num_heads:
            fail("num_heads", self.num_heads, f"must divide d_model {self.d_model}")
        if self.num_heads % self.kv_heads:
            fail("num_kv_heads", self.kv_heads, f"must divide num_heads {self.num_heads}")
        if self.norm is None:
            rule = "needs a norm, but norm is None"
            unread(self, rule, "norm_unit_offset", "embedding_norm", "first_norm")
            if not self.is_parallel:
                unread(self, rule, "norm_order")
            if not (self.qk_norm or self.masked_token_head or self.gated_delta is not None):
                unread(self, rule, "norm_eps")
        if self.norm_order_in(0) != "pre":
            unread(self, "needs norm_order 'pre' in layer 0", "first_norm")
        if self.scan_layers:
            unread(self, "needs a looped stack: scan_layers False", "first_norm")
        if not self.qk_norm:
            fields = "qk_norm_kind", "qk_norm_bias", "qk_norm_after_rope", "qk_norm_over"
            unread(self, "needs qk_norm", *fields)
        if self.qk_norm_kind != "layernorm":
            unread(self, "needs qk_norm_kind 'layernorm'", "qk_norm_bias")
        if not isinstance(self.positions, Rope):
            unread(self, "needs positions 'rope'", "qk_norm_after_rope")
        # these checks use the sizes, which have been validated above
        if self.positions is not None:
            self.positions.check_model(self)
        if self.inputs is not None:
            self.inputs.check_model(self)
        if self.block is not None:
            self.block.check_model(self)
        dense = 0 if self.experts is None else self.experts.dense_layers
        if dense and dense >= self.num_layers:
            rule = f"must be below num_layers, {self.num_layers}"
            fail("experts.dense_layers", dense, rule)
        if dense and (self.scan_layers or self.share_layers or self.kind == "encoder-decoder"):
            rule = "needs a looped stack of a decoder or encoder"
            fail("experts.dense_layers", dense, rule)
        if self.experts is not None and self.experts.d_ff is not None and not dense:
            unread(self, f"is not used: experts.d_ff is {self.experts.d_ff}", "d_ff")
        if self.d_ff == 0:
            if self.experts is not None:
                fail("d_ff", 0, "must be positive: experts replace the feed-forward")
            names = ["glu", "ff_bias"]
            if not self.masked_token_head:  # that head also uses the activation
                names.append("activation")
            # cross-attention is a second branch, for which parallel norms are meaningful
            if self.is_parallel and self.kind != "encoder-decoder":
                names.append("norm_order")
            unread(self, "needs a feed-forward, but d_ff is 0", *names)
        if self.kind != "encoder-decoder":
            rule = "needs kind 'encoder-decoder'"
            unread(self, rule, "num_decoder_layers", "source_vocab_size")
        if self.kind != "encoder":
            heads = "type_vocab_size", "num_classes", "pooler", "masked_token_head", "embedding_dim"
            unread(self, "needs kind 'encoder'", *heads, "share_layers")
        if self.scan_layers or isinstance(self.window, tuple) or not self.first_norm:
            unread(self, "needs a looped stack of identical layers", "share_layers")
        if getattr(self.positions, "pattern", None) is not None:
            unread(self, "needs positions without a pattern", "share_layers")
        if self.num_classes is None:
            unread(self, "needs num_classes", "classes_of")
        if self.pooling is None:
            unread(self, "needs a pooler", "pooler_reads")
        if self.pooler_reads == "each" and self.classes_of == "text":
            fail("pooler_reads", "each", "needs classes_of 'token' or 'span'")
        if self.pooler == "transform" and self.masked_token_head:
            fail(
                "pooler",
                "transform",
                "needs masked_token_head False, because both would use the same layers",
            )
        if self.classes_of == "span" and self.num_classes != 2:
            fail("num_classes", self.num_classes, "must be 2 with classes_of 'span'")

        default = os.environ.get("TRANSFORMER_JAX_INVARIANT", "0")
        if default not in ("0", "1"):
            fail("TRANSFORMER_JAX_INVARIANT", default, "must be 0 or 1")
        if default == "1":
            object.__setattr__(self, "invariant", True)
        if self.invariant:
            if self.implementation not in (None, "invariant"):
                rule = "must be 'invariant' or None with invariant True"
                fail("implementation", self.implementation, rule)
            refused = {  # XLA computes sums or softmax of these, or their code is not known
                "positions 'shaw'": isinstance(self.positions, Shaw),
                "inputs other than tokens": self.inputs is not None,
                "a mixture of experts": self.experts is not None,
                "a pooler": self.pooling is not None,
                "your own block": isinstance(self.block, CustomBlock),
                "layers with a state": self.has_state,
                "latent_attention layers": self.latent_attention is not None,
                "activation 'xielu'": self.activation == "xielu",
                "your own activation": callable(self.activation),
                "your own positions": isinstance(self.positions, CustomPositions),
            }
            for what, found in refused.items():
                if found:
                    fail("invariant", True, f"cannot be promised for {what}")

    abilities: ClassVar[frozenset[Ability]] = frozenset(get_args(Ability))

    def supports(self, ability: Ability) -> bool:
        # a loss in chunks multiplies by the output matrix outside the model
        return super().supports(ability) and not (self.invariant and ability == "output_layer")

    # the cached properties are read by every layer in every trace

    @cached_property
    def attention_implementation(self) -> str | None:
        """Implementation that the blocks pass to `dot_product_attention`."""
        return "invariant" if self.invariant else self.implementation

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
        # A table of learned positions has a fixed size.
        return self if isinstance(self.positions, Learned) else replace(self, max_len=count)

    def word_vectors(self, params: Any) -> Any:
        table = "tokens" if self.source_vocab_size is None else "source_tokens"
        return None if self.inputs is not None else params["embed"][table]

    @cached_property
    def embedding_width(self) -> int:
        return self.d_model if self.embedding_dim is None else self.embedding_dim

    @property
    def has_logits(self) -> bool:
        """Whether the model has logits over tokens."""
        narrow = self.embedding_dim is not None and not self.masked_token_head
        return self.kind != "encoder" or (self.inputs is None and not narrow)

    @cached_property
    def is_parallel(self) -> bool:
        """Whether all branches of a block read the input of the block."""
        return self.norm_order in ("parallel", "parallel_shared")

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Return the pattern of windows, where layer i has the window windows[i % len(windows)]."""
        return self.window if isinstance(self.window, tuple) else (self.window,)

    def mixer(self, i: int) -> Mixer:
        """Return the mixer of layer i."""
        return "attention" if self.mixers is None else self.mixers[i % len(self.mixers)]

    def norm_order_in(self, i: int) -> NormOrder:
        """Return the placement of the norms in layer i."""
        own = self.gated_delta.norm_order if self.gated_delta is not None else None
        return self.norm_order if own is None or self.mixer(i) != "gated_delta" else own

    def has_experts(self, i: int | None) -> bool:
        """Whether layer i has experts. None means any layer of a scanned stack."""
        return self.experts is not None and (i is None or i >= self.experts.dense_layers)

    def keeps_state(self, i: int) -> bool:
        """Whether layer i has a state instead of keys and values."""
        return self.mixer(i) in STATEFUL

    @cached_property
    def has_state(self) -> bool:
        """Whether any layer has a state instead of keys and values."""
        return any(map(self.keeps_state, range(len(self.mixers or ()))))

    @cached_property
    def has_heads(self) -> bool:
        """Whether any layer has attention with keys and values of its own for each head."""
        return self.mixers is None or "attention" in self.mixers

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every layer has attention."""
        return set(self.mixers or ()) <= {"attention"}

    def cached_heads(self, i: int) -> tuple[int, int, int]:
        """Return the number of heads in the cache of layer i, and the widths of its two arrays."""
        if self.mixer(i) == "latent_attention":
            assert self.latent_attention is not None
            return 1, self.latent_attention.kv_rank, self.latent_attention.rope_dim
        return self.kv_heads, self.key_dim, self.value_dim

    @property
    def pooling(self) -> Pooler | None:
        """Return the activation of the pooler, or None if there is no pooler."""
        reads = self.num_classes is not None and self.classes_of == "text"
        return "tanh" if self.pooler is None and reads else self.pooler

    @cached_property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @cached_property
    def key_dim(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @cached_property
    def value_dim(self) -> int:
        return self.key_dim if self.value_head_dim is None else self.value_head_dim

    @cached_property
    def ff_dim(self) -> int:
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def expert_dim(self) -> int:
        """Return the hidden width of an expert, or `ff_dim` if there are no experts."""
        width = None if self.experts is None else self.experts.d_ff
        return self.ff_dim if width is None else width

    @property
    def encoder_vocab_size(self) -> int:
        """Return the size of the encoder's vocabulary."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    @property
    def decoder_layers(self) -> int:
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers


register(AnyModelConfig, transformer=ModelConfig)


def transformer_with(config: AnyModelConfig, **changes: Any) -> AnyModelConfig:
    """Return the config of a transformer with changed fields, or any other config unchanged."""
    return replace(config, **changes) if isinstance(config, ModelConfig) else config


def as_transformer(config: AnyModelConfig) -> ModelConfig:
    """Narrow the type of a config that must be a transformer at this point."""
    assert isinstance(config, ModelConfig), f"{type(config).__name__} is not a transformer"
    return config
