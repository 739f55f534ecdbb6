"""Trained and published text models: generate, chat, score, inspect, classify and evaluate.

`language_model` defines `load` and the model object, `options` the generation options. `reading`
tokenizes inputs. `scores` computes the probability of a text, `continuations` the
probabilities of texts after a context, and `choices` those of multiple-choice answers. `inspect`
shows internal values, and `evaluation` computes the metrics of a task. The commands call the same
functions.
"""
