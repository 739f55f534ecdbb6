"""Lecture material: models that preceded transformers, toy tasks, demonstrations, comparisons."""
