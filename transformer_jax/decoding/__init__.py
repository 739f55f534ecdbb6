"""Decoding for any model that provides a step: sampling, beam search, speculation and serving.

`step` defines the interface of a model, `generation` contains the loop, and `samplers` and
`logit_processors` choose the tokens. This package works with token IDs. For strings, see `text`.
"""

from transformer_jax.config.kinds import later
from transformer_jax.decoding.arguments import bucket
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import Beams, GNMTPenalty, LengthPenalty, beam_search
from transformer_jax.decoding.constraints import Constraint
from transformer_jax.decoding.continuous_batching import Completion, Request, serve_requests
from transformer_jax.decoding.generation import Generation, TopTokens, generate, prefill, stream
from transformer_jax.decoding.logit_processors import (
    Ban,
    BanSequences,
    Force,
    ForceLast,
    FrequencyPenalty,
    History,
    HistoryProcessor,
    MinLength,
    NoRepeatNGram,
    PresencePenalty,
    RepetitionPenalty,
)
from transformer_jax.decoding.proposers import Draft, PromptLookup, Proposal, Proposer
from transformer_jax.decoding.samplers import (
    Greedy,
    MinP,
    RowSampling,
    Sample,
    Sampler,
    Temperature,
    TopK,
    TopP,
    Typical,
)
from transformer_jax.decoding.slots import Slots, admit, advance_slots, init_slots, release
from transformer_jax.decoding.speculative import Speculation, speculate
from transformer_jax.decoding.step import ModelStep, Step, make_step

__getattr__, __dir__ = later(
    __name__,
    {
        "RecentTokensStep": "transformer_jax.lectures.recent_tokens",
        "RecurrentStep": "transformer_jax.lectures.recurrent",
    },
)

__all__ = [
    "Ban",
    "BanSequences",
    "Beams",
    "Completion",
    "Constraint",
    "Draft",
    "Force",
    "ForceLast",
    "FrequencyPenalty",
    "GNMTPenalty",
    "Generation",
    "Greedy",
    "History",
    "HistoryProcessor",
    "LengthPenalty",
    "MinLength",
    "MinP",
    "ModelStep",
    "NoRepeatNGram",
    "PresencePenalty",
    "PromptLookup",
    "Proposal",
    "Proposer",
    "RecentTokensStep",
    "RecurrentStep",
    "RepetitionPenalty",
    "Request",
    "RowSampling",
    "Sample",
    "Sampler",
    "Slots",
    "Speculation",
    "Step",
    "Temperature",
    "TopK",
    "TopP",
    "TopTokens",
    "Typical",
    "admit",
    "advance_slots",
    "beam_search",
    "bucket",
    "fork",
    "generate",
    "init_slots",
    "make_step",
    "prefill",
    "release",
    "serve_requests",
    "speculate",
    "stream",
]  # fmt: skip
