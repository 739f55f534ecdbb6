"""Tests of `transformer_jax.lectures`."""
