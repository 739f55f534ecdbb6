"""Use a trained or a published model on texts: generate, chat, score, attend, label, evaluate.

`language_model` holds the one object that does it, and `load`; `scores` the probability of a text,
`continuations` that of texts after contexts, `choices` multiple choice, `attention_weights` the
weights of a text, `looking` what else is inside a transformer, `evaluation` the measures of a task
on a file. The commands `generate`, `evaluate` and `inside` are these with flags.
"""
