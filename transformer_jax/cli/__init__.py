"""Commands of `python -m transformer_jax`, and flags of `train.py`.

A command parses its flags, calls the library, and prints the result or a one-line error. No
computation happens in this folder, so every command has an equivalent in Python.
"""
