"""The commands of `python -m transformer_jax` and the flags of `train.py`.

A command parses its flags, calls the library and prints the result; an error is one line. No
computation happens in this folder, so every command has an equivalent in Python.
"""
