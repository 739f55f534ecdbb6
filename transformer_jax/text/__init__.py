"""Turn text into text with a trained model: complete, answer, translate.

`text_model` loads a run folder or a published model with its tokenizer; `completion` and
`translation` decode with it. The commands that print are in `cli`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

import jax

from transformer_jax.config.architectures import model_shape
from transformer_jax.config.keywords import refuse_keywords
from transformer_jax.decoding.logit_processors import HistoryProcessor
from transformer_jax.decoding.samplers import Greedy, Sample, Temperature
from transformer_jax.text import completion
from transformer_jax.text.text_model import TextModel, load_run, load_text_model

__all__ = ["TextModel", "complete", "load_run", "load_text_model"]


def complete(
    model: TextModel,
    prompt: str,
    num_tokens: int = 400,
    *,
    sampler: Sample | Greedy | None = None,
    key: jax.Array | None = None,
    processors: Sequence[HistoryProcessor] = (),
    stop: str | Sequence[str] = (),
    **unknown: Never,
) -> str:
    """Return the text after `prompt`, by the likeliest tokens unless a `Sample` and a key draw it.

    `model` is what `load_run` or `load_text_model` gives. The text ends before the first `stop`
    string, at a token that ends a text, or after `num_tokens` tokens. `completion.complete` yields
    it a piece at a time.
    """
    if unknown:
        refuse_keywords(complete, unknown)
    if not isinstance(model, TextModel):
        given = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        rule = "must be a TextModel, as load_text_model(FOLDER) and load_run(FOLDER) give"
        raise ValueError(f"model is {given}: {rule}")
    if model_shape(model.config) != "decoder":
        rule = "must be a decoder: translation.translate writes with an encoder-decoder"
        raise ValueError(f"model is of shape {model_shape(model.config)!r}: {rule}")
    if sampler is None or isinstance(sampler, Greedy):
        sampler, key = Sample(Temperature(0.0)), jax.random.key(0)
    if key is None:
        raise ValueError(f"key is None: {sampler!r} draws random numbers")
    read = completion.read_prompt(model.tokenizer, prompt, model.begin_id)
    written = completion.complete(
        model.config, model.params, model.tokenizer, read, num_tokens, sampler=sampler, key=key,
        processors=(*model.processors, *processors), stop=stop, stop_ids=model.stop_ids,
    )  # fmt: skip
    return "".join(written)
