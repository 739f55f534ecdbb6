"""Interpretability tools based on `model.edited` and the `capture` argument of `model.apply`.

- `lens`: logits and logit attribution from the stream; `tuned_lens`: logits through translators.
- `edits`: ablation and steering; `steering`: steering vectors.
- `patching`: activation patching and attribution patching; `paths`: path patching.
- `heads`: head scores, attention rollout and entropy; `circuits`: singular values of QK and OV.
- `probes`: linear probes; `gradients`: integrated gradients.
- `dictionaries`: sparse autoencoders and transcoders; `dictionary_task` trains them.
- `hooks`: TransformerLens hook names.

For example, this code patches the residual stream of each block:

    from transformer_jax import interpret

    table = interpret.patch(model, params, clean, corrupted, "block_*/residual", metric)
"""

from transformer_jax.interpret.circuits import Circuits, circuits
from transformer_jax.interpret.dictionaries import (
    Dictionary,
    DictionaryScores,
    FeatureExamples,
    dictionary_scores,
    feature_examples,
)
from transformer_jax.interpret.dictionary_task import (
    DictionaryTask,
    dictionary_learner,
    load_dictionary,
)
from transformer_jax.interpret.edits import add, mean, resample, scale, zero
from transformer_jax.interpret.gradients import integrated_gradients
from transformer_jax.interpret.heads import (
    HeadScores,
    attention_entropy,
    attention_rollout,
    head_scores,
    repeated_tokens,
)
from transformer_jax.interpret.hooks import place_of_hook
from transformer_jax.interpret.lens import LogitAttribution, logit_attribution, logit_lens
from transformer_jax.interpret.patching import attribution_patching, patch
from transformer_jax.interpret.paths import path_patching
from transformer_jax.interpret.probes import Probe, probe
from transformer_jax.interpret.steering import steering_vector
from transformer_jax.interpret.tuned_lens import (
    Translators,
    fit_tuned_lens,
    lens_divergence,
    tuned_lens,
)

__all__ = [
    "Circuits",
    "Dictionary",
    "DictionaryScores",
    "DictionaryTask",
    "FeatureExamples",
    "HeadScores",
    "LogitAttribution",
    "Probe",
    "Translators",
    "add",
    "attention_entropy",
    "attention_rollout",
    "attribution_patching",
    "circuits",
    "dictionary_learner",
    "dictionary_scores",
    "feature_examples",
    "fit_tuned_lens",
    "head_scores",
    "integrated_gradients",
    "lens_divergence",
    "load_dictionary",
    "logit_attribution",
    "logit_lens",
    "mean",
    "patch",
    "path_patching",
    "place_of_hook",
    "probe",
    "repeated_tokens",
    "resample",
    "scale",
    "steering_vector",
    "tuned_lens",
    "zero",
]
