"""Look for what a transformer has learnt: tools over `capture=` and `edit=` of `model.apply`.

`lens` reads logits out of the stream and takes them apart, `tuned_lens` does so through trained
translators, `edits` makes edits that ablate and steer, and `steering` vectors for them, `patching`
puts values of one prompt into the pass over another, `paths` does so along some paths alone,
`heads` scores and follows the weights of attention, `circuits` has the singular values of what a
head reads and writes, `probes` fits linear maps that read a property out of values, `gradients`
attributes an output to the tokens that were read, `dictionaries` writes values as sums of few
directions, which `dictionary_task` trains, and `hooks` knows the names that TransformerLens has for
places.

    from transformer_jax import inside

    table = inside.patch(model, params, clean, corrupted, "block_*/residual", metric)
"""

from transformer_jax.inside.circuits import Circuits, circuits
from transformer_jax.inside.dictionaries import (
    Dictionary,
    DictionaryScores,
    FeatureExamples,
    dictionary_scores,
    feature_examples,
)
from transformer_jax.inside.dictionary_task import (
    DictionaryTask,
    dictionary_learner,
    load_dictionary,
)
from transformer_jax.inside.edits import add, mean, resample, scale, zero
from transformer_jax.inside.gradients import integrated_gradients
from transformer_jax.inside.heads import (
    HeadScores,
    attention_entropy,
    attention_rollout,
    head_scores,
    repeated_tokens,
)
from transformer_jax.inside.hooks import place_of_hook
from transformer_jax.inside.lens import LogitAttribution, logit_attribution, logit_lens
from transformer_jax.inside.patching import attribution_patching, patch
from transformer_jax.inside.paths import path_patching
from transformer_jax.inside.probes import Probe, probe
from transformer_jax.inside.steering import steering_vector
from transformer_jax.inside.tuned_lens import (
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
