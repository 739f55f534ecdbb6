"""Tests of the wing of the lectures."""
