"""Trained and published models on text: generate, chat, score, inspect, classify and evaluate.

`language_model` contains `load` and the model object, `options` the options of generation and
`reading` the tokenisation of inputs. `scores` computes the probability of a text, `continuations`
that of texts after contexts, and `choices` multiple choice. `inspect` shows internal values, and
`evaluation` measures a task on a file. The commands `generate`, `evaluate` and `inspect` call the
same functions.
"""
