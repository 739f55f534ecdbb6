"""Use a trained or a published model on texts: generate, chat, score, attend, label, evaluate.

`language_model` holds the one object that does it, and `load`; `scores` the probability of a text,
`attention_weights` its weights, `evaluation` the measures of a task on a file. The commands
`generate` and `evaluate` are these with flags.
"""
