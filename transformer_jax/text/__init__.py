"""Trained and published text models: generate, chat, score, inspect, classify and evaluate.

`language_model` defines `load` and the model object. `options` defines the generation options, and
`reading` tokenizes inputs. `scores` computes the probability of a text, `continuations` computes
the probabilities of continuations after a context, and `choices` scores multiple-choice questions.
`inspect` shows internal values, and `evaluation` computes the metrics of a task. The commands call
the same functions.
"""
