"""Run the commands of `python -m transformer_jax` and the flags of `train.py`.

A command parses its flags, calls the library and prints; an error is one line. Nothing here
computes: whatever a command does can be called from Python in the folders below.
"""
