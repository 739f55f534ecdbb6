"""Transformers, implemented as thin flax modules over pure functions.

`functional` and `ops` contain arithmetic without parameters; `ops` is tuned for each platform.
Small modules are in `layers`, attention and transformer blocks are in `block`, and the loop over
blocks is in `stack`. The models are in `transformer`, `encoder_decoder` and `streaming`, and
`factory` builds them from configs. Other models, such as recurrent networks, are re-exported from
`transformer_jax.lectures`.
"""

from transformer_jax.config.kinds import later
from transformer_jax.models.attention_weights import attention_weights
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
from transformer_jax.models.inputs import frame_positions
from transformer_jax.models.lora import (
    apply_lora,
    init_lora,
    lora_loss,
    merge_lora,
    unmerge_lora,
    with_adapters,
)
from transformer_jax.models.ops import layer_norm, rms_norm
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
from transformer_jax.models.stack import stack_layers, unstack_layers
from transformer_jax.models.streaming import (
    StreamingEncoder,
    chunk_mask,
    rebase_cache,
    rebase_state,
    receptive_field,
    stream_attention,
)
from transformer_jax.models.transformer import Decoder, Encoder

__getattr__, __dir__ = later(
    __name__,
    {
        name: f"transformer_jax.lectures.{module}"
        for module, names in {
            "convolution": ("ConvolutionLM",),
            "ngram": ("NgramLM", "count_ngrams"),
            "recent_tokens": ("RecentTokens", "init_recent_tokens"),
            "recurrent": (
                "RecurrentLM", "RecurrentSeq2Seq", "RecurrentTagger", "init_recurrent_state",
                "RecurrentState", "SourceMemory",
            ),
            "window": ("WindowLM",),
        }.items()
        for name in names
    },
)  # fmt: skip

__all__ = [
    "ConvolutionLM",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "NgramLM",
    "QuantizedKernel",
    "RecentTokens",
    "RecurrentLM",
    "RecurrentSeq2Seq",
    "RecurrentState",
    "RecurrentTagger",
    "SourceMemory",
    "StreamingEncoder",
    "WindowLM",
    "apply_lora",
    "apply_rope",
    "attention_weights",
    "build",
    "cache_bytes",
    "chunk_mask",
    "count_ngrams",
    "frame_positions",
    "init_cache",
    "init_decode_state",
    "init_lora",
    "init_paged_cache",
    "init_params",
    "init_recent_tokens",
    "init_recurrent_state",
    "layer_norm",
    "learned",
    "lora_loss",
    "merge_lora",
    "num_params",
    "places",
    "quantize",
    "rebase_cache",
    "rebase_state",
    "receptive_field",
    "rms_norm",
    "rope_frequencies",
    "shaw_scores",
    "shaw_values",
    "sinusoidal",
    "stack_layers",
    "stream_attention",
    "unmerge_lora",
    "unstack_layers",
    "with_adapters",
]
