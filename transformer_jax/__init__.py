"""Transformers in JAX: one attention function, one algebra of masks, one immutable cache.

The alphabet, everywhere in this library (it is that of `jax.nn`):

    B  batch             N  query heads          D  model dim
    T  query length      K  key/value heads      F  feed-forward dim
    S  key length        G  N // K               V  vocabulary
    W  window            H  head dim             L  layers

Query head n reads key/value head n // G. Arrays are [B, T, N, H]; masks are functions of positions.

Training imports what it needs (optax and more) from `transformer_jax.training`, not from here, and
what reads and writes published models is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformer_jax import cache
from transformer_jax.attention.additive import additive_attention, state_attention
from transformer_jax.attention.api import (
    dot_product_attention,
    dot_product_attention_weights,
    explain_attention,
)
from transformer_jax.attention.biases import (
    ALiBi,
    Bias,
    RelativeBias,
    alibi_slopes,
    relative_bucket,
)
from transformer_jax.attention.masks import (
    Causal,
    Dense,
    Mask,
    Padding,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from transformer_jax.cache.kv_cache import KVCache
from transformer_jax.cache.model_cache import ModelCache, rewind_cache, share_cache
from transformer_jax.cache.paged_cache import PagedCache
from transformer_jax.config import (
    PRESETS,
    ConfigError,
    Frames,
    Learned,
    LoraConfig,
    ModelConfig,
    NgramConfig,
    Patches,
    RecurrentConfig,
    Rope,
    Shaw,
    Sinusoidal,
    T5Buckets,
    TrainConfig,
    Vectors,
    WindowConfig,
    preset,
    train_preset,
)
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import Beams, GNMTPenalty, LengthPenalty, beam_search
from transformer_jax.decoding.continuous_batching import (
    Completion,
    Request,
    Slots,
    admit,
    advance_slots,
    init_slots,
    release,
    serve,
)
from transformer_jax.decoding.generation import bucket, generate, prefill, stream
from transformer_jax.decoding.logit_processors import (
    Ban,
    BanSequences,
    Force,
    ForceLast,
    FrequencyPenalty,
    History,
    MinLength,
    NoRepeatNGram,
    PresencePenalty,
    RepetitionPenalty,
)
from transformer_jax.decoding.samplers import Greedy, MinP, Sample, Temperature, TopK, TopP, Typical
from transformer_jax.decoding.speculative import (
    Draft,
    PromptLookup,
    Proposal,
    Proposer,
    Speculation,
    speculate,
)
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import (
    build,
    cache_bytes,
    init_cache,
    init_decode_state,
    init_paged_cache,
    init_params,
    num_params,
)
from transformer_jax.models.functional import layer_norm, rms_norm
from transformer_jax.models.inputs import frame_positions
from transformer_jax.models.lora import (
    apply_lora,
    init_lora,
    lora_loss,
    merge_lora,
    unmerge_lora,
    with_adapters,
)
from transformer_jax.models.ngram import NgramLM, count_ngrams
from transformer_jax.models.places import places
from transformer_jax.models.positions import (
    apply_rope,
    learned,
    rope_frequencies,
    shaw_scores,
    shaw_values,
    sinusoidal,
)
from transformer_jax.models.quantized import QuantizedKernel, quantize
from transformer_jax.models.recent_tokens import (
    RecentTokens,
    RecentTokensStep,
    init_recent_tokens,
)
from transformer_jax.models.recurrent import (
    RecurrentLM,
    RecurrentSeq2Seq,
    RecurrentState,
    RecurrentStep,
    RecurrentTagger,
    SourceMemory,
    init_recurrent_state,
)
from transformer_jax.models.stack import AttentionWeights, stack_layers, unstack_layers
from transformer_jax.models.streaming import (
    StreamingEncoder,
    chunk_mask,
    rebase_cache,
    rebase_state,
    receptive_field,
    stream_attention,
)
from transformer_jax.models.transformer import Decoder, Encoder, EncoderDecoder
from transformer_jax.models.window import WindowLM
from transformer_jax.programs import remember
from transformer_jax.training.losses import chunked_cross_entropy, cross_entropy

if TYPE_CHECKING:
    from transformer_jax.pretrained.g2p import read_g2p
    from transformer_jax.pretrained.load import load_pretrained
    from transformer_jax.pretrained.peft import load_lora, save_lora
    from transformer_jax.pretrained.save import save_pretrained
    from transformer_jax.pretrained.sentences import (
        SentenceEncoder,
        load_sentence_encoder,
        pool_sentences,
    )
    from transformer_jax.pretrained.tensors import tensor_names
    from transformer_jax.tokenizers.hf_files import load_tokenizer_folder
    from transformer_jax.tokenizers.pretrained import PretrainedTokenizer

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "ALiBi",
    "AttentionWeights",
    "Ban",
    "BanSequences",
    "Beams",
    "Bias",
    "Causal",
    "Completion",
    "ConfigError",
    "Decoder",
    "Dense",
    "Draft",
    "Encoder",
    "EncoderDecoder",
    "Force",
    "ForceLast",
    "Frames",
    "FrequencyPenalty",
    "GNMTPenalty",
    "Greedy",
    "History",
    "KVCache",
    "Learned",
    "LengthPenalty",
    "LoraConfig",
    "Mask",
    "MinLength",
    "MinP",
    "ModelCache",
    "ModelConfig",
    "NgramConfig",
    "NgramLM",
    "NoRepeatNGram",
    "Padding",
    "PagedCache",
    "Patches",
    "Predicate",
    "Prefix",
    "PresencePenalty",
    "PretrainedTokenizer",
    "PromptLookup",
    "Proposal",
    "Proposer",
    "QuantizedKernel",
    "RecentTokens",
    "RecentTokensStep",
    "RecurrentConfig",
    "RecurrentLM",
    "RecurrentSeq2Seq",
    "RecurrentState",
    "RecurrentStep",
    "RecurrentTagger",
    "RelativeBias",
    "RepetitionPenalty",
    "Request",
    "Rope",
    "Sample",
    "Segments",
    "SentenceEncoder",
    "Shaw",
    "Sinusoidal",
    "Slots",
    "SourceMemory",
    "Speculation",
    "StreamingEncoder",
    "T5Buckets",
    "Temperature",
    "TopK",
    "TopP",
    "TrainConfig",
    "Typical",
    "Vectors",
    "Window",
    "WindowConfig",
    "WindowLM",
    "additive_attention",
    "admit",
    "advance_slots",
    "alibi_slopes",
    "apply_lora",
    "apply_rope",
    "beam_search",
    "bucket",
    "build",
    "cache",
    "cache_bytes",
    "chunk_mask",
    "chunked_cross_entropy",
    "count_ngrams",
    "cross_entropy",
    "dot_product_attention",
    "dot_product_attention_weights",
    "explain_attention",
    "fork",
    "frame_positions",
    "generate",
    "init_cache",
    "init_decode_state",
    "init_lora",
    "init_paged_cache",
    "init_params",
    "init_recent_tokens",
    "init_recurrent_state",
    "init_slots",
    "layer_norm",
    "learned",
    "load_lora",
    "load_pretrained",
    "load_sentence_encoder",
    "load_tokenizer_folder",
    "lora_loss",
    "make_step",
    "merge_lora",
    "num_params",
    "places",
    "pool_sentences",
    "prefill",
    "preset",
    "quantize",
    "read_g2p",
    "rebase_cache",
    "rebase_state",
    "receptive_field",
    "relative_bucket",
    "release",
    "rewind_cache",
    "rms_norm",
    "rope_frequencies",
    "save_lora",
    "save_pretrained",
    "serve",
    "share_cache",
    "shaw_scores",
    "shaw_values",
    "sinusoidal",
    "speculate",
    "stack_layers",
    "state_attention",
    "stream",
    "stream_attention",
    "tensor_names",
    "train_preset",
    "unmerge_lora",
    "unstack_layers",
    "with_adapters",
]

remember()

_LATER = {
    "PretrainedTokenizer": "tokenizers.pretrained",
    "SentenceEncoder": "pretrained.sentences",
    "load_lora": "pretrained.peft",
    "load_pretrained": "pretrained.load",
    "load_sentence_encoder": "pretrained.sentences",
    "load_tokenizer_folder": "tokenizers.hf_files",
    "pool_sentences": "pretrained.sentences",
    "read_g2p": "pretrained.g2p",
    "save_lora": "pretrained.peft",
    "save_pretrained": "pretrained.save",
    "tensor_names": "pretrained.tensors",
}
"""Names that `import transformer_jax` does without, by module."""


def __getattr__(name: str) -> Any:
    """Import a name that reads or writes published models when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
