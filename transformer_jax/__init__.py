"""Transformers in JAX: one attention function, one algebra of masks, one immutable cache.

Axis names used throughout the library (as in `jax.nn`):

    B  batch             N  query heads          D  model dim
    T  query length      K  key/value heads      F  feed-forward dim
    S  key length        G  N // K               V  vocabulary
    W  window            H  head dim             L  layers

Query head n reads key/value head n // G. Arrays are [B, T, N, H]; masks are functions of positions.

The public names are listed below. Import other names from their modules, such as `models.lora`:

    Attention      dot_product_attention, dot_product_attention_weights, explain_attention
    Masks, biases  Mask, Causal, Window, Prefix, Segments, Padding, Dense, Predicate, Bias, ALiBi,
                   RelativeBias
    Configs        ModelConfig, RecurrentConfig, ConvolutionConfig, WindowConfig, NgramConfig,
                   LoraConfig, TrainConfig, preset, train_preset, PRESETS, ConfigError, Rope,
                   Sinusoidal, Learned, Shaw, T5Buckets, Vectors, Frames, Patches, Experts,
                   GatedDelta, ShortConv, LatentAttention
    Models         build, init_params, num_params, places, quantize, Decoder, Encoder,
                   EncoderDecoder, StreamingEncoder
    Caches         init_cache, init_paged_cache, init_decode_state, cache_bytes, rewind_cache,
                   fork, KVCache, ModelCache, PagedCache, StateCache
    Decoding       make_step, generate, stream, prefill, beam_search, LengthPenalty, speculate,
                   Draft, PromptLookup, serve_requests, Request
    Samplers       Greedy, Sample, Temperature, TopK, TopP, MinP
    Processors     Ban, BanSequences, Force, ForceLast, FrequencyPenalty, MinLength,
                   NoRepeatNGram, PresencePenalty, RepetitionPenalty
    Text           load, LanguageModel
    Training       fit, cross_entropy, chunked_cross_entropy
    Files          load_pretrained, save_pretrained, load_tokenizer_folder, load_sentence_encoder,
                   load_lora, save_lora, export_decoder

The modules `decoding`, `interpret`, `masks`, `pretrained`, `server`, `tokenizers` and `training`
contain more, as in `tj.interpret.zero`. Some of these modules are imported on first use, as are
`fit` and the functions that read or write training runs and published models.
"""

import dataclasses
import importlib
import sys
from typing import TYPE_CHECKING, Any

from flax import linen as nn

from transformer_jax.attention.api import (
    dot_product_attention,
    dot_product_attention_weights,
    explain_attention,
)
from transformer_jax.attention.biases import ALiBi, Bias, RelativeBias
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
from transformer_jax.cache.model_cache import ModelCache, rewind_cache
from transformer_jax.cache.paged_cache import PagedCache
from transformer_jax.cache.state_cache import StateCache
from transformer_jax.config import (
    PRESETS,
    ConfigError,
    Experts,
    Frames,
    GatedDelta,
    LatentAttention,
    Learned,
    LoraConfig,
    ModelConfig,
    Patches,
    Rope,
    Shaw,
    ShortConv,
    Sinusoidal,
    T5Buckets,
    TrainConfig,
    Vectors,
    preset,
    train_preset,
)
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.fields import nearest
from transformer_jax.config.keywords import known_keywords
from transformer_jax.config.kinds import register
from transformer_jax.config.tasks import Task
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.continuous_batching import Request, serve_requests
from transformer_jax.decoding.generation import generate, prefill, stream
from transformer_jax.decoding.logit_processors import (
    Ban,
    BanSequences,
    Force,
    ForceLast,
    FrequencyPenalty,
    MinLength,
    NoRepeatNGram,
    PresencePenalty,
    RepetitionPenalty,
)
from transformer_jax.decoding.proposers import Draft, PromptLookup
from transformer_jax.decoding.samplers import Greedy, MinP, Sample, Temperature, TopK, TopP
from transformer_jax.decoding.speculative import speculate
from transformer_jax.decoding.step import make_step
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.factory import (
    build,
    cache_bytes,
    init_cache,
    init_decode_state,
    init_paged_cache,
    init_params,
    num_params,
)
from transformer_jax.models.places import places
from transformer_jax.models.quantized import quantize
from transformer_jax.models.streaming import StreamingEncoder
from transformer_jax.models.transformer import Decoder, Encoder
from transformer_jax.training.losses import chunked_cross_entropy, cross_entropy

if TYPE_CHECKING:
    from transformer_jax.lectures.convolution import ConvolutionConfig
    from transformer_jax.lectures.ngram import NgramConfig
    from transformer_jax.lectures.recurrent import RecurrentConfig
    from transformer_jax.lectures.window import WindowConfig
    from transformer_jax.pretrained.load import load_pretrained
    from transformer_jax.pretrained.peft import load_lora, save_lora
    from transformer_jax.pretrained.save import save_pretrained
    from transformer_jax.pretrained.sentences import load_sentence_encoder
    from transformer_jax.text.export import export_decoder
    from transformer_jax.text.language_model import LanguageModel, load
    from transformer_jax.tokenizers.hf_files import load_tokenizer_folder
    from transformer_jax.training.loop import fit

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "ALiBi",
    "Ban",
    "BanSequences",
    "Bias",
    "Causal",
    "ConfigError",
    "ConvolutionConfig",
    "Decoder",
    "Dense",
    "Draft",
    "Encoder",
    "EncoderDecoder",
    "Experts",
    "Force",
    "ForceLast",
    "Frames",
    "FrequencyPenalty",
    "GatedDelta",
    "Greedy",
    "KVCache",
    "LanguageModel",
    "LatentAttention",
    "Learned",
    "LengthPenalty",
    "LoraConfig",
    "Mask",
    "MinLength",
    "MinP",
    "ModelCache",
    "ModelConfig",
    "NgramConfig",
    "NoRepeatNGram",
    "Padding",
    "PagedCache",
    "Patches",
    "Predicate",
    "Prefix",
    "PresencePenalty",
    "PromptLookup",
    "RecurrentConfig",
    "RelativeBias",
    "RepetitionPenalty",
    "Request",
    "Rope",
    "Sample",
    "Segments",
    "Shaw",
    "ShortConv",
    "Sinusoidal",
    "StateCache",
    "StreamingEncoder",
    "T5Buckets",
    "Temperature",
    "TopK",
    "TopP",
    "TrainConfig",
    "Vectors",
    "Window",
    "WindowConfig",
    "beam_search",
    "build",
    "cache_bytes",
    "chunked_cross_entropy",
    "cross_entropy",
    "dot_product_attention",
    "dot_product_attention_weights",
    "explain_attention",
    "export_decoder",
    "fit",
    "fork",
    "generate",
    "init_cache",
    "init_decode_state",
    "init_paged_cache",
    "init_params",
    "load",
    "load_lora",
    "load_pretrained",
    "load_sentence_encoder",
    "load_tokenizer_folder",
    "make_step",
    "num_params",
    "places",
    "prefill",
    "preset",
    "quantize",
    "rewind_cache",
    "save_lora",
    "save_pretrained",
    "serve_requests",
    "speculate",
    "stream",
    "train_preset",
]


# make public classes suggest the intended argument for an unknown keyword
_class: Any
for _class in [value for value in globals().values() if dataclasses.is_dataclass(value)]:
    # configs are already wrapped
    if not issubclass(_class, nn.Module) and not hasattr(_class.__init__, "__wrapped__"):
        _class.__init__ = known_keywords(_class.__init__, _class.__name__)

# `lectures` may import every other folder, so its classes are registered by name and imported later
register(
    AnyModelConfig,
    **dict.fromkeys(("lstm", "gru", "rnn"), "transformer_jax.lectures.recurrent:RecurrentConfig"),
    convolution="transformer_jax.lectures.convolution:ConvolutionConfig",
    window="transformer_jax.lectures.window:WindowConfig",
    ngram="transformer_jax.lectures.ngram:NgramConfig",
)
register(
    Task,
    **{
        name.lower(): f"transformer_jax.lectures.tasks:{name}Task"
        for name in (
            "Reverse", "Copy", "Addition", "Dates", "Recall", "Modular", "Digits", "Tones",
        )
    },
)  # fmt: skip

_LATER = {
    "ConvolutionConfig": "lectures.convolution",
    "LanguageModel": "text.language_model",
    "NgramConfig": "lectures.ngram",
    "RecurrentConfig": "lectures.recurrent",
    "WindowConfig": "lectures.window",
    "export_decoder": "text.export",
    "fit": "training.loop",
    "load": "text.language_model",
    "load_lora": "pretrained.peft",
    "load_pretrained": "pretrained.load",
    "load_sentence_encoder": "pretrained.sentences",
    "load_tokenizer_folder": "tokenizers.hf_files",
    "save_lora": "pretrained.peft",
    "save_pretrained": "pretrained.save",
}
"""Names imported on first use, each mapped to its module."""

_MODULES = {
    "interpret": "interpret",
    "masks": "attention.masks",
    "pretrained": "pretrained",
    "server": "server",
}
"""Modules imported on first use as an attribute."""


def __getattr__(name: str) -> Any:
    """Import a name in `_LATER` or `_MODULES` on first use.

    For any other name, raise AttributeError. The message contains the module that defines the name,
    or the most similar name.
    """
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _LATER:
        imported = [m for m in list(sys.modules.values()) if m.__name__.startswith(f"{__name__}.")]
        defined_in = [
            m.__name__
            for m in imported
            if name in getattr(m, "__all__", ())
            or getattr(vars(m).get(name), "__module__", None) == m.__name__
        ]
        hint = nearest(name, __all__)
        if defined_in:
            hint = f"; use `from {min(defined_in, key=len)} import {name}`"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, including those imported on first use.

    Editors use them for completion.
    """
    return [*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))]
