"""Use a trained or a published model on texts: generate, chat, score, inspect, label, evaluate.

`language_model` has the object that does it, and `load`; `options` how a text is written;
`reading` how one is read. `scores` has the probability of a text, `continuations` that of texts
after contexts, `choices` multiple choice, `inspect` what is inside the model, `evaluation` the
measures of a task on a file. The commands `generate`, `evaluate` and `inside` are these with flags.
"""
