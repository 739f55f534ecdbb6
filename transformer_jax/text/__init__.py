"""Load a model with its tokenizer, and decode a text with it: `use` has the one object over both.

`text_model` loads a run folder or a published model; `completion` and `translation` decode;
`writer` turns tokens into text.
"""
