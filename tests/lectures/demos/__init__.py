"""Tests of the demonstrations of the lectures."""
