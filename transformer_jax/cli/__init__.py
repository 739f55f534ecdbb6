"""The commands of `python -m transformer_jax` and the flags of `train.py`.

A command parses its flags, calls the library and prints the result; an error is one line. Every
command has an equivalent in Python, because no computation happens in this folder.
"""
